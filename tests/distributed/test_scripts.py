"""Scripts of examples/: plain_torchrun.py with torch and under ``torchrun -m fsdp_c``; ema.py; weight_sync.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.processes import ROOT, output_of_script, run_python

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PLAIN = EXAMPLES / "plain_torchrun.py"
WIDTH, ROWS, HELD_OUT, STEPS = 32, 12, 1 << 20, 6  # of ema.py


def test_losses_of_an_unchanged_script_are_bitwise_those_of_torch() -> None:
    assert "fsdp_c" not in PLAIN.read_text().split('"""')[2]  # after its docstring
    torchs = output_of_script(PLAIN, "--steps", "4", "--bf16")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fsdp_c"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_LOGS": "fsdp_c"}
    done = run_python(*launcher, PLAIN, "--steps", "4", "--bf16", cwd=ROOT, **settings)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = re.findall(r"step \d+: loss .*", torchs)
    assert len(losses) == 4 and re.findall(r"step \d+: loss .*", done.stdout) == losses
    # TORCH_LOGS shows the units of one rank, once
    assert done.stderr.count("4 units and segments, ") == 1 and "FULL_SHARD over 2" in done.stderr


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (model(rows) - rows.roll(1, 1)).square().mean()


def test_ema_averages_as_the_plain_model_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = []
    for ranks, resume in ((2, []), (3, ["--resume"])):
        arguments = ["--steps", str(STEPS), "--out", str(tmp_path), *resume]
        printed = output_of_script(EXAMPLES / "ema.py", *arguments, ranks=ranks)
        (losses,) = re.findall(r"step \d+: held-out loss (\S+), with the average (\S+)", printed)
        found += map(float, losses)
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


def test_weight_sync_gives_an_engine_in_another_process_the_weights_of_each_step() -> None:
    printed = output_of_script(EXAMPLES / "weight_sync.py")
    differences = [float(one) for one in re.findall(r"differ by (\S+)", printed)]
    assert len(differences) == 4 and max(differences) < 1e-5
    losses = [float(one) for one in re.findall(r"loss (\S+),", printed)]
    assert losses[-1] < losses[0] / 4
