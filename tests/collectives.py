"""Differences of collectives between versions of torch: their names, and the results of the fake group.

Since torch 2.13 the all-gather and reduce-scatter of single tensors have new names beside the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c.compat.upstream import torch_version

_NEW = hasattr(dist, "all_gather_single")

ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
ALL_GATHERS = ["all_gather_single", "all_gather_into_tensor"] if _NEW else ["all_gather_into_tensor"]
REDUCE_SCATTERS = ["reduce_scatter_single", "reduce_scatter_tensor"] if _NEW else ["reduce_scatter_tensor"]


def init_fake_group(rank: int, world_size: int) -> None:
    """Initialize one rank of a group without peers. An all-gather yields the rank's own shard only, and a
    reduce-scatter returns the rank's own chunk.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # the fake group of older versions leaves the output of a reduction uninitialized
    if torch_version() < (2, 13):
        dist.ProcessGroup._reduce_scatter_base = _take_own_chunk


def fake_ranks(rank: int, world_size: int, **options: Any) -> Any:
    """Return a fixture that makes tests run as one rank of a group without peers: those of the module, unless
    ``options`` of pytest's fixture say otherwise.
    """

    @pytest.fixture(**({"scope": "module", "autouse": True} | options))
    def group() -> Iterator[None]:
        init_fake_group(rank, world_size)
        yield
        dist.destroy_process_group()

    return group


def _take_own_chunk(group: dist.ProcessGroup, output: Tensor, chunks: Tensor, options: Any = None) -> Any:
    output.copy_(chunks.detach().chunk(group.size())[group.rank()])
    return group.barrier()
