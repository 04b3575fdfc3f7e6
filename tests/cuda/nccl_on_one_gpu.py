"""NCCL for ranks that share one GPU. NCCL refuses two ranks of a host on one device, so each rank claims to
be a host of its own.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist


def share_one_gpu(rank: int) -> None:
    """Set NCCL's environment. Call this before the process' first communicator."""
    os.environ.update(
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_MNNVL_ENABLE="0",
        NCCL_NVLS_ENABLE="0",
    )


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """Return an NCCL group of all ranks that has run its first collective. Call it once per process.
    Collective.
    """
    share_one_gpu(dist.get_rank())
    group = dist.new_group(backend="nccl")
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    return group
