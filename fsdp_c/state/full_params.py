"""Iteration over the full parameters of a sharded model, unit by unit: for exporters and inference engines."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from fsdp_c.sharding import tensor_parallel
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, handles_in, units_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, joined
from fsdp_c.state.redistribution import Partition, rank_partition, start_exchange
from fsdp_c.state.sharded_values import param_layouts
from fsdp_c.state.state_dict_saving import local_shard
from fsdp_c.tools import collective_errors
from fsdp_c.training.unshard_params import bound_runtime, check_idle

Named = list[tuple[str, int]]  # FQN and place in the flat parameter


def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    only: str | Callable[[str], bool] | None = None,
    rank0_only: bool = False,
    max_nbytes: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, full tensor) for every parameter, with the names of the unwrapped model's ``state_dict()``.

    The next unit is all-gathered while the loop uses this one. Memory beyond the shards: two units, and
    tensors that the loop keeps; ``del`` the loop variable at its end if units have a single parameter.
    Tensors are detached copies on the compute device, also of DTensors and of parameters outside of units,
    which come first. Those of one unit may share memory; names of a shared parameter yield the same tensor.

    Args:
        model: a unit, or a module that contains units.
        dtype: dtype of floating-point tensors, also on the wire; default: the parameters' own.
        only: pattern (``"layers.*.weight"``) or predicate of the names to yield, the same on all ranks.
        rank0_only: yield tensors on rank 0 of each sharding group; the other ranks only send their shards.
        max_nbytes: limit of one all-gather, which splits larger units between parameters. Default: none.

    Collective: ranks stop at the same tensor. Raises AssertionError inside a step or ``summon_full_params``.
    """
    if max_nbytes is not None and max_nbytes < 1:
        raise ValueError(f"max_nbytes must be at least 1, not {max_nbytes}")
    units = units_of(model)
    is_wanted = partial(fnmatch.fnmatchcase, pat=only) if isinstance(only, str) else only or (lambda _: True)
    for name, tensor in _unmanaged_tensors(model):
        if is_wanted(name):
            whole = tensor_parallel.whole(tensor.detach())
            if not rank0_only or not units or units[0].rank == 0:
                yield name, _cast(whole.clone(), dtype)
    starting = (_start(*piece, dtype, rank0_only) for piece in _pieces(model, is_wanted, dtype, max_nbytes))
    wait = next(starting, None)
    try:
        while wait is not None:
            received, wait = wait, None
            values = deque(received())
            if len(values) > 1:
                yield values.popleft()
            wait = next(starting, None)
            while values:
                yield values.popleft()
    finally:
        if wait is not None:  # early exit of the caller
            wait()


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _pieces(
    model: nn.Module, is_wanted: Callable[[str], bool], dtype: torch.dtype | None, max_nbytes: int | None
) -> Iterator[tuple[ShardedModule, Named, int, int]]:
    """Yield (unit, parameters, first element, end) per all-gather: a unit, or parameters of it up to ``max_nbytes``."""
    for path, module in units_with_paths(model):
        params = module._handle.managed_params if module._handle else ()
        of_unit = ((clean_name(joined(path, param.fqn)), param.place) for param in params)
        named = sorted((each for each in of_unit if is_wanted(each[0])), key=lambda each: each[1])
        if not named:
            continue
        padded_numel, layouts = handle_of(module).layout.padded_numel, param_layouts(module)
        itemsize = _cast(handle_of(module).flat_param.new_empty(0), dtype).itemsize
        if max_nbytes is None or padded_numel * itemsize <= max_nbytes:
            yield module, named, 0, padded_numel
            continue
        held: Named = []
        start = end = 0
        for name, place in named:
            numel, _, first = layouts[place].shard
            if held and first + numel > max(start + max_nbytes // itemsize, end):
                yield module, held, start, end
                held = []
            start, end = start if held else first, first + numel
            held.append((name, place))
        yield module, held, start, end


@torch.no_grad()
def _start(
    module: ShardedModule, named: Named, first: int, end: int, dtype: torch.dtype | None, rank0_only: bool
) -> Callable[[], list[tuple[str, Tensor]]]:
    """Start the all-gather of a range. Return a function that waits for its full parameters. Collective."""
    handle = handle_of(module)
    with bound_runtime(module):
        check_idle(module, summoned=False)
        handle.writeback()
        shard = local_shard(module).detach()
    start = module.rank * len(shard) if handle.layout.sharded else 0
    part = _cast(shard[max(first - start, 0) : max(end - start, 0)].to(module.compute_device), dtype)
    with collective_errors.explained("gathering parameters"), collective_errors.gathering(handle):
        if handle.layout.sharded:
            source = Partition(end - first, max(len(shard), 1), first)
            targets = [rank_partition(source.numel, 0)] if rank0_only else None
            wait_for_whole = start_exchange([part], [source], targets, module.process_group)
        else:
            wait_for_whole = partial(list, [part.clone()])

    def wait() -> list[tuple[str, Tensor]]:
        layouts, extension = param_layouts(module), module._fsdp_extension
        values: dict[int, Tensor] = {}
        with collective_errors.explained("gathering parameters"):
            (whole,) = wait_for_whole()
            if rank0_only and module.rank:
                return []
            for place in dict.fromkeys(place for _, place in named):
                layout = layouts[place]
                value = layout.shaped(whole[layout.shard.offset - first :][: layout.shard.numel])
                if extension is not None and layout.parallel is not None:
                    value = tensor_parallel.whole(extension.post_unflatten_transform(value, layout.parallel))
                values[place] = value
        # smallest first: the caller has finished with it when the next all-gather starts
        return sorted(((name, values[place]) for name, place in named), key=lambda each: each[1].nbytes)

    return wait


def _unmanaged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter) for parameters that no unit manages, once per name."""
    managed = {(param.module, param.name) for handle in handles_in(model) for param in handle.managed_params}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None and (module, name) not in managed and not is_flat_param_name(name):
                yield clean_name(joined(path, name)), param
