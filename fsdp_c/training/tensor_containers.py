"""Nested inputs and outputs of a forward: the slow path, called from C for anything but plain tensors."""

import contextlib
import copy
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from fsdp_c.compat import upstream


def _map(
    fn: Callable[[torch.Tensor], torch.Tensor], value: Any, copies: bool = False, copies_empty: bool = False
) -> Any:
    """Apply ``fn`` to all tensors in ``value``. Containers without a changed tensor are returned as is.

    With ``copies``, lists and dicts in ``value``, and in its tuples, lists and dicts, are copied in any case,
    empty ones only with ``copies_empty``.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))
    if copies and isinstance(value, list | dict) and (value or copies_empty):
        copied = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            copied[key] = _map(fn, item, copies, copies_empty)
        return copied
    if isinstance(value, tuple | list | set):
        is_deep = copies and isinstance(value, tuple)
        items = [_map(fn, item, is_deep, copies_empty) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: new for key, old in value.items() if (new := _map(fn, old)) is not old}
        if not changed:
            return value
        result: Any = copy.copy(value)  # keeps class and attributes
        for key, new in changed.items():
            result[key] = new
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := _map(fn, old)) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def convert_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move all tensors to ``device`` and cast floating-point ones to ``dtype``. None keeps device or dtype.

    Lists and dicts are copied where torch copies them: the caller's containers do not see the module's
    changes.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        return tensor

    casts = dtype is not None
    copies = casts or upstream.copies_containers_of_inputs()
    return _map(convert, args, copies, casts), _map(convert, kwargs, copies, casts)


def tensors_of(output: object) -> list[torch.Tensor]:
    """Return all tensors in ``output`` that require grad, each once.

    Searches containers, dataclasses, PackedSequences, registered pytrees, iterators, generators, methods,
    partials, closures, and the attributes of other objects, also of those that can be called. A missed
    tensor would not trigger the unshard before its backward.
    """
    found: dict[int, torch.Tensor] = {}
    _search(output, found, set(), _ATTRIBUTE_DEPTH)
    return list(found.values())


_ATTRIBUTE_DEPTH = 4
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    nn.Module,
    torch.dtype,
    torch.device,
    torch.Size,
)


# callables and generators -> the objects that they hold and may compute with later
_HELD: dict[type, Callable[[Any], Iterable[object]]] = {
    functools.partial: lambda partial: (partial.func, *partial.args, *partial.keywords.values()),
    types.MethodType: lambda method: (method.__self__,),
    types.BuiltinMethodType: lambda method: (method.__self__,),
    types.FunctionType: lambda function: [
        cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)
    ],
    types.GeneratorType: lambda generator: generator.gi_frame.f_locals.values() if generator.gi_frame else (),
}


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # unassigned closure variable
        return False


def _search(value: object, found: dict[int, torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found[id(value)] = value
    elif not isinstance(value, _OPAQUE) and id(value) not in seen:
        seen.add(id(value))
        children, is_container = _children(value)
        if is_container or depth > 0:
            for child in children:
                _search(child, found, seen, depth if is_container else depth - 1)


def _children(value: object) -> tuple[Iterable[object], bool]:
    """Return the objects in ``value``, and True for a container, False for an object with attributes."""
    if held := _HELD.get(type(value)):
        return held(value), True
    if isinstance(value, Mapping):
        return value.values(), True
    if isinstance(value, tuple | list | set | frozenset):
        return value, True
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        # built-in iterator: iterating would consume it
        return gc.get_referents(value), True
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves, True
    slots = (
        getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())
    )
    return (*getattr(value, "__dict__", {}).values(), *slots), dataclasses.is_dataclass(value)


def hook_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], hook: Callable[[], None], keeps_graph: bool
) -> Callable[[], None] | None:
    """Call ``hook`` in a backward after the gradients of all inputs. Return a function that removes it; None
    without inputs that require grad.

    Without ``keeps_graph`` the hook is called only in a backward that reaches all of these inputs. With it
    also in one that reaches some of them, but the hook keeps the graph alive until it is removed. Unlike
    ``register_multi_grad_hook``, leaves may be inputs of ``torch.autograd.grad()``.
    """
    tensors = tensors_of((args, kwargs))
    total = len(tensors)
    nodes = [get_gradient_edge(tensor).node for tensor in tensors] if keeps_graph else []
    missing: dict[int, int] = {}  # id of a backward -> number of gradients to come

    def receive(_gradient: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        count = missing.pop(backward, None) or (sum(map(_will_run, nodes)) if keeps_graph else total)
        if count > 1:
            missing[backward] = count - 1
        else:
            hook()

    removals = contextlib.ExitStack()
    for tensor in tensors:
        _ = tensor.grad_fn  # first: torch crashes with a hook on a view whose node is stale
        removals.callback(tensor.register_hook(receive).remove)
        # before the hook of the unit that made the tensor, which unshards that unit
        hooks = tensor._backward_hooks
        assert hooks is not None
        *earlier, own = hooks.items()
        hooks.clear()
        hooks.update([own, *earlier])
    return removals.close if tensors else None


def _will_run(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad() returns
        return True
