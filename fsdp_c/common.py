"""The parameters that a handle manages, as Python names them, and contexts over one unit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c.tensor_parallel import full_shape
from fsdp_c.traversal import clean_name

_ABSENT = object()


class ManagedParam(NamedTuple):
    """One original parameter under one of its names."""

    module: torch.nn.Module  # the module that owns it
    name: str  # its attribute there
    fqn: str  # relative to the unit, wrapper segments removed
    shape: torch.Size  # unsharded, over the tensor parallel mesh too
    index: int  # in the flat parameter; names of a shared parameter have one


def managed_params(handle: Any) -> list[ManagedParam]:
    """The original parameters of ``handle``, then the further names of shared ones; empty without a handle."""
    if handle is None:
        return []
    if "_managed_params" not in vars(handle):
        handle._managed_params = _managed_params(handle.flat_param)
    return handle._managed_params


def _managed_params(flat_param: Any) -> list[ManagedParam]:
    params = [
        ManagedParam(info.module, info.param_name, _fqn(info), full_shape(extension, shape), index)
        for index, (info, shape, extension) in enumerate(
            zip(flat_param._param_infos, flat_param._shapes, flat_param._param_extensions, strict=True)
        )
    ]
    primary = {(param.module, param.name): param for param in params}
    for info in flat_param._shared_param_infos:
        first = primary[info.prim_module, info.prim_param_name]
        params.append(ManagedParam(info.module, info.param_name, _fqn(info), first.shape, first.index))
    return params


def _fqn(info: Any) -> str:
    return clean_name(f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name)


@contextlib.contextmanager
def mounted(params: Sequence[tuple[ManagedParam, Tensor]]) -> Iterator[None]:
    """Show other tensors as the parameters of the modules, and put back at exit exactly what was found."""
    found = []
    try:
        for param, tensor in params:
            registered, attributes = param.module._parameters, param.module.__dict__
            found.append((registered, param.name, registered.get(param.name, _ABSENT)))
            found.append((attributes, param.name, attributes.pop(param.name, _ABSENT)))
            registered[param.name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for mapping, name, value in reversed(found):
            _put_back(mapping, name, value)


def _put_back(mapping: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        mapping.pop(name, None)
    else:
        mapping[name] = value


@contextlib.contextmanager
def bound_runtime(fsdp_module: Any) -> Iterator[None]:
    """Lazily initialise ``fsdp_module``, and undo it at exit where nothing was initialised before.

    A state dict or a look at the parameters must not decide which unit is the root, and not all ranks need take one.
    """
    unbound = fsdp_module._unit.runtime is None
    fsdp_module._lazy_init(alone=True)
    try:
        yield
    finally:
        if unbound:
            fsdp_module._unit.runtime.release()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without garbage collection: a state dict is thousands of objects at once, none of them garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tell(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the group passes, in their order. Collective."""
    told = [mine] * dist.get_world_size(group)
    if len(told) > 1:
        dist.all_gather_object(told, mine, group=group)
    return told


def synchronize(device: torch.device) -> None:
    """Wait for all work on ``device``; CPU work is never outstanding."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
