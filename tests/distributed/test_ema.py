"""examples/ema.py run as by a user: it averages like the plain model, on one number of ranks and then
another.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.processes import ROOT, output_of_python

pytestmark = pytest.mark.slow

WIDTH, ROWS, HELD_OUT, STEPS = 32, 12, 1 << 20, 6


def run(ranks: int, *arguments: str) -> list[float]:
    """Return the held-out losses of the trained model and of its average."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "examples/ema.py"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said = output_of_python("-m", *command, "--steps", str(STEPS), *arguments, cwd=ROOT, **settings)
    (losses,) = re.findall(r"step \d+: held-out loss (\S+), with the average (\S+)", said)
    return list(map(float, losses))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (model(rows) - rows.roll(1, 1)).square().mean()


def test_the_average_is_that_of_the_plain_model_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = [*run(2, "--out", str(tmp_path)), *run(3, "--out", str(tmp_path), "--resume")]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for step in range(2 * STEPS):
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(plain)
        if step % STEPS == STEPS - 1:
            expected += [loss_of(model, HELD_OUT).item() for model in (plain, average)]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len({round(loss, 3) for loss in found}) == 4
