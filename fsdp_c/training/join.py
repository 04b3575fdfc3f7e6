"""Ranks with unequal numbers of batches: those that ran out take part with zeros until all have."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding.common import of_several, tell
from fsdp_c.sharding.sharded_module import ShardedModule, units_of, whole_units_of
from fsdp_c.sharding.traversal import other_params
from fsdp_c.tools import collective_errors

__all__ = ["join"]

T = TypeVar("T")


class join(Generic[T]):  # noqa: N801  # the name that torch has for it
    """Iterate over this rank's ``batches`` as long as any rank of ``model`` has some left.

    ``for batch in fsdp_c.join(model, batches)``: a rank that ran out is given its last batch again and runs
    the whole body, so that all ranks issue the same collectives in the same order, and step the optimizers of
    their shards and their schedules. The gradients that its backwards bring to ``model`` count as zeros. A
    gradient is divided by the number of all ranks, as in any step, so that every batch counts the same
    (torch's ``Join`` does so by default); for the mean over the ranks that have data multiply the loss by
    ``world_size / batches.num_ranks``.

    Of the latest batch: ``has_data``, whether it is this rank's own, for what the body logs and counts;
    ``num_ranks``, how many ranks have one of their own. What lists, tuples and dicts in a batch hold is given
    again as it was. Buffers that forwards update, as those of a batch norm, see the last batch again.

    Args:
        model: a FullyShardedDataParallel, or a module around several that have the same process groups, as an
            ``nn.ModuleList`` of two models that one loop trains.
        batches: as a DataLoader gives them; at least one on every rank, or none on any.

    Collective over the model's process group: one all-reduce of 16 bytes per batch, for which the host waits.
    All ranks leave the loop at the same batch. Raises ValueError on every rank where some have no batch to
    give again, and for a model without units or whose units have different groups.
    """

    def __init__(self, model: nn.Module, batches: Iterable[T]) -> None:
        self.model = model
        self.batches = batches
        self.has_data = False
        self.num_ranks = 0

    def __iter__(self) -> Iterator[T]:
        roots = [unit for unit in whole_units_of(self.model) if unit._enclosing_unit is None]
        groups = _groups(roots)
        for root in roots:
            root._lazy_init()
        batches, kept = iter(self.batches), list[T]()
        while True:
            own = list(itertools.islice(batches, 1))
            self._count(roots[0], groups, bool(own), is_first=not kept)
            if not self.num_ranks:
                return
            if own:
                kept = [_rebuilt(own[0])]
                yield own[0]
            else:
                batches = iter(())
                with _bringing_zeros(self.model):
                    yield _rebuilt(kept[0])

    def _count(
        self,
        root: ShardedModule,
        groups: list[dist.ProcessGroup],
        has_data: bool,
        is_first: bool,
    ) -> None:
        counts = torch.tensor([int(has_data), 1], device=root.compute_device)
        with collective_errors.explained("counting the ranks that have a batch"):
            for group in groups:
                dist.all_reduce(counts, group=group)
        self.has_data = has_data
        self.num_ranks, num_all = counts.tolist()
        if is_first and 0 < self.num_ranks < num_all:
            _refuse(root, groups, has_data)


def _groups(roots: list[ShardedModule]) -> list[dist.ProcessGroup]:
    if not roots:
        raise ValueError("join() is for FullyShardedDataParallel, or a module around some: this has no units")
    found = {(root.process_group, root._replicate_group) for root in roots}
    if len(found) > 1:
        raise ValueError(
            f"rank {roots[0].rank}: the units of this model have different process groups, so that no group "
            "has all ranks that wait for each other: join models of the same groups"
        )
    return of_several(*found.pop())


def _refuse(root: ShardedModule, groups: list[dist.ProcessGroup], has_data: bool) -> None:
    without = [] if has_data else [dist.get_rank()]
    for group in groups:
        without = sorted({rank for part in tell(without, group) for rank in part})
    raise ValueError(
        f"rank {dist.get_rank()}: {ranks_text(without)} of join() have no batch at all, "
        "which could be given again while others train: give every rank one at least, for instance by a "
        "sampler that drops or repeats samples"
    )


def _rebuilt(batch: T) -> T:
    """With containers of its own: a body may take entries from those that it is given."""
    rebuilt: T = pytree.tree_map(lambda leaf: leaf, batch)
    return rebuilt


@contextlib.contextmanager
def _bringing_zeros(model: nn.Module) -> Iterator[None]:
    parts = units_of(model)
    handles = [part._handle for part in parts if part._handle is not None]
    shown = [param for handle in handles for param in handle.script_params]
    hooks = [
        param.register_hook(torch.zeros_like)
        for param in other_params(model, shown)
        if isinstance(param, nn.Parameter) and param.requires_grad  # and not a view of a unit's
    ]
    units = [part._unit for part in parts]
    for unit in units:
        unit.brings_zeros = True
    try:
        yield
    finally:
        for unit in units:
            unit.brings_zeros = False
        for hook in hooks:
            hook.remove()
