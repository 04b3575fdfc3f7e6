"""A torchrun script that knows nothing of fsdp_c, under torch and under ``-m fsdp_c`` (H-004)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "plain_torchrun.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*launcher: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*TORCHRUN, *launcher, str(SCRIPT), "--steps", "4", "--bf16"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        printed, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    return printed


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """By implementation what the script printed: each step's loss and gradient norm, exactly."""
    running = {"torch": start(), "fsdp_c": start("-m", "fsdp_c")}
    return {which: finish(process) for which, process in running.items()}


def test_losses_are_those_of_torch_to_the_last_bit(printed: dict[str, str]) -> None:
    assert "fsdp_c" not in SCRIPT.read_text().split('"""')[2]  # behind its docstring
    assert printed["torch"].count("loss ") == 4
    assert printed["fsdp_c"] == printed["torch"]
