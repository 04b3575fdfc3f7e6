"""A script that knows nothing of fsdp_c, started by torchrun with fsdp_c installed before anything else is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.clients.support import require, train_reference

require("accelerate")

LIBRARY = "script"
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = """
import sys
import fsdp_c.interop
fsdp_c.install()
from tests.clients.support import gpus_that_are_cpus
gpus_that_are_cpus()
fsdp_c.interop.run_script(sys.argv[1], sys.argv[2:])
"""


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--standalone", sys.executable, "-c", LAUNCH, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_losses_are_those_of_the_unsharded_model(tmp_path):
    torchrun(2, str(ROOT / "tests" / "clients" / "script.py"), str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["class"].startswith("fsdp_c") and found["arguments"] == [str(tmp_path)]

    from tests.clients.script import Block

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), Block(5, 5), Block(5, 5), nn.Linear(5, 1))

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)]
        return F.mse_loss(model(torch.cat(inputs)), torch.ones(8, 1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train_reference(model, loss_of, range(4), optimizer=optimizer, max_norm=0.5)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
