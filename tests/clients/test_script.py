"""A script without any mention of fsdp_c, run under torchrun with fsdp_c installed before all other imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.clients.support import environment, require

require("accelerate")

LIBRARY = "script"


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
