"""State dicts of models: which kind is selected, and the hooks that give ``state_dict()`` the unwrapped module's names.

[Note: Saving unit by unit]
The pre hook gathers a unit, clones its parameters one by one (straight to CPU memory under ``offload_to_cpu``), frees
what was gathered, and only then shows the clones on the modules, from where nn.Module collects them. So an outer unit
does not stay gathered while its inner units are saved: the peak is the result and one unit. Until the post hook the
handle stays in SUMMON_FULL_PARAMS, so that a forward after a ``state_dict()`` that raised is refused.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from fsdp_c import _C, common, tensor_parallel
from fsdp_c.api import (
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
from fsdp_c.traversal import FLAT_PARAM, WRAPPED_PREFIX, clean_name, is_unit, units_of
from fsdp_c.unshard_params import check_idle

logger = logging.getLogger(__name__)

_CONFIG_TYPES: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

# What the pre hook of a unit opened and its post hook closes.
_open: weakref.WeakKeyDictionary[nn.Module, contextlib.ExitStack] = weakref.WeakKeyDictionary()


# ----------------------------------------------------------------- selection


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Select the kind of state dict for all units in ``module``; returns the previous settings (None without units).

    The configs default to those of the type and are shared by the units. Raises RuntimeError for a config of another
    type, AssertionError where the units disagreed before.
    """
    _warn_deprecated()
    return _select(module, state_dict_type, state_dict_config, optim_state_dict_config)


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` for the body alone; the previous settings come back also when the body raises."""
    _warn_deprecated()
    previous = _select(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        _warn_deprecated()
        if previous.state_dict_type is not None:
            _select(module, previous.state_dict_type, previous.state_dict_config, previous.optim_state_dict_config)


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """The settings of the units in ``module``, None without units. Raises AssertionError where they differ."""
    units = units_of(module)
    if not units:
        return None
    found = _settings(units[0])
    for unit in units[1:]:
        if _settings(unit) != found:
            raise AssertionError(
                f"All FSDP modules must have the same state dict settings. Got {_settings(unit)} and {found}."
            )
    for unit in units:
        if _has_mesh(unit):
            _refuse_local_with_mesh(unit)
            unit._optim_state_dict_config._use_dtensor = True
    return found


def _warn_deprecated() -> None:
    # Callers filter this warning by how it starts.
    warnings.warn(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Use get_state_dict() and "
        "set_state_dict() of torch.distributed.checkpoint.state_dict, which serve every kind of parallelism.",
        FutureWarning,
        stacklevel=4,
    )


def _select(
    module: nn.Module,
    wanted: StateDictType,
    model_config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    model_type, optim_type = _CONFIG_TYPES[wanted]
    model_config = _config("state_dict_config", model_type, model_config)
    optim_config = _config("optim_state_dict_config", optim_type, optim_config)
    units = units_of(module)
    previous = [_settings(unit) for unit in units]
    _check_uniform(previous)
    for unit in units:
        unit._state_dict_type = wanted
        unit._state_dict_config = model_config
        unit._optim_state_dict_config = optim_config
    return previous[0] if previous else StateDictSettings(None, None, None)  # type: ignore[arg-type]


def _config(name: str, expected: type, given: Any) -> Any:
    if given is None:
        return expected()
    if type(given) is not expected:
        raise RuntimeError(f"Expected {name} of type {expected} but got {type(given)}")
    return given


def _check_uniform(settings: list[StateDictSettings]) -> None:
    for one in settings[1:]:
        if one.state_dict_type != settings[0].state_dict_type:
            raise AssertionError("All FSDP modules should have the same state_dict_type.")
        for field in ("state_dict_config", "optim_state_dict_config"):
            if not isinstance(getattr(one, field), type(getattr(settings[0], field))):
                raise AssertionError(f"All FSDP modules must have the same type of {field}.")


def _settings(unit: Any) -> StateDictSettings:
    return StateDictSettings(unit._state_dict_type, unit._state_dict_config, unit._optim_state_dict_config)


def _has_mesh(unit: Any) -> bool:
    return getattr(unit, "_device_mesh", None) is not None


def _refuse_local_with_mesh(unit: Any) -> None:
    if unit._state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT: "
            "set state_dict_type to SHARDED_STATE_DICT"
        )


# ----------------------------------------------------------------- the four hooks


def register_hooks(fsdp_module: nn.Module) -> None:
    """Register the state dict hooks; module-level functions, so that a hooked module pickles and copies."""
    fsdp_module.register_state_dict_pre_hook(_pre_save_hook)
    fsdp_module._register_state_dict_hook(_post_save_hook)
    fsdp_module._register_load_state_dict_pre_hook(_pre_load_hook, with_module=True)
    fsdp_module.register_load_state_dict_post_hook(_post_load_hook)


@torch.no_grad()
def _pre_save_hook(fsdp_module: Any, prefix: str, keep_vars: bool) -> None:
    _require_full(fsdp_module)
    with contextlib.ExitStack() as stack:
        _enter(fsdp_module, stack)
        if fsdp_module._unit.is_root:
            fsdp_module._unit.runtime.reset_grad_info()
        if fsdp_module._handle is not None:
            check_idle(fsdp_module)
            stack.enter_context(_clones_shown(fsdp_module))
        _open[fsdp_module] = stack.pop_all()


@torch.no_grad()
def _post_save_hook(fsdp_module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> dict[str, Any]:
    _require_full(fsdp_module)
    with _open.pop(fsdp_module):
        _replace_prefix(state_dict, prefix + WRAPPED_PREFIX, prefix)
        _finish_params(fsdp_module, state_dict, prefix)
    _finish_buffers(fsdp_module, state_dict, prefix)
    if fsdp_module._unit.is_root and logger.isEnabledFor(logging.INFO):
        for key, value in state_dict.items():
            if key.startswith(prefix) and isinstance(value, Tensor):
                logger.info("%s: shape=%s, dtype=%s, device=%s", key, tuple(value.shape), value.dtype, value.device)
    return state_dict


@torch.no_grad()
def _pre_load_hook(fsdp_module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _require_full(fsdp_module)
    _check_entries(fsdp_module, state_dict, prefix)
    with contextlib.ExitStack() as stack:
        _enter(fsdp_module, stack)
        if fsdp_module._handle is not None:
            check_idle(fsdp_module)
            if not _is_summoned(fsdp_module):
                fsdp_module._handle.summon_enter(True)
                stack.callback(fsdp_module._handle.summon_exit)
            registered = _registered(fsdp_module)
            stack.callback(_copy_assigned, registered)
            for param, shown in registered:
                if prefix + param.fqn in state_dict:
                    state_dict[prefix + param.fqn] = tensor_parallel.like(state_dict[prefix + param.fqn], shown)
        _replace_prefix(state_dict, prefix, prefix + WRAPPED_PREFIX)
        _open[fsdp_module] = stack.pop_all()


@torch.no_grad()
def _post_load_hook(fsdp_module: Any, incompatible_keys: Any) -> None:
    _require_full(fsdp_module)
    _open.pop(fsdp_module).close()
    for keys in incompatible_keys:
        keys[:] = [clean_name(key) for key in keys]


def _require_full(fsdp_module: Any) -> None:
    """Refuse what is not a full state dict; a unit that shards nothing gives a full one whatever was selected."""
    if fsdp_module.sharding_strategy == ShardingStrategy.NO_SHARD:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=4
        )
        return
    selected = fsdp_module._state_dict_type
    if _has_mesh(fsdp_module):
        _refuse_local_with_mesh(fsdp_module)
        fsdp_module._state_dict_config._use_dtensor = True
    if selected != StateDictType.FULL_STATE_DICT:
        raise NotImplementedError(
            f"state dicts of type {selected.name} are not supported yet: "
            "select StateDictType.FULL_STATE_DICT with set_state_dict_type() or state_dict_type()"
        )


def _enter(fsdp_module: Any, stack: contextlib.ExitStack) -> None:
    """What saving and loading open alike."""
    if fsdp_module in _open:
        raise AssertionError(
            f"Entering the state dict of a unit whose previous one is still open (rank {fsdp_module.rank}): "
            "a state_dict() or load_state_dict() call on it raised, or calls itself"
        )
    common.synchronize(fsdp_module.compute_device)
    stack.enter_context(common.bound_runtime(fsdp_module))


def _is_summoned(fsdp_module: Any) -> bool:
    """Whether the user is inside ``summon_full_params``: the parameters are gathered already."""
    return fsdp_module._handle.training_state == _C.USE_SUMMON_FULL_PARAMS


# ----------------------------------------------------------------- saving


def _is_dropped(fsdp_module: Any) -> bool:
    """Whether this rank returns nothing that the unit manages."""
    return getattr(fsdp_module._state_dict_config, "rank0_only", False) and fsdp_module.rank != 0


@contextlib.contextmanager
def _clones_shown(fsdp_module: Any) -> Iterator[None]:
    """See [Note: Saving unit by unit]."""
    with contextlib.ExitStack() as stack:
        summoned = _is_summoned(fsdp_module)
        if not summoned:
            fsdp_module._handle.summon_enter(False)
            stack.callback(fsdp_module._handle.summon_exit)
        clones = [] if _is_dropped(fsdp_module) else _cloned_params(fsdp_module)
        if not summoned:
            fsdp_module._handle.summon_hide()
        stack.enter_context(common.mounted(clones))
        yield


def _cloned_params(fsdp_module: Any) -> list[tuple[common.ManagedParam, nn.Parameter]]:
    """One clone per name, of the full parameters now on the modules."""
    offload = fsdp_module._state_dict_config.offload_to_cpu
    clones = []
    for param in common.managed_params(fsdp_module._handle):
        full = getattr(param.module, param.name)
        if full.shape != param.shape:
            raise AssertionError(
                f"{param.fqn} has shape {tuple(full.shape)} on rank {fsdp_module.rank}, not its full "
                f"{tuple(param.shape)}: inside summon_full_params(rank0_only=True) only rank 0 can save; "
                "select FullStateDictConfig(rank0_only=True)"
            )
        clone = full.detach().to("cpu", copy=True) if offload else full.detach().clone()
        clones.append((param, nn.Parameter(clone, requires_grad=full.requires_grad)))
    return clones


def _finish_params(fsdp_module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Leave plain tensors with their own memory, or nothing, under the names of the unit's parameters."""
    state_dict.pop(prefix + FLAT_PARAM, None)
    dropped = _is_dropped(fsdp_module)
    for param in common.managed_params(fsdp_module._handle):
        fqn = prefix + param.fqn
        if dropped:
            state_dict.pop(fqn, None)
            continue
        if fqn not in state_dict:
            raise AssertionError(
                f"FSDP expects {fqn} in the state dict but it holds only {list(state_dict)} "
                f"(prefix={prefix!r}, rank={fsdp_module.rank})"
            )
        # Under keep_vars the entry is the clone as a Parameter.
        state_dict[fqn] = state_dict[fqn].detach()


def _finish_buffers(fsdp_module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Drop, offload or cast back the persistent buffers of the unit."""
    first_names: dict[Tensor, str] = {}  # the original dtypes stand under the first name of a shared buffer
    for name, buffer in fsdp_module._fsdp_wrapped_module.named_buffers(remove_duplicate=False):
        key = prefix + clean_name(name)
        first_name = first_names.setdefault(buffer, clean_name(name))
        if key not in state_dict or WRAPPED_PREFIX in name:
            continue  # not persistent, or an inner unit's
        if _is_dropped(fsdp_module):
            del state_dict[key]
        else:
            state_dict[key] = _finished_buffer(fsdp_module, first_name, state_dict[key])


def _finished_buffer(fsdp_module: Any, name: str, buffer: Tensor) -> Tensor:
    if fsdp_module._state_dict_config.offload_to_cpu:
        buffer = buffer.cpu()
    if fsdp_module.mixed_precision.buffer_dtype is None or name in fsdp_module._ignored_buffer_names:
        return buffer
    dtypes = fsdp_module._buffer_name_to_orig_dtype
    if name not in dtypes:
        raise AssertionError(f"{name} is missing from the original buffer dtypes, which hold {list(dtypes)}")
    return buffer.to(dtypes[name], copy=True)


# ----------------------------------------------------------------- loading


def _registered(fsdp_module: Any) -> list[tuple[common.ManagedParam, Tensor]]:
    params = common.managed_params(fsdp_module._handle)
    return [(param, getattr(param.module, param.name)) for param in params]


def _copy_assigned(registered: list[tuple[common.ManagedParam, Tensor]]) -> None:
    """After ``load_state_dict(assign=True)`` the modules hold other tensors: take their values, keep our parameters."""
    for param, ours in registered:
        loaded = getattr(param.module, param.name)
        if loaded is not ours:
            ours.detach().copy_(loaded.detach())
            param.module._parameters[param.name] = ours  # type: ignore[assignment]


def _check_entries(fsdp_module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Raise RuntimeError naming every entry below ``prefix`` that does not fit, before anything has been copied."""
    errors = []
    for key, shape in _expected_shapes(fsdp_module, prefix):
        value = state_dict.get(key)
        if key not in state_dict:
            continue
        if not torch.overrides.is_tensor_like(value):
            errors.append(f"expected a tensor for {key} but the checkpoint holds {type(value)}")
        # nn.Module takes a checkpoint's one-element vector for a scalar.
        elif value.shape != shape and not (len(shape) == 0 and value.shape == (1,)):
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {shape}."
            )
    if errors:
        header = f"Error(s) in loading state_dict for {type(fsdp_module).__name__} on rank {fsdp_module.rank}:"
        raise RuntimeError("\n\t".join([header, *errors]))


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


def _replace_prefix(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Rename the keys that start with ``old``; they keep their order and move behind the others."""
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)
