"""Collectives for ranks that share one GPU. gloo does not support all-gather and reduce-scatter of CUDA
tensors, so they go through the CPU.

Both implementations call the collectives by their public names, so both get the same numbers. Every function
waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c.sharding import agreement
from fsdp_c.state import redistribution

_GATHERS = ("all_gather_into_tensor", "all_gather_single")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


def _gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
    world_size = dist.get_world_size(group)
    whole = [input.new_empty(input.shape, device="cpu") for _ in range(world_size)]
    dist.all_gather(whole, input.cpu(), group=group)
    for part, own in zip(output.chunk(world_size), whole, strict=True):
        part.copy_(own)


def _scatter(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    total = input.cpu()
    dist.all_reduce(total, op=op, group=group)
    output.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


_digests = agreement._gather


def _gather_digests(digest: bytes, group: Any, device: torch.device) -> list[bytes]:
    return _digests(digest, group, torch.device("cpu"))


@contextlib.contextmanager
def through_the_cpu() -> Iterator[None]:
    """Replace the all-gathers and reduce-scatters of torch.distributed in the body, and fsdp_c's references
    to them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(agreement, "_gather", _gather_digests))
        stack.enter_context(mock.patch.object(redistribution, "_all_gather_single", _gather))
        for names, function in ((_GATHERS, _gather), (_SCATTERS, _scatter)):
            for name in names:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, function))
        yield
