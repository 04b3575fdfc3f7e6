"""Streams that run their work as late as the program allows must give the same bits as streams that run it at
once.

Work that no wait orders runs last, so that a program with a missing wait gives wrong results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests import simulated_gpu as device
from tests.ranks import on_ranks

if not device.is_on():
    pytest.skip("needs the simulated GPU: python -m tests.simulated_gpu", allow_module_level=True)

import simulated_gpu  # noqa: E402

from tests.cuda.test_parity import OPTIONS, assert_parity, over  # noqa: E402

TIMEOUT_S = 100.0
STREAMS = ("side", "default", "all")


@contextlib.contextmanager
def late(streams: str) -> Iterator[None]:
    simulated_gpu.put_off(streams)
    try:
        yield
    finally:
        simulated_gpu.put_off("")


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_training_is_the_same(rank: int, name: str, streams: str) -> None:
    with over("nccl") as options:
        assert_parity(
            rank, name, late(streams), no_sync=name == "FULL_SHARD", checkpoint=False, options=options
        )


@pytest.mark.parametrize("streams", STREAMS)
@on_ranks(4, TIMEOUT_S)
def test_hybrid_training_is_the_same(rank: int, streams: str) -> None:
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    (shard, _), (replicate, _) = (dist.new_subgroups_by_enumeration(ranks) for ranks in (rows, columns))
    options = {
        "process_group": (shard, replicate),
        "sharding_strategy": torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD,
    }
    with over("gloo"):
        assert_parity(rank, "FULL_SHARD", late(streams), no_sync=True, checkpoint=True, options=options)


@pytest.mark.parametrize("streams", STREAMS)
def test_work_that_nothing_waits_for_comes_last(streams: str) -> None:
    """A missing wait changes the values, without any help from the race detector."""
    side = torch.cuda.Stream()
    with late(streams):
        made = torch.ones(100, device="cuda")
        torch.cuda.synchronize()
        made.add_(1)
        with torch.cuda.stream(side):  # waits for nothing
            doubled = made * 2
        copied = doubled + 0
        side.synchronize()
        values = doubled.cpu(), copied.cpu()
    is_right = [bool((each == 4).all()) for each in values]
    assert simulated_gpu.reports()
    assert is_right == {"side": [True, False], "default": [False, False], "all": [False, False]}[streams]
