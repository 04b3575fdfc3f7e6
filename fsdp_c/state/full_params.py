"""The whole parameters of a sharded model, one unit at a time: for exporters, and copies that follow the
training."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fsdp_c.sharding import common
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.state.redistribution import start_gather
from fsdp_c.state.sharded_values import dims_from_memory, memory_shapes
from fsdp_c.state.state_dict_saving import gathered_values, local_shard
from fsdp_c.tools import flight_recorder
from fsdp_c.training.unshard_params import check_idle

__all__ = ["iter_full_params"]


def iter_full_params(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    prefetch: int = 1,
    dtype: torch.dtype | None = None,
    only: str | Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for every parameter, by the names of the unwrapped model's ``state_dict()``.

    Units are gathered one after the other, and the next ``prefetch`` of them while the caller does something
    with this one: memory beyond the shards is that of ``1 + prefetch`` units, as long as the caller lets go
    of what it got. Tensors are detached, hold what parameters were when their gather began, and are the
    caller's own; those of a unit may share memory. The names of a shared parameter give one tensor.
    Parameters that no unit manages come first, as copies.

    Args:
        model: may have units in it, or be one.
        rank0_only: the other ranks get nothing while they take part; nothing is prefetched.
        offload_to_cpu: give tensors in CPU memory.
        prefetch: how many units are gathered ahead of the caller.
        dtype: of floating-point tensors, by default the parameters' own. What is sent has it too:
            ``torch.bfloat16`` halves what float32 parameters take on the wire.
        only: names to yield, as a pattern (``"layers.*.weight"``) or a function of a name; the same on all
            ranks. Units without one are not gathered.

    Collective: every rank goes to the end, or stops at the same tensor. Raises AssertionError inside a
    forward, backward or ``summon_full_params``, ValueError for a negative ``prefetch``.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is a number of units, 0 or more, not {prefetch}")
    wanted = _filter(only)
    modules = units_with_paths(model)
    for name, tensor in _unmanaged(model, modules, rank0_only, offload_to_cpu):
        if wanted(name):
            yield name, _cast(tensor, dtype)
    units = [(module, named) for path, module in modules if (named := _named(path, module, wanted))]
    waiting = (module for module, _ in units)
    started: deque[Callable[[], list[Tensor]]] = deque()
    try:
        for _, named in units:
            while len(started) <= prefetch and (module := next(waiting, None)) is not None:
                started.append(_started(module, rank0_only, offload_to_cpu, dtype))
            if values := started.popleft()():
                yield from ((name, values[param.place]) for name, param in named)
            del values
    finally:
        for wait in started:  # where the caller stops early
            wait()


def _filter(only: str | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if isinstance(only, str):
        pattern = only
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return only or (lambda name: True)


def _named(path: str, module: ShardedModule, wanted: Callable[[str], bool]) -> list[tuple[str, ManagedParam]]:
    prefix = clean_name(f"{path}.") if path else ""
    named = ((prefix + param.fqn, param) for param in common.managed_params(module._handle))
    return [(name, param) for name, param in named if wanted(name)]


@torch.no_grad()
def _started(
    module: ShardedModule, rank0_only: bool, offload_to_cpu: bool, dtype: torch.dtype | None
) -> Callable[[], list[Tensor]]:
    """What waits for the unit's whole parameters, whose gather has begun. Collective."""
    with common.bound_runtime(module):
        check_idle(module, summoned=False)
        handle = handle_of(module)
        if rank0_only or handle.is_parallel or not handle.layout.sharded:
            values = [_cast(value, dtype) for value in gathered_values(module, rank0_only, offload_to_cpu)]
            return lambda: values
        handle.writeback()
        with flight_recorder.explained("gathering parameters"), flight_recorder.gathering(handle):
            shard = _cast(local_shard(module).detach().to(module.compute_device), dtype)
            whole, work = start_gather(shard, module.process_group)

    def wait() -> list[Tensor]:
        with flight_recorder.explained("gathering parameters"):
            work.wait()
        there = whole.cpu() if offload_to_cpu else whole
        layout = handle.layout
        places = zip(layout.param_offsets, layout.param_numels, memory_shapes(module), strict=True)
        return [
            dims_from_memory(there[start : start + numel].view(shape), order)
            for start, numel, (shape, order) in places
        ]

    return wait


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _unmanaged(
    model: nn.Module,
    fsdp_modules: Sequence[tuple[str, ShardedModule]],
    rank0_only: bool,
    offload_to_cpu: bool,
) -> Iterator[tuple[str, Tensor]]:
    managed = {
        (param.module, param.name)
        for _, fsdp_module in fsdp_modules
        for param in common.managed_params(fsdp_module._handle)
    }
    flat = {
        fsdp_module._handle.flat_param for _, fsdp_module in fsdp_modules if fsdp_module._handle is not None
    }
    if rank0_only and fsdp_modules and fsdp_modules[0][1].rank != 0:
        return
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or param in flat or (module, name) in managed:
                continue
            whole = param.detach()
            yield (
                clean_name(f"{path}.{name}" if path else name),
                whole.cpu() if offload_to_cpu else whole.clone(),
            )
