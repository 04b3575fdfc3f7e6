"""Iteration over the full parameters of a sharded model, unit by unit: for exporters and inference engines."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdp_c.sharding import common, tensor_parallel
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.state.redistribution import Partition, rank_partition, start_exchange
from fsdp_c.state.sharded_values import from_memory_order, param_layouts
from fsdp_c.state.state_dict_saving import local_shard
from fsdp_c.tools import collective_errors
from fsdp_c.training.unshard_params import check_idle


def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    only: str | Callable[[str], bool] | None = None,
    rank0_only: bool = False,
    max_nbytes: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, full tensor) for every parameter, with the names of the unwrapped model's ``state_dict()``.

    The all-gather of the next unit overlaps with the caller's use of the current one: memory beyond the
    shards is that of two units, if the caller keeps no tensor. A loop variable keeps one: ``del`` it at the
    end of the loop body where units have a single parameter. Tensors are detached, on the compute device,
    hold the values at the start of their all-gather, and belong to the caller; tensors of one unit may share
    memory. All names of a shared parameter yield the same tensor. DTensors are yielded as full tensors.
    Parameters outside of units are yielded first, as copies.

    Args:
        model: a unit, or a module that contains units.
        dtype: dtype of floating-point tensors, also on the wire; default: the parameters' own.
        only: names to yield, as a pattern (``"layers.*.weight"``) or a predicate; the same on all ranks.
            Units without a matching name are skipped.
        rank0_only: yield tensors on rank 0 of each sharding group only; other ranks send their shards and yield
            nothing.
        max_nbytes: limit in bytes of one all-gather. Larger units are split between parameters; a larger parameter
            is gathered in one. Default: one all-gather per unit.

    Collective: all ranks exhaust the iterator, or all stop at the same tensor. Raises AssertionError inside a
    forward, backward or ``summon_full_params``, ValueError if ``max_nbytes`` is less than 1.
    """
    if max_nbytes is not None and max_nbytes < 1:
        raise ValueError(f"max_nbytes must be at least 1, not {max_nbytes}")
    modules = units_with_paths(model)

    def is_wanted(name: str) -> bool:
        return only is None or bool(fnmatch.fnmatchcase(name, only) if isinstance(only, str) else only(name))

    for name, tensor in common.unmanaged_tensors(model):
        if is_wanted(name):
            whole = tensor_parallel.whole(tensor.detach())
            if not rank0_only or not modules or modules[0][1].rank == 0:
                yield name, _cast(whole.clone(), dtype)
    pieces = (
        each for path, module in modules for each in _pieces(path, module, dtype, is_wanted, max_nbytes)
    )
    starting = (_start_piece(piece, dtype, rank0_only) for piece in pieces)
    wait = next(starting, None)
    try:
        while wait is not None:
            received, wait = wait, None
            values = deque(received())
            if len(values) < 2:
                wait = next(starting, None)
            while values:
                yield values.popleft()
                # the caller has finished with one tensor of the previous unit
                wait = wait or next(starting, None)
    finally:
        if wait is not None:  # early exit of the caller
            wait()


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class _Piece(NamedTuple):
    """Elements [first, end) of a unit's flat parameter, and the parameters within."""

    module: ShardedModule
    named: list[tuple[str, ManagedParam]]
    first: int
    end: int


def _pieces(
    path: str,
    module: ShardedModule,
    dtype: torch.dtype | None,
    is_wanted: Callable[[str], bool],
    max_nbytes: int | None,
) -> list[_Piece]:
    """Split a unit into pieces of at most ``max_nbytes``, or into one per larger parameter."""
    prefix = clean_name(f"{path}.") if path else ""
    params = sorted(common.managed_params(module._handle), key=lambda param: param.place)
    named = [(prefix + param.fqn, param) for param in params if is_wanted(prefix + param.fqn)]
    if not named:
        return []
    padded_numel, layouts = handle_of(module).layout.padded_numel, param_layouts(module)
    itemsize = _cast(handle_of(module).flat_param.new_empty(0), dtype).itemsize
    if max_nbytes is None or padded_numel * itemsize <= max_nbytes:
        return [_Piece(module, named, 0, padded_numel)]
    pieces: list[_Piece] = []
    for name, param in named:
        numel, _, first = layouts[param.place].shard
        end = first + numel
        if not pieces or ((end - pieces[-1].first) * itemsize > max_nbytes and end > pieces[-1].end):
            pieces.append(_Piece(module, [], first, end))
        pieces[-1].named.append((name, param))
        pieces[-1] = pieces[-1]._replace(end=end)
    return pieces


@torch.no_grad()
def _start_piece(
    piece: _Piece, dtype: torch.dtype | None, rank0_only: bool
) -> Callable[[], list[tuple[str, Tensor]]]:
    """Start the all-gather of a piece. Return a function that waits for its full parameters. Collective."""
    module, handle = piece.module, handle_of(piece.module)
    with common.bound_runtime(module):
        check_idle(module, summoned=False)
        handle.writeback()
        shard = _cast(local_shard(module).detach().to(module.compute_device), dtype)
    source = Partition(piece.end - piece.first, max(len(shard), 1), piece.first)
    with collective_errors.explained("gathering parameters"), collective_errors.gathering(handle):
        if handle.layout.sharded:
            start, end = source.bounds(module.rank)
            at = piece.first - module.rank * len(shard)
            parts, targets = [shard[at + start : at + end]], [rank_partition(source.numel, 0)]
            wait_for_whole = start_exchange(
                parts, [source], targets if rank0_only else None, module.process_group
            )
        else:
            wait_for_whole = partial(list, [shard[piece.first : piece.end].clone()])

    def wait() -> list[tuple[str, Tensor]]:
        layouts, extension = param_layouts(module), module._fsdp_extension
        values: dict[int, Tensor] = {}
        with collective_errors.explained("gathering parameters"):
            (whole,) = wait_for_whole()
            if rank0_only and module.rank:
                return []
            for place in dict.fromkeys(param.place for _, param in piece.named):
                layout = layouts[place]
                first = layout.shard.offset - piece.first
                value = whole[first : first + layout.shard.numel]
                value = from_memory_order(value, layout.shape, layout.order)
                if extension is not None and layout.parallel is not None:
                    value = tensor_parallel.whole(extension.post_unflatten_transform(value, layout.parallel))
                values[place] = value
        named = [(name, values[param.place]) for name, param in piece.named]
        # smallest first: the caller has finished with it when the next all-gather starts
        return sorted(named, key=lambda each: each[1].nbytes)

    return wait
