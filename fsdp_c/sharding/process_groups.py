"""Helpers for process groups: this process's rank, groups that communicate, exchange of objects."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def global_rank() -> int:
    """Return this process's rank, or 0 if torch.distributed is not initialized."""
    return dist.get_rank() if dist.is_initialized() else 0


def multi_rank_groups(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Return the groups with more than one rank."""
    return [group for group in groups if group is not None and group.size() > 1]


def all_gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """All-gather the object ``mine``; return one per rank, in rank order. Collective over ``group``."""
    objects = [mine] * dist.get_world_size(group)
    if len(objects) > 1:
        dist.all_gather_object(objects, mine, group=group)
    return objects
