"""Inputs and outputs that are more than plain tensors: the cold paths of a forward, called from C."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def _map(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to every tensor in ``value``; containers without a changed tensor are returned as they are."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _rebuilt(value, tuple(_map(fn, item) for item in value), lambda items: type(value)(*items))
    if isinstance(value, tuple | list | set):
        return _rebuilt(value, [_map(fn, item) for item in value], type(value))
    if isinstance(value, Mapping):
        return _mapped_mapping(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_dataclass(fn, value)
    return value


def _rebuilt(value: Any, items: Any, build: Callable[[Any], Any]) -> Any:
    return value if all(new is old for new, old in zip(items, value, strict=True)) else build(items)


def _mapped_mapping(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {key: new for key, old in value.items() if (new := _map(fn, old)) is not old}
    if not changed:
        return value
    result = value.copy() if hasattr(value, "copy") else dict(value)
    result.update(changed)
    return result


def _mapped_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = {name: new for name, old in fields.items() if (new := _map(fn, old)) is not old}
    return dataclasses.replace(value, **changed) if changed else value


def convert_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move every tensor to ``device`` and cast floating ones to ``dtype``; None leaves that as it is."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None and tensor.device != device and tensor.device.type != device.type:
            tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        return tensor

    return _map(convert, args), _map(convert, kwargs)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """All tensors in ``output`` that require grad: in containers, dataclasses, PackedSequences, registered pytrees."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    mapped = torch.Tensor | PackedSequence | tuple | list | set | Mapping
    if isinstance(output, mapped) or dataclasses.is_dataclass(output):
        _map(note, output)
    else:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                note(leaf)
    return found


def hook_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], hook: Callable[[], None]) -> Any:
    """Call ``hook`` once all inputs that require grad have their gradients. Returns a removable handle, or None."""
    tensors = tensors_of((args, kwargs))
    return register_multi_grad_hook(tensors, lambda _: hook()) if tensors else None
