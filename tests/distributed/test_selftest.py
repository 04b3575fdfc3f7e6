"""python -m fsdp_c selftest passes on ranks that it starts itself, and names failing checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fsdp_c import selftest
from tests.processes import ROOT, output_of_python, run_script

VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FAILING = """
import sys
from fsdp_c import selftest
kernels = selftest._kernels
def fail_on_rank_1(device):
    if selftest.dist.get_rank() == 1:
        raise ValueError("no such luck")
    return kernels(device)
selftest._kernels = fail_on_rank_1
import torch.distributed.fsdp as torchs
class Wrong(torchs.FullyShardedDataParallel):
    def forward(self, x):
        return super().forward(x) + 1
torchs.FullyShardedDataParallel = Wrong
sys.exit(selftest.main("cpu", 8))
"""


@pytest.mark.slow
def test_it_passes_on_ranks_of_its_own_and_ends_with_a_report() -> None:
    report = output_of_python("-m", "fsdp_c", "selftest", "--device", "cpu", "--width", "8", **VARIABLES)
    for line in ("2 ranks on cpu", "kernels: the bits of", *(f"{name}: loss" for name in selftest.RUNS)):
        assert f"\n{line}" in report
    assert "a checkpoint: saved and loaded with equal values\nall is well" in report


@pytest.mark.slow
def test_failures_are_named_with_rank_and_parameter_and_the_rest_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run_script(script)
    assert done.returncode == 1
    assert re.search(r"(?s)\nkernels: FAILED on rank 1: Traceback.*\nValueError: no such luck\n", done.stdout)
    for rank in range(2):
        message = (
            rf"(?s)FULL_SHARD: FAILED on rank {rank}: Traceback.*\nAssertionError: losses and parameters: "
            r"Tensor-likes are not equal.*for item \['0.bias'\]"
        )
        assert re.search(message, done.stdout), done.stdout + done.stderr
    assert "a checkpoint: saved and loaded with equal values\n" in done.stdout
    assert "\nFAILED: kernels, FULL_SHARD, bfloat16, original parameters\n" in done.stdout


def test_a_difference_is_named_with_its_place() -> None:
    expected = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    selftest._same("x", expected.clone(), expected)
    with pytest.raises(AssertionError, match=r"(?s)^x: .* 2 / 4 .* 2.0 at index \(1, 0\)"):
        selftest._same("x", expected + torch.tensor([[0.0, 0.0], [2.0, 1.0]]), expected)
    with pytest.raises(AssertionError, match="^x: .*dtype"):
        selftest._same("x", expected.double(), expected)
