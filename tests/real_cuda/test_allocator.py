"""torch's own caching allocator, in its settings: fsdp_c trains to FSDP1's bits, and plan's peak is the allocator's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.real_cuda.programs import ROOT, run

SETTINGS = {
    "default": "",
    "expandable segments": "expandable_segments:True",
    "split": "max_split_size_mb:21",
    "rounded": "roundup_power2_divisions:4",
    "collected": "garbage_collection_threshold:0.6",
    "CUDA's own": "backend:cudaMallocAsync",
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_is_fsdp1s_to_the_bit(setting: str) -> None:
    for status, said in run("both", PYTORCH_ALLOC_CONF=setting):
        assert status == 0 and "equal: 4" in said, said[-3000:]


def test_training_without_a_cache_is_fsdp1s_to_the_bit() -> None:
    for status, said in run("both", PYTORCH_NO_CUDA_MEMORY_CACHING="1"):
        assert status == 0 and "equal: 4" in said, said[-3000:]


def planned(setting: str, first: int, last: int) -> tuple[list[str], dict[str, int]]:
    """What differs between plan and the allocator over these trees, and how many there were."""
    command = [sys.executable, "-m", "tests.real_cuda.unit_trees", str(first), str(last)]
    settings = {"PYTORCH_ALLOC_CONF": setting, "FAKE_NCCL_ALONE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    *differences, counts = done.stdout.splitlines()
    return differences, ast.literal_eval(counts)


def test_the_planned_peak_is_the_allocator_s_over_random_trees() -> None:
    differences, counts = planned("", 0, 40)
    assert differences == []
    assert counts["trees"] > 20
