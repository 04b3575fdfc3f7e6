"""Owners of flat parameters: the class that units and segments share, segments, and lookup of both in a tree.

A unit is a FullyShardedDataParallel. Modules below that class know its instances as ShardedModules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import _C
from fsdp_c.compat.mixed_use import refuse_torchs_functions
from fsdp_c.compat.upstream import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictType,
    TrainingState,
)
from fsdp_c.sharding.configuration import UnitConfig
from fsdp_c.sharding.flat_param import FlatParameter, FlatParamHandle
from fsdp_c.sharding.traversal import (
    FLAT_PARAM,
    check_module,
    flat_param_name,
    is_composable,
    is_unit,
    unwrapped,
)
from fsdp_c.sharding.wrap import unit_name

if TYPE_CHECKING:
    # torch's class declares attributes of its own types
    from fsdp_c.compat.standins.common_utils import _FSDPState
else:
    from fsdp_c.compat.upstream import _FSDPState


class ShardedModule(nn.Module, _FSDPState):
    """The owner of one flat parameter: a unit (FullyShardedDataParallel), or a segment of one."""

    _unit: _C.Unit
    _lazy_init: Callable[..., None]  # the unit's method
    _fsdp_wrapped_module: nn.Module
    _is_root_override: bool | None  # set by an assignment to _is_root
    _was_summoned: bool  # set by summon_full_params, after which FSDP1 reports a root
    _segments: Sequence[ShardedModule] = ()  # one per further flat parameter
    _flat_param_name: str = FLAT_PARAM  # name by which the wrapped module registers the flat parameter
    _exec_order_data: Any  # prefetch limits; the root's object after lazy initialization
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _ignored_buffer_names: set[str]
    _device_mesh: DeviceMesh | None
    # the parameters before wrapping, without flattened ones
    _params_before: list[weakref.ref[nn.Parameter]]

    def _init_state(
        self,
        config: UnitConfig,
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        buffer_dtypes: dict[str, torch.dtype],
    ) -> None:
        """Set the attributes that other libraries read: values of ``config`` and the initial state."""
        self._config = config
        self.process_group = config.shard_group
        self.rank = config.shard_group.rank()
        self.world_size = config.shard_group.size()
        if config.replicate_group is not None:
            self._inter_node_pg = config.replicate_group
            self._inter_node_state = DefaultState(config.replicate_group)
        self.compute_device = config.device
        self.sharding_strategy = config.strategy
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.backward_prefetch = config.backward_prefetch
        self.forward_prefetch = config.forward_prefetch
        self.limit_all_gathers = config.limit_all_gathers
        self._use_orig_params = config.use_orig_params
        self._gradient_predivide_factor = config.predivide
        self._gradient_postdivide_factor = config.postdivide
        self._fsdp_extension = config.extension
        self._fully_sharded_module_to_handle: dict[nn.Module, FlatParamHandle] = {}
        self._comm_hook: Callable[..., None] | None = None
        self._comm_hook_state: object = None
        self._buffer_name_to_orig_dtype = buffer_dtypes
        self._buffer_names = set(buffer_dtypes)
        self._agreed_plan: bytes | None = None  # digest of the plan on which all ranks agreed
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()
        self._enclosing: weakref.ref[ShardedModule] | None = None  # enclosing unit

    def _reset_lazy_init(self) -> None:
        """Clear the root decision of this unit's tree; the next forward decides again."""
        if self._unit.runtime is not None:
            self._unit.runtime.release()
        vars(self).pop("_is_root_override", None)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpoint wrapper."""
        return unwrapped(self._fsdp_wrapped_module)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return cast("FlatParamHandle | None", self._unit.handle)  # the object passed to C

    @property
    def _has_params(self) -> bool:
        return self._unit.handle is not None

    @property
    def _flat_param(self) -> FlatParameter | None:
        handle = self._handle
        return None if handle is None else handle.flat_param

    @property
    def params(self) -> list[FlatParameter]:
        """The unit's flat parameters: empty without parameters, several for a unit with segments."""
        return [part._handle.flat_param for part in parts_of(self) if part._handle is not None]

    @property
    def training_state(self) -> TrainingState:
        """IDLE, FORWARD_BACKWARD or SUMMON_FULL_PARAMS."""
        if self._unit.training_state == _C.USE_IDLE:
            return TrainingState.IDLE
        if self._unit.training_state == _C.USE_SUMMON_FULL_PARAMS:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD

    @training_state.setter
    def training_state(self, state: TrainingState) -> None:
        refuse_torchs_functions(unit_name(self.module))

    @property
    def _replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same shard, for hybrid strategies."""
        return self._config.replicate_group

    @property
    def _is_root(self) -> bool | None:
        """True for the root of a tree that has run; None before. Clients may assign it between steps.

        Assigning None makes the next forward decide again. Assigning False lets an outer unit become the root
        of a unit that ran by itself. Until then True and False are only reported: the actual root does not
        change. After summon_full_params, the value is that of check_is_root().
        """
        return self.check_is_root() if "_was_summoned" in vars(self) else self._decided_is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        vars(self).pop("_was_summoned", None)
        if value is None and self.training_state == TrainingState.IDLE:
            self._reset_lazy_init()
        else:
            self._is_root_override = value

    @property
    def _decided_is_root(self) -> bool | None:
        """The decision of a step or a client; None before any."""
        return self._is_root_override if "_is_root_override" in vars(self) else self._unit.is_root

    @property
    def _enclosing_unit(self) -> ShardedModule | None:
        return None if self._enclosing is None else self._enclosing()

    @property
    def _sync_gradients(self) -> bool:
        return self._unit.sync_gradients

    @_sync_gradients.setter
    def _sync_gradients(self, value: bool) -> None:
        self._unit.sync_gradients = value

    def check_is_root(self) -> bool:
        """Return True for the root of its tree; before the first step, for a unit without an enclosing unit.

        Has no side effects.
        """
        decided = self._decided_is_root
        return self._enclosing_unit is None if decided is None else decided

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise ValueError unless the training state is ``state``, or one of them."""
        if self._unit.runtime is not None:
            self._unit.runtime.recover()
        expected = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in expected:
            raise ValueError(
                f"expected to be in states {expected} but current state is {self.training_state} "
                f"({unit_name(self.module)}, rank {self.rank})"
            )


class Segment(ShardedModule):
    """A further flat parameter of a unit, for parameters of another dtype or ``requires_grad``.

    The unit owns the first group of ``flattening.groups_of``; each further group is a segment around the same
    module. Traversals list segments after their unit. A segment has its own handle, FQNs and state; other
    attributes delegate to the unit. C unshards and reshards segments together with their unit.
    """

    def __init__(self, fsdp_module: ShardedModule, number: int, handle: FlatParamHandle) -> None:
        super().__init__()
        self._enclosing = weakref.ref(fsdp_module)
        self._flat_param_name = flat_param_name(number)
        self._unit = _C.Unit(self, handle, fsdp_module._config, handle.name, ())

    def __getattr__(self, name: str) -> Any:
        enclosing = self.__dict__.get("_enclosing")
        fsdp_module = enclosing() if enclosing is not None else None
        if fsdp_module is None:
            raise AttributeError(
                f"the unit of this segment was freed, and the segment itself has no attribute {name!r}"
            )
        return getattr(fsdp_module, name)


def handle_of(module: ShardedModule) -> FlatParamHandle:
    """Return the handle of a unit with parameters."""
    handle = module._handle
    assert handle is not None
    return handle


def place_of(fsdp_module: ShardedModule) -> str:
    """Return the rank and the unit, to begin an error or a warning."""
    return f"rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}"


def is_summoned(module: ShardedModule) -> bool:
    """Return True inside ``summon_full_params``, where the unit is unsharded already."""
    return handle_of(module).training_state == _C.USE_SUMMON_FULL_PARAMS


# ----------------------------------------------------------------- traversal


def is_sharded_module(module: object) -> TypeGuard[ShardedModule]:
    """Return ``is_unit`` for any object."""
    return isinstance(module, nn.Module) and is_unit(module)


def units_with_paths(module: nn.Module) -> list[tuple[str, ShardedModule]]:
    """Return (path, unit) for all units of a tree in pre-order. Paths are relative to ``module``.

    Segments follow their unit, with the same path. Raises TypeError unless ``module`` is an nn.Module.
    """
    check_module(module)
    found: list[tuple[str, ShardedModule]] = []
    visited: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        path, current = pending.pop()
        if current in visited or not is_composable(current):
            continue
        visited.add(current)
        if is_sharded_module(current):
            found += [(path, part) for part in parts_of(current)]
        children = current._modules
        if children:
            prefix = path + "." if path else ""
            for name, child in reversed(children.items()):
                if child is not None and (child._modules or is_unit(child)):  # skip leaves: most modules are
                    pending.append((prefix + name, child))
    return found


def units_of(module: nn.Module) -> list[ShardedModule]:
    """Return the units of a tree in pre-order, each followed by its segments, including ``module`` itself."""
    return [fsdp_module for _, fsdp_module in units_with_paths(module)]


def handles_in(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of a tree: those of ``units_of`` that have parameters."""
    return [unit._handle for unit in units_of(module) if unit._handle is not None]


def parts_of(fsdp_module: ShardedModule) -> list[ShardedModule]:
    """Return a unit and its segments: one per flat parameter."""
    return [fsdp_module, *fsdp_module._segments]


def holders_around(fsdp_module: ShardedModule) -> dict[ShardedModule, list[str]]:
    """Return the enclosing units that own parameters of modules inside ``fsdp_module``, with their FQNs.

    Such parameters are shared with modules outside of ``fsdp_module``.
    """
    inside: set[nn.Module] = set()
    found: dict[ShardedModule, list[str]] = {}
    outer = fsdp_module._enclosing_unit
    while outer is not None:
        inside = inside or set(fsdp_module.modules())
        for part in parts_of(outer):
            params = [] if part._handle is None else part._handle.managed_params
            if names := [param.fqn for param in params if param.module in inside]:
                found[part] = names
        outer = outer._enclosing_unit
    return found


# ----------------------------------------------------------------- lookup by wrapped module

_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()


def register_unit(module: nn.Module, fsdp_module: ShardedModule) -> None:
    """Register ``fsdp_module`` as the unit that wraps ``module``."""
    _units[module] = weakref.ref(fsdp_module)


def unit_around(module: nn.Module) -> ShardedModule | None:
    """Return the unit that wraps ``module`` directly, or None."""
    reference = _units.get(module)
    return None if reference is None else reference()


def live_units() -> list[ShardedModule]:
    """Return all live units and their segments."""
    # Copy first: other threads may register units.
    wrapped = [module for key in _units.keyrefs() if (module := key()) is not None]
    alive = (unit for module in wrapped if (unit := unit_around(module)) is not None)
    return [part for unit in alive for part in parts_of(unit)]


def root_units() -> list[ShardedModule]:
    """Return the live units without an enclosing unit."""
    return [unit for unit in live_units() if unit._enclosing_unit is None]
