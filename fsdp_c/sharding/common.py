"""Helpers for state dicts and summon_full_params: parameters by FQN, temporary registrations and runtimes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, joined
from fsdp_c.sharding.wrap import unit_name

T = TypeVar("T")
_ABSENT = object()


def global_rank() -> int:
    """Return this process's rank, or 0 if torch.distributed is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def place_of(fsdp_module: ShardedModule) -> str:
    """Return the rank and the unit, to begin an error or a warning."""
    return f"rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}"


def unmanaged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter) for parameters that no unit manages, once per name."""
    managed = {(param.module, param.name) for handle in handles_in(model) for param in handle.managed_params}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None and (module, name) not in managed and not is_flat_param_name(name):
                yield clean_name(joined(path, name)), param


@contextlib.contextmanager
def mounted(params: Sequence[tuple[ManagedParam, Tensor]]) -> Iterator[None]:
    """Register ``params`` in their modules inside the context; restore the previous registrations at exit."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (module, name, *_), tensor in params:
            attributes = module.__dict__
            registered: dict[str, Any] = attributes["_parameters"]
            found.append((registered, name, registered.get(name, _ABSENT)))
            if name in attributes:
                found.append((attributes, name, attributes.pop(name)))
            registered[name] = tensor
        yield
    finally:
        for mapping, name, value in reversed(found):
            if value is _ABSENT:
                mapping.pop(name, None)
            else:
                mapping[name] = value


@contextlib.contextmanager
def bound_runtime(fsdp_module: ShardedModule) -> Iterator[None]:
    """Lazily initialize ``fsdp_module``; undo the initialization at exit if this call did it.

    State dicts and parameter inspection must not decide which unit is the root: some ranks may not call them.
    """
    if fsdp_module._unit.runtime is not None:
        yield
        return
    fsdp_module._lazy_init(alone=True)
    try:
        yield
    finally:
        if (runtime := fsdp_module._unit.runtime) is not None:
            runtime.release()


def is_unsharded_off_device(fsdp_module: ShardedModule) -> bool:
    """Return True if the units were moved off the compute device and none is sharded.

    No communication is needed then. Always False after lazy initialization.
    """
    if fsdp_module._unit.runtime is not None:
        return False
    handles = handles_in(fsdp_module)
    moved = any(
        handle.flat_param.device != handle.device and not handle._offload_params for handle in handles
    )
    return moved and not any(handle.layout.sharded for handle in handles)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: a state dict creates thousands of objects, none of them garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def multi_rank_groups(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Return the groups with more than one rank."""
    return [group for group in groups if group is not None and group.size() > 1]


def all_gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """All-gather the object ``mine``; return one per rank, in rank order. Collective over ``group``."""
    objects = [mine] * dist.get_world_size(group)
    if len(objects) > 1:
        dist.all_gather_object(objects, mine, group=group)
    return objects


def synchronize(device: torch.device) -> None:
    """Block until all work on ``device`` is done. No-op for the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
