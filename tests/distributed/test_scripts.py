"""A torchrun script that knows nothing of fsdp_c, under torch and under ``-m fsdp_c``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "plain_torchrun.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


# After the last step a thread of gloo's may drop a tensor when the interpreter has ended, which aborts a process
# of torch alone: it gets its turn here.
WITH_TORCH = (
    "--no-python",
    sys.executable,
    "-c",
    "import runpy, sys, time; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__'); time.sleep(2)",
)


def start(*launcher: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_LOGS": "fsdp_c"}
    command = [*TORCHRUN, *launcher, str(SCRIPT), "--steps", "4", "--bf16"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        printed, said = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    return printed, said


def steps(printed: str) -> list[str]:
    """What the script printed of each step; on some versions of torch gloo prints as well, beside it."""
    return re.findall(r"step \d+: loss .*", printed)


@pytest.fixture(scope="module")
def finished() -> dict[str, tuple[str, str]]:
    """By implementation what the script printed, each step's loss and gradient norm exactly, and what was
    logged."""
    running = {"torch": start(*WITH_TORCH), "fsdp_c": start("-m", "fsdp_c")}
    return {which: finish(process) for which, process in running.items()}


def test_losses_are_those_of_torch_to_the_last_bit(finished: dict[str, tuple[str, str]]) -> None:
    assert "fsdp_c" not in SCRIPT.read_text().split('"""')[2]  # behind its docstring
    assert len(steps(finished["torch"][0])) == 4
    assert steps(finished["fsdp_c"][0]) == steps(finished["torch"][0])


def test_torch_logs_show_the_units_once(finished: dict[str, tuple[str, str]]) -> None:
    """On one rank, and of fsdp_c: what was compared above was not torch twice."""
    assert finished["fsdp_c"][1].count("4 units and segments, ") == 1
    assert "FULL_SHARD over 2" in finished["fsdp_c"][1]
    assert "4 units and segments, " not in finished["torch"][1]
