"""python -m fsdp_c selftest: it passes here, on ranks that it starts itself, and names what fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fsdp_c import selftest
from tests.processes import ROOT, output_of_python, run_python

VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FAILING = """
import sys
from fsdp_c import selftest
selftest.CASES = {name: case for name, case in selftest.CASES.items() if name == "NO_SHARD"}
def kernels(device):
    if selftest.dist.get_rank() == 1:
        raise ValueError("no such luck")
selftest._kernels = kernels
sys.exit(selftest.main("cpu", 8))
"""
DIFFERING = """
import sys
from fsdp_c import selftest
selftest.CASES = {"FULL_SHARD": selftest.Case({})}
class Wrong(selftest._fsdp1()):
    steps = 0
    def forward(self, x):
        self.steps += 1
        is_wrong = self.steps == selftest.STEPS and selftest.dist.get_rank() == 1
        return super().forward(x) + int(is_wrong)
selftest._fsdp1 = lambda: Wrong
sys.exit(selftest.main("cpu", 8))
"""


def test_it_passes_on_ranks_of_its_own_and_ends_with_a_report() -> None:
    command = ["-m", "fsdp_c", "selftest", "--device", "cpu", "--width", "8"]
    _, report = output_of_python(*command, **VARIABLES).split("---- to paste into a report ----")
    for line in ("2 ranks on cpu", "kernels: the bits of", *(f"{name}: loss" for name in selftest.CASES)):
        assert f"\n{line}" in report
    assert "all is well, in" in report.splitlines()[-1]


def run_on_ranks(count: int, script: Path, text: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return run_python(*torchrun, script, **VARIABLES)


def test_what_fails_on_one_rank_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = run_on_ranks(4, tmp_path / "failing.py", FAILING)
    assert done.returncode == 1
    assert "kernels: FAILED on rank 1: ValueError: no such luck" in done.stdout
    assert "HYBRID_SHARD: loss" in done.stdout
    assert "a checkpoint: saved, loaded, and the same\nFAILED: kernels, in" in done.stdout


def test_a_loss_that_differs_on_one_rank_is_told_with_the_parameter(tmp_path: Path) -> None:
    done = run_on_ranks(2, tmp_path / "differing.py", DIFFERING)
    assert done.returncode == 1
    for name in ("one rank", "FULL_SHARD"):
        told = rf"{name}: FAILED on rank 1: .*: the loss of step 19 is .*; parameter 0.weight: element 0 is"
        assert re.search(told, done.stdout), done.stdout + done.stderr
    assert "FULL_SHARD: FAILED on rank 0: AssertionError: parameter 0.weight: element 0 is" in done.stdout
    assert "a checkpoint: saved, loaded, and the same\nFAILED: one rank, FULL_SHARD, in" in done.stdout


def test_the_first_difference_is_told() -> None:
    expected = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    selftest._same("x", expected.clone(), expected)
    with pytest.raises(AssertionError, match=r"parameter x: element 2 is 5.0, not 3.0; 2 of 4 differ"):
        selftest._compare({"x": expected + torch.tensor([[0.0, 0.0], [2.0, 1.0]])}, {"x": expected})
    with pytest.raises(AssertionError, match="parameters are y, but should be x"):
        selftest._compare({"y": expected}, {"x": expected})
    with pytest.raises(AssertionError, match=r"x: torch.float64 of \[2, 2\], not torch.float32"):
        selftest._same("x", expected.double(), expected)
