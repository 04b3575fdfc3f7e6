"""``load_state_dict()`` of the parameters of units: full, sharded and local values.

[Note: Loaded before the modules load]
The outermost unit of a ``load_state_dict()`` checks the values of all units below it, copies them into the
shards, and replaces them by one ``Mark`` per unit. An inner unit, whose hook is called later with a dict of
its own, finds in the mark which work remains, and a failed load leaves no state that a later one could
misread. If a module has custom loading code, which may rename or convert entries, each unit instead loads in
its own hook, and full values are copied by the modules themselves into unsharded parameters.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parameter import is_lazy

from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.compat.upstream import StateDictType
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import (
    ShardedModule,
    handle_of,
    is_summoned,
    parts_of,
    units_of,
    units_with_paths,
)
from fsdp_c.sharding.tensor_parallel import like
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, is_unit, walk
from fsdp_c.state.loaded_parts import LoadedValue, is_sharded, loaded_parts
from fsdp_c.state.sharded_values import dtype_of, param_layouts, shape_of, split_shard, whole_of_value
from fsdp_c.state.state_dict_saving import is_full, is_shown, local_shard, type_of
from fsdp_c.tools import collective_errors
from fsdp_c.training.unshard_params import check_idle

logger = logging.getLogger(__name__)

_ABSENT = object()


class Mark(NamedTuple):
    """Placeholder in a state dict for the values of a unit already handled by the outermost unit."""

    is_loaded: bool = False  # False: checked only
    missing: frozenset[str] = frozenset()  # names without a value, relative to the unit


def begin_load(fsdp_module: ShardedModule, state_dict: StateDict, prefix: str) -> list[Mark]:
    """Check this unit and those inside it, and load them where no custom loading code prevents it. Collective.

    Returns a mark for each part of this unit. Raises RuntimeError for tensors of wrong shapes, AssertionError
    for other invalid values; nothing is written then.
    """
    parts = parts_of(fsdp_module)
    marks = [state_dict.pop(prefix + part._flat_param_name, None) for part in parts]
    if all(isinstance(mark, Mark) for mark in marks):
        return marks
    fsdp_modules = [
        (prefix + clean_name(f"{path}.") if path else prefix, inner)
        for path, inner in units_with_paths(fsdp_module)
        if type_of(inner) != StateDictType.LOCAL_STATE_DICT  # loaded in its own hook, also inside a full unit
    ]
    transforms = any(_transforms_on_load(module) for _, module in walk(fsdp_module, once=True))
    check_entries(fsdp_module, state_dict, prefix)
    _warn_of_conversions(fsdp_modules, state_dict)
    if transforms:
        fsdp_modules = fsdp_modules[: len(parts)]
    early: list[tuple[str, ShardedModule]] = []
    waiting: list[tuple[str, ShardedModule]] = []
    for at, inner in fsdp_modules:
        if inner._handle is not None:
            # modules copy values into unsharded parameters themselves
            copies = (is_full(inner) and transforms) or is_summoned(inner)
            (waiting if copies else early).append((at, inner))
    loaded = _load(early, state_dict)
    for at, inner in waiting:
        _make_whole(inner, state_dict, at)
    # after all transfers, so that no rank waits: if summoned, only rank 0 may have full parameters
    for inner in (inner for _, inner in waiting if is_summoned(inner)):
        for param in handle_of(inner).managed_params:
            if not is_shown(param):
                raise RuntimeError(
                    f"{param.fqn} is not shown on rank {inner.rank} in its full shape "
                    f"{tuple(param.shape)}: inside summon_full_params(rank0_only=True) only rank 0 "
                    "can load, and the loaded values are dropped at the end"
                )
    for at, inner in fsdp_modules[len(parts) :]:
        state_dict[at + inner._flat_param_name] = loaded.get(inner, Mark())
    return [loaded.get(part, Mark()) for part in parts]


def _make_whole(module: ShardedModule, state_dict: StateDict, prefix: str) -> None:
    """Replace sharded values by full ones for a unit whose modules copy values themselves. Collective."""
    if module._fsdp_extension is not None:
        return
    layouts, full = param_layouts(module), is_full(module)
    for param in handle_of(module).managed_params:
        key = prefix + param.fqn
        value = state_dict.get(key, _ABSENT)
        is_given = value is not _ABSENT and value is not _own_param(module, param.place)
        if is_given and (is_sharded(value) or not full):
            state_dict[key] = whole_of_value(value, key, module, layouts[param.place])


def _load(modules: Sequence[tuple[str, ShardedModule]], state_dict: StateDict) -> dict[ShardedModule, Mark]:
    """Copy the values of units into their shards, and remove them from the dict. Collective."""
    values: list[LoadedValue] = []
    targets: list[Tensor] = []
    for at, module in modules:
        check_idle(module)
        handle_of(module).writeback()
        pieces = list(split_shard(module, local_shard(module)))
        found, needs_rows = _found(module, at, state_dict), not is_full(module)
        for place in sorted(found):
            (layout, target), (key, value) = pieces[place], found[place]
            values.append(LoadedValue(module, layout, (key,), target.dtype, value, needs_rows))
            targets.append(target)
    for position, tensor, start, end, is_new in loaded_parts(values):
        if start < end:
            targets[position].copy_(tensor if is_new else tensor.reshape(-1)[start:end])
    marks = {}
    for at, module in modules:
        handle_of(module).reshard(True)
        names = [param.fqn for param in handle_of(module).managed_params]
        missing = [fqn for fqn in names if state_dict.pop(at + fqn, None) is None]
        marks[module] = Mark(True, frozenset(missing))
    return marks


def _found(module: ShardedModule, prefix: str, state_dict: StateDict) -> dict[int, tuple[str, object]]:
    """Return (key, value) of each parameter that has a value, by its place in the flat parameter."""
    found: dict[int, tuple[str, object]] = {}
    for param in handle_of(module).managed_params:
        key = prefix + param.fqn
        value = state_dict.get(key, _ABSENT)
        if value is not _ABSENT and value is not _own_param(module, param.place):
            found[param.place] = key, value
        elif value is _ABSENT and not is_full(module):
            logger.warning("Did not find param with FQN %s, skipping it: it keeps the value it has", key)
    return found


def _own_param(module: ShardedModule, index: int) -> object:
    """Return the optimizer's original parameter. DCP passes it where there is nothing to load."""
    params = handle_of(module).flat_param._params
    return _ABSENT if params is None else params[index]


def supplied_names(module: ShardedModule, prefix: str, missing: frozenset[str]) -> frozenset[str]:
    """Return the names that are missing in the dict as the modules see it, and shall not be reported."""
    names = [param.fqn for param in handle_of(module).managed_params if param.fqn not in missing]
    return frozenset(clean_name(prefix) + name for name in (*names, module._flat_param_name))


@contextlib.contextmanager
def unsharded_for_load(module: ShardedModule, state_dict: StateDict, prefix: str) -> Iterator[None]:
    """Unshard, so that the modules copy full values in. The shard is written back at exit. Collective.

    A full value for a DTensor parameter is replaced by a DTensor in ``state_dict``.
    """
    with contextlib.ExitStack() as stack:
        if not is_summoned(module):
            with collective_errors.gathering(handle_of(module)):
                handle_of(module).summon_enter(True)
            stack.callback(handle_of(module).summon_exit)
        shown = [(param, getattr(param.module, param.name)) for param in handle_of(module).managed_params]
        stack.callback(_copy_assigned, shown)
        for param, tensor in shown:
            key = prefix + param.fqn
            if key in state_dict:
                own = state_dict[key] is _own_param(module, param.place)
                state_dict[key] = tensor if own else like(state_dict[key], tensor)
        yield


def _copy_assigned(registered: Sequence[tuple[ManagedParam, nn.Parameter]]) -> None:
    """Copy tensors that ``load_state_dict(assign=True)`` registered into our parameters, and restore these."""
    for param, ours in registered:
        loaded = getattr(param.module, param.name)
        if loaded is not ours:
            ours.detach().copy_(loaded.detach())
            param.module._parameters[param.name] = ours


def load_local_value(module: ShardedModule, state_dict: StateDict, prefix: str) -> None:
    """Copy the local shard in ``state_dict`` into the unit's. Not collective.

    Original parameters in the dict hold the same elements and are removed. Raises AssertionError for a
    missing flat parameter, or one of another size.
    """
    handle, layout = handle_of(module), handle_of(module).layout
    key = prefix + module._flat_param_name
    if key not in state_dict:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            f"rank {module.rank} expects {key!r}"
        )
    value = state_dict.pop(key)
    for param in handle.managed_params:
        state_dict.pop(prefix + param.fqn, None)
    if not isinstance(value, ShardedTensor):
        raise AssertionError(f"Tensors in local_state_dict should be ShardedTensor: {key} is {type(value)}")
    shards = value.local_shards()
    if layout.shard_numel_valid and len(shards) != 1:
        raise AssertionError(
            f"load_local_state_dict assume one shard per ShardedTensor: {key} has {len(shards)} on rank "
            f"{module.rank}"
        )
    if value.size().numel() != layout.numel or (
        shards and shards[0].tensor.numel() != layout.shard_numel_valid
    ):
        raise AssertionError(
            f"Local shard size = {layout.shard_numel} and the tensor in the state_dict is "
            f"{shards[0].tensor.numel() if shards else 0}, of {layout.numel} and {value.size().numel()} on "
            f"all ranks (rank {module.rank}): {key} was saved by another number of ranks or another way of "
            "wrapping; save FULL or SHARDED to load it here"
        )
    if layout.shard_numel_valid:
        local_shard(module)[: layout.shard_numel_valid].copy_(shards[0].tensor)
    handle.reshard(True)


# ----------------------------------------------------------------- checks


def check_entries(fsdp_module: ShardedModule, state_dict: StateDict, prefix: str) -> None:
    """Raise one RuntimeError for all entries below ``prefix`` of wrong type or shape, before any copy."""
    errors: list[str] = []
    own = {
        id(param)
        for module in units_of(fsdp_module)
        if module._handle
        for param in module._handle.flat_param._params or ()
    }
    for key, shape in _expected_shapes(fsdp_module, prefix):
        value = state_dict.get(key, _ABSENT)
        if value is _ABSENT or (type(value) is Tensor and value.shape == shape) or id(value) in own:
            continue
        if not torch.overrides.is_tensor_like(value):
            errors.append(f"expected a tensor for {key} but the checkpoint holds {type(value)}")
        # nn.Module accepts a one-element vector from a checkpoint for a scalar.
        elif shape_of(value) != shape and not (len(shape) == 0 and value.shape == (1,)):
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {shape}."
            )
    if errors:
        header = (
            f"Error(s) in loading state_dict for {type(fsdp_module).__name__} on rank {fsdp_module.rank}:"
        )
        raise RuntimeError("\n\t".join([header, *errors]))


def _warn_of_conversions(modules: Sequence[tuple[str, ShardedModule]], state_dict: StateDict) -> None:
    """Warn of integers and complex numbers, converted to real floating-point numbers as by nn.Module."""
    converted = [
        key
        for prefix, module in modules
        if module._flat_param is not None and module._flat_param.is_floating_point()
        for key in (prefix + param.fqn for param in handle_of(module).managed_params)
        if key in state_dict and not dtype_of(state_dict[key]).is_floating_point
    ]
    if converted:
        warnings.warn(
            f"rank {modules[0][1].rank}: the state dict holds integers or complex numbers for "
            f"{first_names(converted)}, which become real floating-point numbers, as in nn.Module. "
            "Convert them before loading if this is intended",
            stacklevel=2,
        )


def _expected_shapes(fsdp_module: ShardedModule, prefix: str) -> Iterator[tuple[str, torch.Size]]:
    """Yield (name, full shape) of entries below a unit, except of local values and modules with custom loading code."""
    managed: dict[nn.Module, dict[str, torch.Size | None]] = {}
    for inner in units_of(fsdp_module):
        for param in inner._handle.managed_params if inner._handle is not None else ():
            is_local = type_of(inner) == StateDictType.LOCAL_STATE_DICT
            managed.setdefault(param.module, {})[param.name] = None if is_local else param.shape
    pending: list[tuple[str, nn.Module]] = [("", fsdp_module)]
    while pending:
        path, module = pending.pop()
        if _transforms_on_load(module):
            continue
        of_unit = managed.get(module, {})
        for name, shape in of_unit.items():
            if shape is not None:
                yield prefix + path + name, shape
        for name, shown in module._parameters.items():
            is_own = name not in of_unit and not is_flat_param_name(name)
            if shown is not None and is_own and not is_lazy(shown):
                yield prefix + path + name, shown.shape
        for name, buffer in module._buffers.items():
            is_kept = name not in module._non_persistent_buffers_set
            if buffer is not None and is_kept and not is_lazy(buffer):
                yield prefix + path + name, buffer.shape
        for name, child in reversed(module._modules.items()):
            if child is not None:
                pending.append((path + clean_name(name + "."), child))


def _transforms_on_load(module: nn.Module) -> bool:
    """Return True if ``module`` has custom loading code, so that its valid entries are unknown."""
    hooks = module._load_state_dict_pre_hooks
    if hooks and len(hooks) > (is_unit(module) or isinstance(module, ActivationWrapper)):
        return True
    loader = type(module)._load_from_state_dict
    return loader is not nn.Module._load_from_state_dict and not loader.__module__.startswith("torch.nn.")
