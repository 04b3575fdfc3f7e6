"""A unit or segment, as modules of this package below FullyShardedDataParallel know it, and how they find units."""

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
    # torch's own declares attributes, of its own types
    from fsdp_c.compat.standins.common_utils import _FSDPState
else:
    from fsdp_c.compat.upstream import _FSDPState


class ShardedModule(nn.Module, _FSDPState):
    """A unit or one of its segments: the owner of one flat parameter. Base of FullyShardedDataParallel and Segment."""

    _unit: _C.Unit
    _fsdp_wrapped_module: nn.Module
    _said_is_root: bool | None  # there once a client has written _is_root
    _was_summoned: bool  # there once summon_full_params has shown the tree, which makes it one to torch
    _segments: Sequence[ShardedModule] = ()  # one for each further flat parameter
    _flat_param_name: str = FLAT_PARAM  # name by which the wrapped module registers the flat parameter
    _exec_order_data: Any  # limits of prefetching; from lazy initialisation on, it is the root's
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _ignored_buffer_names: set[str]
    _device_mesh: DeviceMesh | None
    # the parameters as the script had them; empty once a backward was checked
    _params_before: list[weakref.ref[nn.Parameter]]

    def _init_state(
        self,
        config: UnitConfig,
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        buffer_dtypes: dict[str, torch.dtype],
    ) -> None:
        """Set the attributes that other libraries read: those that show ``config``, and state before the first step."""
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
        self._agreed_plan: bytes | None = None  # hash of the plan that all ranks have
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()
        self._enclosing: weakref.ref[ShardedModule] | None = None  # the unit around this one

    def _lazy_init(self, alone: bool = False) -> None:
        """Make this the root of its tree unless that has one."""
        raise NotImplementedError

    def _reset_lazy_init(self) -> None:
        """Forget who the root of this unit's tree is; the next forward decides anew."""
        if self._unit.runtime is not None:
            self._unit.runtime.release()
        vars(self).pop("_said_is_root", None)

    @property
    def _whole(self) -> ShardedModule:
        """The unit that this is, or is a segment of."""
        return self

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpoint wrapper directly around it."""
        return unwrapped(self._fsdp_wrapped_module)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return cast("FlatParamHandle | None", self._unit.handle)  # the object that C was given

    @property
    def _has_params(self) -> bool:
        return self._unit.handle is not None

    @property
    def _flat_param(self) -> FlatParameter | None:
        handle = self._handle
        return None if handle is None else handle.flat_param

    @property
    def params(self) -> list[FlatParameter]:
        """The unit's flat parameters: one, none without parameters, several for a unit with segments."""
        return [part._handle.flat_param for part in parts_of(self) if part._handle is not None]

    @property
    def training_state(self) -> TrainingState:
        """IDLE, in a step, or inside summon_full_params."""
        state = self._unit.training_state
        if state == _C.USE_IDLE:
            return TrainingState.IDLE
        return (
            TrainingState.SUMMON_FULL_PARAMS
            if state == _C.USE_SUMMON_FULL_PARAMS
            else TrainingState.FORWARD_BACKWARD
        )

    @training_state.setter
    def training_state(self, state: TrainingState) -> None:
        refuse_torchs_functions(unit_name(self.module))

    @property
    def _replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, for hybrid strategies."""
        return self._config.replicate_group

    @property
    def _is_root(self) -> bool | None:
        """True for the root of a tree that has run; None before. Clients write it, between steps.

        None lets the next forward of a tree decide anew. False lets an outer unit become the root of one that
        was used by itself, until when it is remembered, as True is: which unit runs as the root does not
        change by it. After summon_full_params it is what check_is_root() says.
        """
        decided = self._decided_is_root
        return self._enclosing_unit is None if decided is None and "_was_summoned" in vars(self) else decided

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        vars(self).pop("_was_summoned", None)
        if value is None and self.training_state == TrainingState.IDLE:
            self._reset_lazy_init()
        else:
            self._said_is_root = value

    @property
    def _decided_is_root(self) -> bool | None:
        """The decision of a step or a client, None without one."""
        return self._said_is_root if "_said_is_root" in vars(self) else self._unit.is_root

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
        """True for the root of its tree. Before the first step: for a unit that no other was wrapped around.

        Asking decides nothing.
        """
        decided = self._decided_is_root
        return self._enclosing_unit is None if decided is None else decided

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """ValueError unless the unit is in the given state, or in one of them."""
        if self._unit.runtime is not None:
            self._unit.runtime.recover()
        expected = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in expected:
            raise ValueError(
                f"expected to be in states {expected} but current state is {self.training_state} "
                f"({unit_name(self.module)}, rank {self.rank})"
            )


class Segment(ShardedModule):
    """One more flat parameter of a unit, of parameters that differ in dtype, or in whether they are trained.

    The unit's own has the first group of ``grouping.groups_of``, and each further group is that of a segment,
    which wraps the same module: who walks over units finds it behind its unit, with a handle, names and state
    of its own. The rest its unit answers. The unit in C gathers, shows and frees its segments with itself.
    """

    def __init__(self, fsdp_module: ShardedModule, number: int) -> None:
        super().__init__()
        self._enclosing = weakref.ref(fsdp_module)
        self._flat_param_name = flat_param_name(number)

    def __getattr__(self, name: str) -> Any:
        enclosing = self.__dict__.get("_enclosing")
        fsdp_module = enclosing() if enclosing is not None else None
        if fsdp_module is None:
            raise AttributeError(f"a segment of a unit that is gone has no attribute {name!r}")
        return getattr(fsdp_module, name)

    @property
    def _whole(self) -> ShardedModule:
        fsdp_module = self._enclosing_unit
        assert fsdp_module is not None
        return fsdp_module

    def _lazy_init(self, alone: bool = False) -> None:
        """Initialise the tree of the unit."""
        self._whole._lazy_init(alone)


def handle_of(module: ShardedModule) -> FlatParamHandle:
    """The handle of a module whose unit has parameters."""
    handle = module._handle
    assert handle is not None
    return handle


def is_summoned(module: ShardedModule) -> bool:
    """True inside ``summon_full_params``: the unit's parameters are unsharded already."""
    return handle_of(module).training_state == _C.USE_SUMMON_FULL_PARAMS


# ----------------------------------------------------------------- finding them


def is_sharded_module(module: object) -> TypeGuard[ShardedModule]:
    """``is_unit`` for any object."""
    return isinstance(module, nn.Module) and is_unit(module)


def units_with_paths(module: nn.Module) -> list[tuple[str, ShardedModule]]:
    """The units of a tree and their paths from ``module``, depth first, an outer unit before its inner ones.

    The segments of a unit come behind it, with its path.

    Raises TypeError for what is no module.
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
                if child is not None and (child._modules or is_unit(child)):  # most modules are leaves
                    pending.append((prefix + name, child))
    return found


def units_of(module: nn.Module) -> list[ShardedModule]:
    """The units of a tree in traversal order, each with its segments, ``module`` among them if it is one."""
    return [fsdp_module for _, fsdp_module in units_with_paths(module)]


def whole_units_of(module: nn.Module) -> list[ShardedModule]:
    """``units_of`` without segments."""
    return [fsdp_module for fsdp_module in units_of(module) if fsdp_module._flat_param_name == FLAT_PARAM]


def parts_of(fsdp_module: ShardedModule) -> list[ShardedModule]:
    """A unit and its segments: one for each of its flat parameters."""
    return [fsdp_module, *fsdp_module._segments]


def holders_around(fsdp_module: ShardedModule) -> dict[ShardedModule, list[str]]:
    """The units around ``fsdp_module`` that hold parameters of modules inside of it, as modules elsewhere
    share them, and the names of those from each."""
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


# ----------------------------------------------------------------- by the module that they wrap

_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()


def claim_module(module: nn.Module, fsdp_module: ShardedModule) -> None:
    """Remember which unit wraps ``module``."""
    _units[module] = weakref.ref(fsdp_module)


def unit_around(module: nn.Module) -> ShardedModule | None:
    """The unit that wraps ``module`` directly, None without one."""
    reference = _units.get(module)
    return None if reference is None else reference()


def claimed_units() -> list[ShardedModule]:
    """All units that are alive, and their segments."""
    # at once: threads may add theirs
    wrapped = [module for key in _units.keyrefs() if (module := key()) is not None]
    alive = [
        unit for module in wrapped if (reference := _units.get(module)) and (unit := reference()) is not None
    ]
    return [part for unit in alive for part in parts_of(unit)]


def root_units() -> list[ShardedModule]:
    """The units that are alive and in no other unit."""
    return [unit for unit in claimed_units() if unit._whole is unit and unit._enclosing_unit is None]
