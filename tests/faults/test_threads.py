"""References and the interpreter's lock, with units in several threads at once: see
tests/faults/threads.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXHAUSTIVE = os.environ.get("FSDP_C_EXHAUSTIVE") == "1"
TIMEOUT_S = 1800 if EXHAUSTIVE else 400


@pytest.mark.timeout(TIMEOUT_S)
def test_threads_that_build_step_and_drop_units_do_not_disturb_each_other() -> None:
    rounds = 1000 if EXHAUSTIVE else 20
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-X",
        "faulthandler",
        "-m",
        "tests.faults.threads",
        str(rounds),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"wrong": [0, 0, 0, 0], "units": 0, "live": 0}
