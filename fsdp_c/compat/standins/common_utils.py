"""Stand-in for ``torch.distributed.fsdp._common_utils``: base class of units, helpers over units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable_state import _get_module_state, _State
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

from fsdp_c.compat.standins.api import HandleTrainingState, TrainingState  # noqa: F401  # re-exported, as in torch

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
FSDP_FLATTENED = "_fsdp_flattened"


# ----------------------------------------------------------------- units


class _FSDPState(_State):
    """Empty base class of all units, for ``isinstance``."""

    __module__ = "torch.distributed.fsdp._common_utils"


def _get_module_fsdp_state(module: nn.Module) -> Any:
    """Return the unit of ``module``, or None."""
    state = _get_module_state(module)
    return state if isinstance(state, _FSDPState) else None


_get_module_fsdp_state_if_fully_sharded_module = _get_module_fsdp_state  # units are their own modules


def _module_handle(state: Any, module: nn.Module) -> Any:
    """Return the handle of the unit ``module``, or None without parameters."""
    return module._handle


def _has_fsdp_params(state: Any, module: nn.Module) -> bool:
    return _module_handle(state, module) is not None


# ----------------------------------------------------------------- names and marks


def clean_tensor_name(tensor_name: str) -> str:
    """Return a tensor's FQN without segments of units and checkpoint wrappers."""
    return tensor_name.replace(FSDP_PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def _set_fsdp_flattened(tensor: torch.Tensor) -> None:
    setattr(tensor, FSDP_FLATTENED, True)


def _is_fsdp_flattened(tensor: torch.Tensor) -> bool:
    marked: bool = getattr(tensor, FSDP_FLATTENED, False)
    return marked


def _named_parameters_with_duplicates(module: nn.Module, **kwargs: Any) -> list[tuple[str, nn.Parameter]]:
    """Return ``named_parameters`` with all names of shared ones, if the module's method supports that."""
    try:
        return list(module.named_parameters(remove_duplicate=False, **kwargs))
    except AssertionError:
        return list(module.named_parameters(**kwargs))


def _get_param_to_fqns(model: nn.Module, dedup_shared_params: bool = True) -> dict[nn.Parameter, list[str]]:
    """Map each parameter to its FQNs in the unwrapped model.

    A flat parameter has several; so has a shared one unless ``dedup_shared_params``. Wrappers that are on no
    path of a parameter's name are left out of FQNs.
    """
    found: dict[nn.Parameter, list[str]] = {}
    fqns = [name for name, _ in _named_parameters_with_duplicates(model)]
    prefixes = {fqn[: i + 1] for fqn in fqns for i, letter in enumerate(fqn) if letter == "."}
    wrappers = (FSDP_WRAPPED_MODULE, "_dmp_wrapped_module", "module")

    def visit(module: nn.Module, prefix: str) -> None:
        for name, param in _named_parameters_with_duplicates(module, recurse=False):
            is_flat = getattr(param, "_is_flat_param", False)
            own_names: list[str] = getattr(param, "_fqns", [name]) if is_flat else [name]
            names = [clean_tensor_name(prefix + one) for one in own_names]
            if param not in found or is_flat:
                found[param] = names
            elif not dedup_shared_params:
                found[param] += names
        for name, child in module.named_children():
            inner = f"{prefix}{name}."
            visit(child, prefix if inner not in prefixes and name in wrappers else inner)

    visit(model, "")
    return found


# ----------------------------------------------------------------- tensors in containers, for FSDP2


def collect_grad_tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that require grad in nested dicts, lists, tuples and dataclasses, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map_grad_tensors(note, output)
    return tuple(found)


def replace_grad_tensors(output: Any, tensor_iter: Iterator[torch.Tensor]) -> Any:
    """Return ``output`` with these tensors replaced by ``tensor_iter``'s. Raises RuntimeError for leftovers."""
    result = _map_grad_tensors(lambda _: next(tensor_iter), output)
    left = len(list(tensor_iter))
    if left:
        raise RuntimeError(f"{left} replacement tensors were not consumed by a {type(output).__qualname__}")
    return result


def _map_grad_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to tensors that require grad. Unchanged containers are returned as is."""
    if isinstance(value, torch.Tensor):
        return fn(value) if value.requires_grad else value
    if isinstance(value, dict):
        items = {key: _map_grad_tensors(fn, item) for key, item in value.items()}
        return type(value)(items) if any(items[key] is not value[key] for key in value) else value
    if isinstance(value, tuple | list):
        new = [_map_grad_tensors(fn, item) for item in value]
        if all(one is old for one, old in zip(new, value, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changes = {
            name: new for name, old in fields.items() if (new := _map_grad_tensors(fn, old)) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    return value
