"""Where collectives differ between versions of torch: their names, and what the fake group answers.

The gather and the reduction of one tensor have new names beside the old since torch 2.13.
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
    """One rank of a group without others: it gathers its own shard alone, and its chunk is reduced with
    nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    if torch_version() < (2, 13):  # where the output of a reduction stays as it was allocated
        dist.ProcessGroup._reduce_scatter_base = _take_own_chunk


def fake_ranks(rank: int, world_size: int) -> Any:
    """The fixture of a module whose tests are one rank of a group without others."""

    @pytest.fixture(scope="module", autouse=True)
    def group() -> Iterator[None]:
        init_fake_group(rank, world_size)
        yield
        dist.destroy_process_group()

    return group


def _take_own_chunk(group: dist.ProcessGroup, output: Tensor, chunks: Tensor, options: Any = None) -> Any:
    output.copy_(chunks.detach().chunk(group.size())[group.rank()])
    return group.barrier()
