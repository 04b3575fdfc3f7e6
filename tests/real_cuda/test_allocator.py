"""torch's own caching allocator, in its settings: fsdp_c trains to FSDP1's bits, and plan's peak is what is
taken."""

from __future__ import annotations

import ast
import os
import re
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
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_is_fsdp1s_to_the_bit(setting: str) -> None:
    for status, said in run("both", PYTORCH_ALLOC_CONF=setting):
        assert status == 0 and "equal: 4" in said, said[-3000:]


PLANS = {  # how tests/real_cuda/unit_trees.py compares, of how many seeds, and with what settings
    "pool": ("pool", 8, {}),
    "collected": ("pool", 8, {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.6"}),
    "amid a pool of the script's own": ("nested", 8, {}),
    "cudaMallocAsync": ("no pool", 40, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "no caching": ("no pool", 40, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
}


@pytest.mark.parametrize(("how", "seeds", "settings"), PLANS.values(), ids=PLANS.keys())
def test_the_planned_peak_is_what_is_taken_over_random_trees(
    how: str, seeds: int, settings: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tests.real_cuda.unit_trees", "0", str(seeds), how]
    environment = os.environ | {"FAKE_NCCL_ALONE": "1"} | settings
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    *differences, counts = done.stdout.splitlines()
    assert differences == []
    assert ast.literal_eval(counts)["trees"] > 4


def test_an_allocation_that_finds_no_memory_is_told_and_leaves_nothing_behind() -> None:
    """One in five of a step's, or each: FSDP_C_EXHAUSTIVE=1. Without caching each asks the device."""
    every = "1" if os.environ.get("FSDP_C_EXHAUSTIVE") == "1" else "5"
    for status, said in run("no_memory", PYTORCH_NO_CUDA_MEMORY_CACHING="1", EVERY=every):
        assert status == 0 and said.count("raised") == 4, said[:3000]
        named = re.findall(r"(\d+) of a unit", said)  # the others are of the model's own work, and of torch's
        assert len(named) == 4 and sum(map(int, named)) >= 3, said


def test_a_unit_that_finds_no_room_is_named_with_the_rank_and_a_remedy() -> None:
    for rank, (status, said) in enumerate(run("no_room")):
        assert status == 0, said[-3000:]
        assert (
            f"rank {rank}, step 0: memory ran out while this rank waits in the all-gather of Sequential"
            in said
        )
