"""torch's caching allocator in all its settings. fsdp_c trains to bitwise FSDP1's results."""

from __future__ import annotations

import re

import pytest

from tests.real_cuda.programs import run
from tests.settings import EXHAUSTIVE

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


def test_failed_allocation_raises_and_leaks_no_memory() -> None:
    """One in five of a step's, or each with pytest --exhaustive. Without caching each asks the device."""
    every = "1" if EXHAUSTIVE else "5"
    for status, said in run("no_memory", PYTORCH_NO_CUDA_MEMORY_CACHING="1", EVERY=every):
        assert status == 0 and said.count("raised") == 4, said[:3000]
        # other allocations are of the model's operators and of torch
        named = re.findall(r"(\d+) of a unit", said)
        assert len(named) == 4 and sum(map(int, named)) >= 3, said
