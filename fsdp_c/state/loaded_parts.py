"""This rank's parts of loaded values, for state dicts of models and of optimizers.

[Note: Loading]
A value is a full tensor, a ShardedTensor or DTensor, or a tensor on rank 0. Rows move to shards in one
transfer for all parameters of a process group. Full tensors move nowhere: each rank takes its part of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_c.sharding.agreement import values_if_different
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.sharding.tensor_parallel import local_part
from fsdp_c.state.redistribution import rank_partition, redistribute
from fsdp_c.state.sharded_values import (
    ParamLayout,
    by_group,
    rows_of_value,
    shards_of_rows,
    to_memory_order,
    wholes_of_rows,
)


class OnRank0:
    """Tensor on rank 0. Other ranks receive its shape and dtype by pickle."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, value: Tensor | None = None) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value

    def __reduce__(self) -> tuple[type[OnRank0], tuple[torch.Size, torch.dtype]]:
        return OnRank0, (self.shape, self.dtype)

    def flat(self, order: tuple[int, ...] | None) -> Tensor:
        """Return the elements in memory order; none on other ranks."""
        if self.value is None:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return to_memory_order(self.value.detach(), order)

    def broadcast(self, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
        """Return a copy on every rank. Collective."""
        if self.value is None:
            received = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            received = self.value.detach().to(device, copy=True).contiguous()
        dist.broadcast(received, group=group, group_src=0)
        return received


class LoadedValue(NamedTuple):
    """The loaded value of one original parameter, or of one state that an optimizer has of it."""

    module: ShardedModule
    layout: ParamLayout
    names: tuple[str, ...]  # FQN of the parameter, and name of the state
    dtype: torch.dtype  # of the transfers
    value: Any  # Tensor or OnRank0
    needs_rows: bool = False  # True if a full tensor is an error


class LoadedPart(NamedTuple):
    """This rank's part of a value: elements [start, end) of ``tensor`` in memory order."""

    position: int  # of the value
    tensor: Tensor
    start: int
    end: int
    is_new: bool  # True if the tensor is the part alone, 1-D, in memory of its own


def is_sharded(value: object) -> bool:
    return isinstance(value, (ShardedTensor, DTensor))


def loaded_parts(
    values: Sequence[LoadedValue], group: dist.ProcessGroup | None = None
) -> Iterator[LoadedPart]:
    """Yield this rank's part of each value: all of it if the unit is not sharded.

    Collective for sharded values, over the units' groups, and for values on rank 0, over ``group``. Raises
    AssertionError or ValueError on all ranks, before any transfer, for sharded values that are not divided
    over a unit's ranks, or that differ between ranks.
    """
    rows = _rows(values)
    world_size = dist.get_world_size(group)
    divided, scattered = [], []
    for module, of_unit in itertools.groupby(enumerate(values), lambda each: each[1].module):
        is_divided, is_parallel = handle_of(module).layout.sharded, module._fsdp_extension is not None
        for position, (_, layout, _, _, value, _) in of_unit:
            if position in rows and is_divided:
                divided.append((module, position))
                continue
            if position in rows:
                items = [(layout, rows[position])]
                (value,) = wholes_of_rows(items, module.process_group, module.compute_device)
            elif isinstance(value, OnRank0):
                if is_divided and not is_parallel and module.world_size == world_size:
                    scattered.append((module, position))
                    continue
                value = value.broadcast(module.compute_device, group)
            start, end = layout.shard.bounds(module.rank) if is_divided else (0, layout.shape.numel())
            is_plain = type(value) is Tensor and not value.requires_grad and value.is_contiguous()
            if is_plain and layout.order is None and not is_parallel:
                yield LoadedPart(position, value, start, end, False)
            elif start < end or isinstance(value, DTensor):
                value = torch.detach(value)  # reads a lazily loaded tensor-like from its file, one at a time
                value = local_part(value, layout.parallel) if is_parallel else value
                flat = to_memory_order(value, layout.order)[start:end]
                yield LoadedPart(position, flat, 0, flat.numel(), False)
    for shard_group, members in by_group(divided):
        items = [(values[position].layout, rows[position]) for _, position in members]
        shards = shards_of_rows(items, shard_group, members[0][0].compute_device)
        for (_, position), shard in zip(members, shards, strict=True):
            yield LoadedPart(position, shard, 0, shard.numel(), True)
    for shard_group, members in by_group(scattered):
        chosen = [values[position] for _, position in members]
        shards = redistribute(
            (one.value.flat(one.layout.order) for one in chosen),
            [rank_partition(one.layout.shape.numel(), 0) for one in chosen],
            [one.layout.shard for one in chosen],
            shard_group,
            device=members[0][0].compute_device,
        )
        for (_, position), shard in zip(members, shards, strict=True):
            yield LoadedPart(position, shard, 0, shard.numel(), True)


def _rows(values: Sequence[LoadedValue]) -> dict[int, Tensor]:
    """Return this rank's rows of sharded values by position, without DTensors of tensor parallelism. Collective."""
    rows: dict[int, Tensor] = {}
    moved = (each for each in enumerate(values) if each[1].needs_rows or is_sharded(each[1].value))
    for group, members in by_group((one.module, position) for position, one in moved):
        error = None
        try:
            for module, position in members:
                _, layout, names, dtype, value, _ = values[position]
                if module._fsdp_extension is None or not isinstance(value, DTensor):
                    own = rows_of_value(value, names[0], module, layout)
                    own = own.detach() if own.requires_grad else own
                    rows[position] = own if own.dtype is dtype else own.to(dtype)
        except AssertionError as found:
            error = found
        _agree_on([values[position] for _, position in members], group, error)
    return rows


def _agree_on(values: Sequence[LoadedValue], group: dist.ProcessGroup, error: Exception | None) -> None:
    """Raise on all ranks, before any transfer, if one has an error or ranks load different values. Collective."""
    known = [(one.names[::-1], str(one.dtype)) for one in values]
    own = dist.get_rank(), None if error is None else str(error), known
    everyone = values_if_different(own, own[1:], [group], values[0].module.compute_device)
    if error is not None:
        raise error
    for rank, failure, _ in everyone:
        if failure is not None:
            raise AssertionError(f"rank {rank} cannot load its part of the state dict: {failure}")
    if everyone:
        held = {rank: set(theirs) for rank, _, theirs in everyone}
        names, dtype = min(set(known).union(*held.values()) - set(known).intersection(*held.values()))
        having = [rank for rank, one in held.items() if (names, dtype) in one]
        name = " of ".join([*map(repr, names[:-1]), names[-1]])
        raise ValueError(
            f"ranks pass different sharded state dicts: {name}, {dtype}, is on ranks {having} only of "
            f"{list(held)}. Pass each rank what was saved on it, or load through torch.distributed.checkpoint"
        )
