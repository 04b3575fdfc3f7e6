"""State dicts of models: selection of the type, and hooks that convert keys to the unwrapped module's FQNs.

Values are made and loaded by state_dict_saving and state_dict_loading.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.compat.upstream import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_c.sharding.holders import warn_of_partial_units
from fsdp_c.sharding.sharded_module import (
    ShardedModule,
    handles_in,
    holders_around,
    is_summoned,
    parts_of,
    place_of,
    units_of,
)
from fsdp_c.sharding.traversal import WRAPPED_PREFIX, clean_name, is_unit, named_buffers
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.state.state_dict_loading import begin_load, load_local_value, supplied_names, unsharded_for_load
from fsdp_c.state.state_dict_saving import (
    full_values_shown,
    is_dropped,
    is_full,
    names_shown,
    put_full_values,
    put_local_value,
    put_sharded_values,
    saved_values,
    type_of,
)
from fsdp_c.training.unshard_params import bound_runtime, check_idle, synchronize, warn_of_copies

logger = logging.getLogger(__name__)

_CONFIG_TYPES: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class _Open(NamedTuple):
    """Resources that a unit's pre-hook opens for its post-hook."""

    stack: contextlib.ExitStack
    rows: dict[ShardedModule, list[Tensor]]  # rows to save, by part
    supplied: set[str]  # loaded names, reported missing by the modules


_open: weakref.WeakKeyDictionary[ShardedModule, _Open] = weakref.WeakKeyDictionary()


# ----------------------------------------------------------------- selection


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the type of the ``state_dict()`` of units in ``module``. Return the old settings. Warns: deprecated.

    Not collective; all ranks set the same. The configurations default to those of the type. Raises
    RuntimeError for a configuration of another type, AssertionError if the units' settings differed before.
    """
    _warn_deprecated(stacklevel=3)
    return _select(module, state_dict_type, state_dict_config, optim_state_dict_config)


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Context with the settings of set_state_dict_type(). Every exit restores the old ones."""
    _warn_deprecated(stacklevel=4)
    previous = _select(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        _warn_deprecated(stacklevel=4)
        if previous.state_dict_type is not None:
            _select(
                module, previous.state_dict_type, previous.state_dict_config, previous.optim_state_dict_config
            )


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Return the settings of the units in ``module``, None without units. Not collective.

    Raises AssertionError if the units differ, RuntimeError for LOCAL_STATE_DICT with a device mesh.
    """
    fsdp_modules = units_of(module)
    return settings_of(fsdp_modules) if fsdp_modules else None


def settings_of(modules: list[ShardedModule]) -> StateDictSettings:
    """Return the common settings of all units. Raise AssertionError if they differ."""
    found = _settings(modules[0])
    for module in modules[1:]:
        if _settings(module) != found:
            raise AssertionError(
                f"All FSDP modules must have the same state dict settings. Got {_settings(module)} and "
                f"{found}."
            )
    for module in modules:
        _note_mesh(module, module._optim_state_dict_config)
    return found


def _warn_deprecated(stacklevel: int) -> None:
    # Users filter this warning by its first words.
    warnings.warn(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Use get_state_dict() "
        "and set_state_dict() of torch.distributed.checkpoint.state_dict, which serve every kind of "
        "parallelism.",
        FutureWarning,
        stacklevel=stacklevel,
    )


def _select(
    module: nn.Module,
    wanted: StateDictType,
    model_config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    if not isinstance(wanted, StateDictType):
        raise TypeError(
            f"state_dict_type must be a StateDictType, not {type(wanted).__name__} {wanted!r}: pass for "
            "instance StateDictType.FULL_STATE_DICT"
        )
    configs: list[Any] = []
    names, given = ("state_dict_config", "optim_state_dict_config"), (model_config, optim_config)
    for name, expected, config in zip(names, _CONFIG_TYPES[wanted], given, strict=True):
        if config is not None and type(config) is not expected:
            raise RuntimeError(
                f"Expected {name} of type {expected} but got {type(config)}: pass {expected.__name__}(...)"
            )
        configs.append(expected() if config is None else config)
    fsdp_modules = units_of(module)
    previous = [_settings(fsdp_module) for fsdp_module in fsdp_modules]
    for one in previous[1:]:
        if one.state_dict_type != previous[0].state_dict_type:
            raise AssertionError("All FSDP modules should have the same state_dict_type.")
        for name in names:
            if not isinstance(getattr(one, name), type(getattr(previous[0], name))):
                raise AssertionError(f"All FSDP modules must have the same type of {name}.")
    for fsdp_module in fsdp_modules:
        fsdp_module._state_dict_type = wanted
        fsdp_module._state_dict_config, fsdp_module._optim_state_dict_config = configs
    if previous:
        return previous[0]
    return StateDictSettings(None, None, None)  # type: ignore[arg-type]  # torch returns this too if there is no unit


def _settings(module: ShardedModule) -> StateDictSettings:
    return StateDictSettings(
        module._state_dict_type, module._state_dict_config, module._optim_state_dict_config
    )


def _note_mesh(module: ShardedModule, config: StateDictConfig | OptimStateDictConfig) -> None:
    """Refuse local state dicts with a device mesh. Set the flag in ``config`` by which readers expect DTensors."""
    if module._device_mesh is None:
        return
    if module._state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT: "
            "set state_dict_type to SHARDED_STATE_DICT"
        )
    vars(config)["_use_dtensor"] = True


# ----------------------------------------------------------------- the four hooks


def register_hooks(fsdp_module: ShardedModule) -> None:
    """Register the state dict hooks: module-level functions, so that a hooked module can be pickled and copied."""
    module: nn.Module = fsdp_module
    module.register_state_dict_pre_hook(_pre_save_hook)
    module._register_state_dict_hook(_post_save_hook)
    module._register_load_state_dict_pre_hook(_pre_load_hook, with_module=True)
    module.register_load_state_dict_post_hook(_post_load_hook)


class _Saving(threading.local):
    """Outermost ``state_dict()`` of a unit in this thread. Its units share their transfers."""

    def __init__(self) -> None:
        self.outermost: ShardedModule | None = None
        self.values: dict[ShardedModule, list[Tensor]] = {}


_saving = _Saving()


@contextlib.contextmanager
def saving(fsdp_module: ShardedModule) -> Iterator[None]:
    """Context around ``state_dict()`` of a unit, entered by nested units as well. Restores the modules."""
    if _saving.outermost is not None:
        yield
        return
    _refuse_part_of_shared(fsdp_module)
    config = fsdp_module._state_dict_config
    if isinstance(config, FullStateDictConfig) and config.offload_to_cpu and not config.rank0_only:
        if any(handle.layout.sharded for handle in handles_in(fsdp_module)):
            warn_of_copies()
    _saving.outermost, _saving.values = fsdp_module, {}
    try:
        with held(fsdp_module), collector_paused():
            yield
    finally:
        _saving.outermost, _saving.values = None, {}


@contextlib.contextmanager
def held(fsdp_module: ShardedModule) -> Iterator[None]:
    """Prevent steps in other threads while the body saves or loads. Raise RuntimeError if a step is running.

    Units whose post-hook did not run because another hook raised are closed at exit.
    """
    runtime, already_open = fsdp_module._unit.runtime, set(_open)
    held_here = runtime is not None and runtime.begin_state_dict()
    try:
        yield
    finally:
        for module in [module for module in _open if module not in already_open]:
            _open.pop(module).stack.close()
        if runtime is not None and held_here:
            runtime.end_state_dict()


def _refuse_part_of_shared(fsdp_module: ShardedModule) -> None:
    """Raise RuntimeError if the dict would hold a shard, or nothing, of parameters of an enclosing unit."""
    for holder, names in holders_around(fsdp_module).items():
        if not is_summoned(holder):
            around = unit_name(holder.module)
            raise RuntimeError(
                f"{place_of(fsdp_module)}: {first_names(names)} of {around} are shared with modules outside of "
                f"this unit, so {around} owns them. Take the state dict of that unit, or call this inside its "
                "summon_full_params()"
            )


def _values_of(fsdp_module: ShardedModule) -> list[Tensor]:
    """Return the values to save of the unit's parameters. The first call makes those of all units."""
    if fsdp_module not in _saving.values:
        # user code may call nn.Module.state_dict directly, or hold units that module traversal does not find
        together = [] if _saving.outermost is None else units_of(_saving.outermost)
        modules = [module for module in dict.fromkeys([fsdp_module, *together]) if module._handle is not None]
        for module in modules:
            check_idle(module)
        warn_of_partial_units(fsdp_module, modules)
        _saving.values |= saved_values((module for module in modules if is_full(module)), as_rows=False)
        _saving.values |= saved_values((module for module in modules if not is_full(module)), as_rows=True)
    return _saving.values.pop(fsdp_module)


@torch.no_grad()
def _pre_save_hook(fsdp_module: ShardedModule, prefix: str, keep_vars: bool) -> None:
    kind, rows = _kind(fsdp_module), {}
    with contextlib.ExitStack() as stack:
        _enter(fsdp_module, stack, binds=not _is_unsharded_off_device(fsdp_module))
        if fsdp_module._unit.is_root and fsdp_module._unit.runtime is not None:
            fsdp_module._unit.runtime.reset_grad_info()
        for part in _parts_with_params(fsdp_module):
            check_idle(part, summoned=kind != StateDictType.LOCAL_STATE_DICT)
            if kind == StateDictType.FULL_STATE_DICT:
                stack.enter_context(full_values_shown(part, _values_of(part)))
            elif kind == StateDictType.SHARDED_STATE_DICT:
                # before names_shown(): inside summon_full_params rows are read from the modules
                rows[part] = _values_of(part)
                stack.enter_context(names_shown(part))
        _open[fsdp_module] = _Open(stack.pop_all(), rows, set())


@torch.no_grad()
def _post_save_hook(
    fsdp_module: ShardedModule, state_dict: StateDict, prefix: str, local_metadata: Any
) -> StateDict:
    kind = _kind(fsdp_module)
    opened = _open.pop(fsdp_module)
    with opened.stack:
        is_root = fsdp_module._unit.is_root
        _strip_wrapper(state_dict, prefix)
        if _saving.outermost in (None, fsdp_module):
            _clean_metadata(getattr(state_dict, "_metadata", {}), prefix)
        for part in _parts_with_params(fsdp_module):
            if kind == StateDictType.FULL_STATE_DICT:
                put_full_values(part, state_dict, prefix)
            elif kind == StateDictType.SHARDED_STATE_DICT:
                put_sharded_values(part, state_dict, prefix, opened.rows.pop(part))
            else:
                put_local_value(part, state_dict, prefix)
    _finish_buffers(fsdp_module, state_dict, prefix, kind)
    if is_root and logger.isEnabledFor(logging.INFO):
        for key, value in state_dict.items():
            if key.startswith(prefix) and isinstance(value, Tensor):
                logger.info(
                    "%s: shape=%s, dtype=%s, device=%s", key, tuple(value.shape), value.dtype, value.device
                )
    return state_dict


@torch.no_grad()
def _pre_load_hook(
    fsdp_module: ShardedModule,
    state_dict: StateDict,
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *_: object,
) -> None:
    kind = _kind(fsdp_module)
    with contextlib.ExitStack() as stack:
        _enter(fsdp_module, stack)
        parts = _parts_with_params(fsdp_module)
        for part in parts:
            check_idle(part, summoned=kind != StateDictType.LOCAL_STATE_DICT)
        supplied: set[str] = set()
        if kind == StateDictType.LOCAL_STATE_DICT:
            for part in parts:
                load_local_value(part, state_dict, prefix)
                supplied |= supplied_names(part, prefix, frozenset())
        else:
            marks = begin_load(fsdp_module, state_dict, prefix)
            for part, mark in zip(parts_of(fsdp_module), marks, strict=True):
                if mark.is_loaded:
                    supplied |= supplied_names(part, prefix, mark.missing)
                    if not fsdp_module._use_orig_params:  # the modules hold no such parameters to report
                        missing_keys.extend(prefix + name for name in sorted(mark.missing))
                elif part._handle is not None:
                    stack.enter_context(unsharded_for_load(part, state_dict, prefix))
        # moved to the end of the dict, in their order
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + WRAPPED_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
        _open[fsdp_module] = _Open(stack.pop_all(), {}, supplied)


@torch.no_grad()
def _post_load_hook(fsdp_module: ShardedModule, incompatible_keys: _IncompatibleKeys) -> None:
    _kind(fsdp_module)
    opened = _open.pop(fsdp_module)
    opened.stack.close()
    # a backward directly after the load unshards without the start of a new step
    synchronize(fsdp_module.compute_device)
    for keys in incompatible_keys:
        keys[:] = [clean_name(key) for key in keys]
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if key not in opened.supplied]


def _parts_with_params(fsdp_module: ShardedModule) -> list[ShardedModule]:
    return [part for part in parts_of(fsdp_module) if part._handle is not None]


def _kind(fsdp_module: ShardedModule) -> StateDictType:
    """Return the type of the unit's state dict. Warn under NO_SHARD, which ignores the selection."""
    if fsdp_module.sharding_strategy == ShardingStrategy.NO_SHARD:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
            stacklevel=4,
        )
    else:
        _note_mesh(fsdp_module, fsdp_module._state_dict_config)
    return type_of(fsdp_module)


def _enter(fsdp_module: ShardedModule, stack: contextlib.ExitStack, binds: bool = True) -> None:
    """Begin a save or a load. ``binds``: bind the units to one runtime, which raises if they were moved."""
    if fsdp_module in _open:
        raise AssertionError(
            "Entering the ``_unshard_fsdp_state_params`` context but the previous one is still open (rank "
            f"{fsdp_module.rank}): a state_dict() or load_state_dict() call on it raised, or calls itself"
        )
    synchronize(fsdp_module.compute_device)
    if binds:
        stack.enter_context(bound_runtime(fsdp_module))


# ----------------------------------------------------------------- keys and buffers


def _finish_buffers(
    fsdp_module: ShardedModule, state_dict: StateDict, prefix: str, kind: StateDictType
) -> None:
    """Drop, offload or cast back the persistent buffers of the unit."""
    casts = fsdp_module.mixed_precision.buffer_dtype is not None and kind != StateDictType.LOCAL_STATE_DICT
    if not (casts or fsdp_module._state_dict_config.offload_to_cpu or is_dropped(fsdp_module)):
        return
    named = [
        (clean_name(name), buf) for name, buf in named_buffers(fsdp_module._fsdp_wrapped_module, is_unit)
    ]
    # the original dtype of a shared buffer is recorded under its first name
    recorded = {buffer: name for name, buffer in reversed(named) if name in fsdp_module._buffer_names}
    for name, buffer in named:
        key = prefix + name
        if key not in state_dict:
            continue  # not persistent
        if is_dropped(fsdp_module):
            del state_dict[key]
        else:
            if fsdp_module._state_dict_config.offload_to_cpu:
                state_dict[key] = state_dict[key].cpu()
            if casts and buffer in recorded and recorded[buffer] not in fsdp_module._ignored_buffer_names:
                dtypes = fsdp_module._buffer_name_to_orig_dtype
                if recorded[buffer] not in dtypes:
                    raise AssertionError(
                        f"{recorded[buffer]} is missing from pre-computed dict on rank {fsdp_module.rank}: the "
                        f"original dtypes of buffers are known of {list(dtypes)}"
                    )
                state_dict[key] = state_dict[key].to(dtypes[recorded[buffer]], copy=True)


def _strip_wrapper(state_dict: StateDict, prefix: str) -> None:
    """Remove the wrapper's segment from a unit's keys: the last keys of the dict, just added by the unit."""
    old = prefix + WRAPPED_PREFIX
    added = reversed(state_dict)
    if prefix:
        added = itertools.takewhile(lambda key: key.startswith(prefix), added)
    for key in [key for key in added if key.startswith(old)][::-1]:
        state_dict[prefix + key[len(old) :]] = state_dict.pop(key)


def _clean_metadata(metadata: dict[str, Any], prefix: str) -> None:
    """Rename metadata of the modules in a unit, the last entries of the dict, to the unwrapped modules' names.

    Wrapped names are kept too if there is a prefix: a plain module around the unit looks them up in its load,
    before any hook of a unit runs.
    """
    inside = prefix + WRAPPED_PREFIX
    added = list(itertools.takewhile(lambda name: (name + ".").startswith(prefix), reversed(metadata)))
    for name in [name for name in reversed(added) if (name + ".").startswith(inside)]:
        metadata[_unwrapped(name)] = metadata[name] if prefix else metadata.pop(name)


def _unwrapped(path: str) -> str:
    return (path + ".").replace(WRAPPED_PREFIX, "").removesuffix(".")


def with_wrapped_metadata(fsdp_module: ShardedModule, state_dict: object) -> object:
    """Return ``state_dict``, or a copy with metadata also under the names of modules inside units during a load."""
    metadata = getattr(state_dict, "_metadata", None)
    if not isinstance(state_dict, Mapping) or metadata is None:
        return state_dict
    copy: Any = OrderedDict(state_dict)
    copy._metadata = OrderedDict(metadata)
    for path, _ in fsdp_module.named_modules(remove_duplicate=False):
        if path not in metadata and _unwrapped(path) in metadata:
            copy._metadata[path] = metadata[_unwrapped(path)]
    return copy


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


def _is_unsharded_off_device(fsdp_module: ShardedModule) -> bool:
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
