"""What ``load_state_dict()`` does for the parameters of units: full, sharded and local values.

[Note: Loaded before the modules load]
The outermost unit of a ``load_state_dict()`` checks the values of all units below it, brings them into the shards, and
leaves one ``Mark`` per unit in their place: so an inner unit, whose hook is called later with a dict of its own, knows
what is left to do, and a load that fails half-way leaves nothing behind that a later one could mistake. Where a module
has loading code of its own, which may rename or change what it finds, each unit waits for its own turn, and full values
are copied by the modules themselves into gathered parameters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.tensor import DTensor

from fsdp_c import common
from fsdp_c.api import ShardingStrategy, StateDictType
from fsdp_c.sharded_values import (
    ParamForm,
    by_group,
    rows_of_value,
    shards_of_rows,
    to_memory_order,
    whole_of_rows,
)
from fsdp_c.state_dict_saving import is_summoned, shard_pieces
from fsdp_c.tensor_parallel import is_parallel, like
from fsdp_c.traversal import FLAT_PARAM, clean_name, is_unit, units_of, units_with_paths
from fsdp_c.unshard_params import check_idle

logger = logging.getLogger(__name__)


_NO_PARAM = object()


class Mark(NamedTuple):
    """Stands in a state dict for the values of a unit that the outermost unit has dealt with."""

    is_loaded: bool  # False: checked only
    missing: frozenset[str]  # names, relative to the unit, that had no value


def is_full(unit: Any) -> bool:
    """Whether the unit saves and loads whole tensors: it was told so, or it shards nothing."""
    whole = unit.sharding_strategy == ShardingStrategy.NO_SHARD
    return whole or unit._state_dict_type == StateDictType.FULL_STATE_DICT


def begin_load(unit: Any, state_dict: dict[str, Any], prefix: str) -> Mark:
    """Check and load what can be before the modules do, for this unit and those inside it. Collective.

    Raises RuntimeError for tensors of wrong shapes, AssertionError for values of another kind; nothing is written then.
    """
    mark = state_dict.pop(prefix + FLAT_PARAM, None)
    if isinstance(mark, Mark):
        return mark
    units = [(prefix + clean_name(f"{path}.") if path else prefix, inner) for path, inner in units_with_paths(unit)]
    check_entries(unit, state_dict, prefix)
    if any(_transforms_on_load(module) for module in unit.modules()):
        units = units[:1]
        early = [] if is_full(unit) else units
    else:
        early = [(at, inner) for at, inner in units if inner._handle is None or not _waits(inner)]
    loaded = _load([(at, inner) for at, inner in early if inner._handle is not None], state_dict)
    for at, inner in units[1:]:
        state_dict[at + FLAT_PARAM] = loaded.get(inner, Mark(False, frozenset()))
    return loaded.get(unit, Mark(False, frozenset()))


def _waits(unit: Any) -> bool:
    """Whether the modules themselves copy full values in: shown ones, and DTensors, which know how."""
    return is_summoned(unit) or (is_full(unit) and is_parallel(unit._handle))


def _load(units: Sequence[tuple[str, Any]], state_dict: dict[str, Any]) -> dict[Any, Mark]:
    """Bring the values of units into their shards and take them from the dict."""
    for _, unit in units:
        check_idle(unit)
        unit._handle.writeback()
    found = {unit: _found(unit, at, state_dict) for at, unit in units}
    whole = [unit for unit in found if is_full(unit) or unit._fsdp_extension is not None]
    _load_sharded({unit: values for unit, values in found.items() if unit not in whole})
    for unit in whole:
        _load_full(unit, found[unit])
    for unit in found:
        unit._handle.reshard(True)
    return {unit: _take(unit, at, state_dict) for at, unit in units}


def _found(unit: Any, prefix: str, state_dict: dict[str, Any]) -> list[tuple[ParamForm, Tensor, Tensor]]:
    """For the parameters that have a value: the form, the value or this rank's rows of it, the part of the shard."""
    targets = list(shard_pieces(unit))
    values: dict[int, tuple[ParamForm, Tensor, Tensor]] = {}
    full, parallel = is_full(unit), unit._fsdp_extension is not None
    for param in common.managed_params(unit._handle):
        key = prefix + param.fqn
        if state_dict.get(key) is _own_param(unit, param.index):
            continue
        if key not in state_dict:
            if not full:
                logger.warning("Did not find param with FQN %s, skipping it: it keeps the value it has", key)
            continue
        form, target = targets[param.index]
        value = state_dict[key]
        if parallel and isinstance(value, DTensor):
            value = unit._fsdp_extension.all_gather_dtensor(value, value.device_mesh)
        elif not full:
            value = rows_of_value(value, key, unit, form).to(target.dtype)
            if parallel:  # as the others of the unit: whole
                value = whole_of_rows(value, form, unit)
        values[param.index] = (form, value, target)
    return [values[index] for index in sorted(values)]


def _own_param(unit: Any, index: int) -> Any:
    """The original parameter as the optimizer has it: where DCP passes it for want of another, it says "as it is"."""
    params = unit._handle.flat_param._params
    return _NO_PARAM if params is None else params[index]


def _load_sharded(found: dict[Any, list[tuple[ParamForm, Tensor, Tensor]]]) -> None:
    for group, members in by_group(found):
        items = [item for unit in members for item in found[unit]]
        shards = shards_of_rows([(form, rows) for form, rows, _ in items], group, members[0].compute_device)
        for (_, _, target), shard in zip(items, shards, strict=True):
            target.copy_(shard)


def _load_full(unit: Any, values: Sequence[tuple[ParamForm, Tensor, Tensor]]) -> None:
    for form, value, target in values:
        start, end = form.shard.bounds(unit.rank) if unit._handle.layout.sharded else (0, form.shard.numel)
        if start < end:
            tensor = torch.detach(value)  # also of a tensor-like that is read from its file by this, one at a time
            target.copy_(to_memory_order(tensor, form.order)[start:end])


def _take(unit: Any, prefix: str, state_dict: dict[str, Any]) -> Mark:
    names = [param.fqn for param in common.managed_params(unit._handle)]
    missing = [fqn for fqn in names if state_dict.pop(prefix + fqn, None) is None]
    return Mark(True, frozenset(missing))


def supplied_names(unit: Any, prefix: str, mark: Mark) -> frozenset[str]:
    """The names that the modules will not find in the dict and shall not report as missing."""
    names = [param.fqn for param in common.managed_params(unit._handle) if param.fqn not in mark.missing]
    return frozenset(clean_name(prefix) + name for name in (*names, FLAT_PARAM))


@contextlib.contextmanager
def gathered_for_load(unit: Any, state_dict: dict[str, Any], prefix: str) -> Iterator[None]:
    """Gather, so that the modules copy full values in; the shard takes its part at exit.

    A whole value of a parameter that is a DTensor becomes one in ``state_dict``.
    """
    with contextlib.ExitStack() as stack:
        if not is_summoned(unit):
            unit._handle.summon_enter(True)
            stack.callback(unit._handle.summon_exit)
        shown = [(param, getattr(param.module, param.name)) for param in common.managed_params(unit._handle)]
        stack.callback(_copy_assigned, shown)
        for param, tensor in shown:
            key = prefix + param.fqn
            if key in state_dict:
                own = state_dict[key] is _own_param(unit, param.index)
                state_dict[key] = tensor if own else like(state_dict[key], tensor)
        yield


def _copy_assigned(registered: Sequence[tuple[common.ManagedParam, Tensor]]) -> None:
    """After ``load_state_dict(assign=True)`` the modules hold other tensors: take their values, keep our parameters."""
    for param, ours in registered:
        loaded = getattr(param.module, param.name)
        if loaded is not ours:
            ours.detach().copy_(loaded.detach())
            param.module._parameters[param.name] = ours  # type: ignore[assignment]


def load_local_value(unit: Any, state_dict: dict[str, Any], prefix: str) -> Mark:
    """Copy the flat parameter's local shard into the unit's (F-042). No collective.

    Raises AssertionError for a missing flat parameter (X-140), or one that does not fit (X-141).
    """
    handle, layout = unit._handle, unit._handle.layout
    key = prefix + FLAT_PARAM
    if key not in state_dict:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            f"rank {unit.rank} expects {key!r}"
        )
    value = state_dict.pop(key)
    if not isinstance(value, ShardedTensor):
        raise AssertionError(f"Tensors in local_state_dict should be ShardedTensor: {key} is {type(value)}")
    shards = value.local_shards()
    if layout.shard_numel_valid and len(shards) != 1:
        raise AssertionError(
            f"load_local_state_dict assume one shard per ShardedTensor: {key} has {len(shards)} on rank {unit.rank}"
        )
    if value.size().numel() != layout.numel or (shards and shards[0].tensor.numel() != layout.shard_numel_valid):
        raise AssertionError(
            f"Local shard size = {layout.shard_numel_valid} of {layout.numel} on rank {unit.rank} and the tensor in "
            f"the state_dict is {shards[0].tensor.numel() if shards else 0} of {value.size().numel()}: {key} was saved "
            "by another number of ranks or another way of wrapping; save FULL or SHARDED to load it here"
        )
    if layout.shard_numel_valid:
        handle.local_shard[: layout.shard_numel_valid].copy_(shards[0].tensor)
    handle.reshard(True)
    return Mark(True, frozenset())


# ----------------------------------------------------------------- checks


def check_entries(fsdp_module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Raise RuntimeError naming every entry below ``prefix`` that does not fit, before anything has been copied."""
    errors = []
    own = {
        id(param) for unit in units_of(fsdp_module) if unit._handle for param in unit._handle.flat_param._params or ()
    }
    for key, shape in _expected_shapes(fsdp_module, prefix):
        value = state_dict.get(key)
        if key not in state_dict or id(value) in own:
            continue
        if not torch.overrides.is_tensor_like(value):
            errors.append(f"expected a tensor for {key} but the checkpoint holds {type(value)}")
        # nn.Module takes a checkpoint's one-element vector for a scalar.
        elif _shape(value) != shape and not (len(shape) == 0 and value.shape == (1,)):
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {shape}."
            )
    if errors:
        header = f"Error(s) in loading state_dict for {type(fsdp_module).__name__} on rank {fsdp_module.rank}:"
        raise RuntimeError("\n\t".join([header, *errors]))


def _shape(value: Tensor) -> torch.Size:
    # ShardedTensor.shape goes through its dispatcher
    return value.metadata().size if isinstance(value, ShardedTensor) else value.shape


def _expected_shapes(fsdp_module: Any, prefix: str) -> Iterator[tuple[str, torch.Size]]:
    """Names and full shapes below a unit, except below modules that transform what they load."""
    managed: dict[nn.Module, dict[str, torch.Size]] = {}
    for unit in units_of(fsdp_module):
        for param in common.managed_params(unit._handle):
            managed.setdefault(param.module, {})[param.name] = param.shape
    pending: list[tuple[str, nn.Module]] = [("", fsdp_module)]
    while pending:
        path, module = pending.pop()
        if _transforms_on_load(module):
            continue
        for name, shape in _own_shapes(module, managed.get(module, {})).items():
            yield prefix + path + name, shape
        pending.extend(
            (clean_name(f"{path}{name}."), child) for name, child in module._modules.items() if child is not None
        )


def _own_shapes(module: nn.Module, managed: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """Full shapes of a module's own parameters and persistent buffers."""
    shapes = {}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is None or name == FLAT_PARAM or name in module._non_persistent_buffers_set:
            continue
        if not torch.nn.parameter.is_lazy(tensor):
            shapes[name] = tensor.shape
    return {**shapes, **managed}


def _transforms_on_load(module: nn.Module) -> bool:
    """Whether ``module`` has loading code of its own, so that what it accepts is not known here."""
    own_hooks = 1 if is_unit(module) or isinstance(module, ActivationWrapper) else 0
    loader = type(module)._load_from_state_dict
    return len(module._load_state_dict_pre_hooks) > own_hooks or not loader.__module__.startswith("torch.nn.")
