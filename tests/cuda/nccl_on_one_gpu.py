"""Ranks that share one GPU over NCCL, which refuses that to ranks of one host: so each says that it is on its
own."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist


def share_one_gpu(rank: int) -> None:
    """Before the process' first communicator."""
    os.environ.update(
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_MNNVL_ENABLE="0",
        NCCL_NVLS_ENABLE="0",
    )


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """All ranks, once per process; it has sent something when this returns. Collective."""
    share_one_gpu(dist.get_rank())
    group = dist.new_group(backend="nccl")
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    return group
