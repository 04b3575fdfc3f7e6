"""fsdp_c with torch's own caching allocator and ProcessGroupNCCL: bitwise FSDP1's results in all settings, and
errors when memory runs out or a rank is lost.
"""

from __future__ import annotations

import re

import pytest

from tests.real_cuda.programs import FAILS, HANGS, run
from tests.settings import EXHAUSTIVE

SETTINGS = {
    "lazy": {},
    "eager": {"EAGER": "1"},
    "blocking wait": {"TORCH_NCCL_BLOCKING_WAIT": "1"},
    "no error handling": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    "desync debug": {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_ENABLE_TIMING": "1"},
    "flight recorder": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
    "NaN check": {"TORCH_NCCL_NAN_CHECK": "1"},
    "recorded streams": {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"},
    "stashes": {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"},
    "expandable segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "split": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:21"},
    "rounded": {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"},
    "collected": {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.6"},
    "cudaMallocAsync": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_is_fsdp1s_to_the_bit(settings: dict[str, str]) -> None:
    for status, said in run("both", **settings):
        assert status == 0 and "equal: 4" in said, said[-3000:]


@pytest.mark.parametrize(("settings", "splits"), [({}, 0), ({"EAGER": "1"}, 2)], ids=["lazy", "split"])
def test_hybrid_training_is_fsdp1s_to_the_bit(settings: dict[str, str], splits: int) -> None:
    """A mesh has two groups per rank. torch splits them off the global communicator if that is initialized
    eagerly.
    """
    for status, said in run("both", world_size=4, HYBRID="1", FAKE_CUDA_DEVICES="4", **settings):
        assert status == 0 and f"equal: 4, split: {splits}" in said, said[-3000:]


def test_failed_allocation_raises_and_leaks_no_memory() -> None:
    """One in five of a step's, or each with pytest --exhaustive. Without caching each asks the device."""
    every = "1" if EXHAUSTIVE else "5"
    for status, said in run("no_memory", PYTORCH_NO_CUDA_MEMORY_CACHING="1", EVERY=every):
        assert status == 0 and said.count("raised") == 4, said[:3000]
        # other allocations are of the model's operators and of torch
        named = re.findall(r"(\d+) of a unit", said)
        assert len(named) == 4 and sum(map(int, named)) >= 3, said


def test_destroying_a_group_with_pending_collectives_works() -> None:
    assert [(status, said.strip()) for status, said in run("ends_inside_work")] == [(0, "destroyed")] * 2


def test_a_rank_that_aborts_its_communicators_ends_the_others() -> None:
    """Rank 1 raises by itself, and torch's watchdog ends rank 0."""
    for status, said in run("one_aborts", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="30"):
        assert status != 0 and "one step" in said and "all steps" not in said, said[-3000:]


@pytest.mark.parametrize("what", [HANGS, FAILS], ids=["hangs", "fails"])
def test_a_rank_whose_collective_is_lost_ends_the_others(what: int) -> None:
    """torch's watchdog ends both processes: rank 0, which waits, and rank 1, which issued the collective."""
    for status, said in run("one_goes_wrong", DISTURB=str(what), TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="30"):
        assert "one step" in said
        assert status != 0 and "all steps" not in said, said[-3000:]
        assert "timed out" in said or "timeout" in said.lower() or "remote process exited" in said, said[
            -3000:
        ]
