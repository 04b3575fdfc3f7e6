"""A script without any mention of fsdp_c, run under torchrun with fsdp_c installed before all other imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.clients.support import ON_CPU, ROOT, environment, require, train_reference

require("accelerate")

LIBRARY = "script"
LAUNCH = """
import sys
import fsdp_c.compat.scripts
fsdp_c.install()
from tests.clients.support import gpus_that_are_cpus
gpus_that_are_cpus()
fsdp_c.compat.scripts.run_script(sys.argv[1], sys.argv[2:])
"""


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python"]
    done = subprocess.run(
        [*command, "--standalone", sys.executable, "-c", LAUNCH, *arguments],
        env=environment(ACCELERATE_USE_CPU=str(ON_CPU)),
        capture_output=True,
        text=True,
        timeout=600,
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
        inputs = [
            torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)
        ]
        return F.mse_loss(model(torch.cat(inputs)), torch.ones(8, 1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train_reference(model, loss_of, range(4), optimizer=optimizer, max_norm=0.5)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)


LAUNCHED = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
model = FullyShardedDataParallel(torch.nn.Linear(3, 5), device_id=device)
model(torch.ones(2, 3)).sum().backward()
found = {"class": type(model).__module__, "ranks": dist.get_world_size(), "arguments": sys.argv[1:]}
with open(f"{sys.argv[1]}.{dist.get_rank()}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_accelerate_launch_runs_a_script_under_fsdp_c(tmp_path):
    script, told = tmp_path / "train.py", str(tmp_path / "found")
    script.write_text(LAUNCHED)
    options = ["--use_fsdp", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *options,
            "-m",
            "fsdp_c",
            str(script),
            told,
            "--lr",
            "0.1",
        ],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads(Path(f"{told}.{rank}").read_text())
        assert found["class"].startswith("fsdp_c")
        assert (found["ranks"], found["arguments"]) == (2, [told, "--lr", "0.1"])
