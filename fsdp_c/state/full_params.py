"""Iteration over the full parameters of a sharded model, unit by unit: for exporters and inference engines."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from fsdp_c.sharding import tensor_parallel
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, handles_in, units_with_paths
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, joined
from fsdp_c.state.redistribution import Partition, rank_partition, start_exchange
from fsdp_c.state.sharded_values import from_memory_order, param_layouts
from fsdp_c.state.state_dict_saving import local_shard
from fsdp_c.tools import collective_errors
from fsdp_c.training.unshard_params import bound_runtime, check_idle

Named = list[tuple[str, ManagedParam]]


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
    end of the loop body where units have a single parameter. Tensors are detached copies on the compute
    device, also of DTensors and of parameters outside of units, which come first. Tensors of one unit may
    share memory; all names of a shared parameter yield the same tensor.

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
    modules = units_with_paths(model)
    is_wanted = partial(fnmatch.fnmatchcase, pat=only) if isinstance(only, str) else only or (lambda _: True)
    for name, tensor in _unmanaged_tensors(model):
        if is_wanted(name):
            whole = tensor_parallel.whole(tensor.detach())
            if not rank0_only or not modules or modules[0][1].rank == 0:
                yield name, _cast(whole.clone(), dtype)
    starting = (
        _start(module, *piece, dtype, rank0_only)
        for path, module in modules
        if (named := [(name, param) for name, param in _named(path, module) if is_wanted(name)])
        for piece in _pieces(module, named, dtype, max_nbytes)
    )
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


def _named(path: str, module: ShardedModule) -> Named:
    params = sorted(module._handle.managed_params if module._handle else [], key=lambda param: param.place)
    return [(clean_name(joined(path, param.fqn)), param) for param in params]


def _pieces(
    module: ShardedModule, named: Named, dtype: torch.dtype | None, max_nbytes: int | None
) -> Iterator[tuple[Named, int, int]]:
    """Yield (parameters, first element, end) of parts of a flat parameter: of ``max_nbytes``, or a parameter each."""
    padded_numel, layouts = handle_of(module).layout.padded_numel, param_layouts(module)
    itemsize = _cast(handle_of(module).flat_param.new_empty(0), dtype).itemsize
    max_numel = padded_numel if max_nbytes is None else max_nbytes // itemsize
    if padded_numel <= max_numel:
        yield named, 0, padded_numel
        return
    held: Named = []
    start = end = 0
    for each in named:
        numel, _, first = layouts[each[1].place].shard
        if held and first + numel > max(start + max_numel, end):
            yield held, start, end
            held = []
        start, end = start if held else first, first + numel
        held.append(each)
    yield held, start, end


@torch.no_grad()
def _start(
    module: ShardedModule, named: Named, first: int, end: int, dtype: torch.dtype | None, rank0_only: bool
) -> Callable[[], list[tuple[str, Tensor]]]:
    """Start the all-gather of a range. Return a function that waits for its full parameters. Collective."""
    handle = handle_of(module)
    with bound_runtime(module):
        check_idle(module, summoned=False)
        handle.writeback()
        shard = _cast(local_shard(module).detach().to(module.compute_device), dtype)
    source = Partition(end - first, max(len(shard), 1), first)
    with collective_errors.explained("gathering parameters"), collective_errors.gathering(handle):
        if handle.layout.sharded:
            start = module.rank * len(shard)
            part = shard[max(first - start, 0) : max(end - start, 0)]
            targets = [rank_partition(source.numel, 0)] if rank0_only else None
            wait_for_whole = start_exchange([part], [source], targets, module.process_group)
        else:
            wait_for_whole = partial(list, [shard[first:end].clone()])

    def wait() -> list[tuple[str, Tensor]]:
        layouts, extension = param_layouts(module), module._fsdp_extension
        values: dict[int, Tensor] = {}
        with collective_errors.explained("gathering parameters"):
            (whole,) = wait_for_whole()
            if rank0_only and module.rank:
                return []
            for place in dict.fromkeys(param.place for _, param in named):
                layout = layouts[place]
                value = whole[layout.shard.offset - first :][: layout.shard.numel]
                value = from_memory_order(value, layout.shape, layout.order)
                if extension is not None and layout.parallel is not None:
                    value = tensor_parallel.whole(extension.post_unflatten_transform(value, layout.parallel))
                values[place] = value
        # smallest first: the caller has finished with it when the next all-gather starts
        return sorted(((name, values[param.place]) for name, param in named), key=lambda each: each[1].nbytes)

    return wait


def _unmanaged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter) for parameters that no unit manages, once per name."""
    managed = {(param.module, param.name) for handle in handles_in(model) for param in handle.managed_params}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None and (module, name) not in managed and not is_flat_param_name(name):
                yield clean_name(joined(path, name)), param
