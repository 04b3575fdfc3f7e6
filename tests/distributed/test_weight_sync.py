"""examples/weight_sync.py as a user runs it: the engine has the weights of each step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_engine_in_another_process_has_the_weights_of_each_step() -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/weight_sync.py"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    differences = [float(one) for one in re.findall(r"differ by (\S+)", done.stdout)]
    assert len(differences) == 4 and max(differences) < 1e-5
    losses = [float(one) for one in re.findall(r"loss (\S+),", done.stdout)]
    assert losses[-1] < losses[0] / 4
