"""Steps of a unit's constructor: argument checks, ignored states, groups, strategy, device, parameters."""

import atexit
import numbers
import os
import time
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import _C
from fsdp_c.compat.errors import IGNORED_AND_TRAINED
from fsdp_c.compat.upstream import (
    HYBRID_SHARDING_STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    FSDPExtensions,
    MixedPrecision,
    ShardingStrategy,
    _FSDPState,
    dtensor_extensions,
    fsdp2_module_class,
)
from fsdp_c.sharding.configuration import UnitConfig
from fsdp_c.sharding.process_groups import global_rank
from fsdp_c.sharding.sharded_module import is_sharded_module, live_units
from fsdp_c.sharding.traversal import (
    Subtree,
    clean_name,
    current_auto_wrapping,
    is_composable,
    is_unit,
    joined,
)

CPU = torch.device("cpu")


# ---- arguments of the wrong type


def check_settings(
    strategy: object, mixed_precision: object, backward_prefetch: object, cpu_offload: object
) -> None:
    """Raise TypeError for settings of the wrong type, ValueError for dtypes that are not floating-point.

    Falsy values count as None, as in FSDP1.
    """
    _check_type("sharding_strategy", strategy, ShardingStrategy, "ShardingStrategy.FULL_SHARD")
    _check_type("backward_prefetch", backward_prefetch, BackwardPrefetch, "BackwardPrefetch.BACKWARD_PRE")
    if mixed_precision:
        example = "MixedPrecision(param_dtype=torch.bfloat16)"
        _check_type("mixed_precision", mixed_precision, MixedPrecision, example)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype") if mixed_precision else ():
        dtype = getattr(mixed_precision, name)
        _check_type(f"MixedPrecision.{name}", dtype, torch.dtype, "torch.bfloat16")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"MixedPrecision.{name} is {dtype}: pass a floating-point dtype, as torch.bfloat16"
            )
    if cpu_offload:
        _check_type("cpu_offload", cpu_offload, CPUOffload, "CPUOffload(offload_params=True)")


def check_places(
    process_group: object, device_mesh: object, device_id: object, param_init_fn: object = None
) -> None:
    """Raise TypeError or ValueError for invalid groups, meshes, devices and initialization functions."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(
            f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}: pass a function of a "
            "module as param_init_fn"
        )
    _check_type("device_mesh", device_mesh, DeviceMesh, 'init_device_mesh("cuda", (world_size,))')
    is_device = isinstance(device_id, (numbers.Integral, str, torch.device)) and not isinstance(
        device_id, bool
    )
    if device_id is not None and not is_device:
        raise TypeError(
            f"device_id must be a torch.device or the index of one, not {type(device_id).__name__} "
            f"{device_id!r}: pass for instance torch.device('cpu')"
        )
    for group in process_group if isinstance(process_group, (tuple, list)) else (process_group,):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"rank {global_rank()} is not in process_group: wrap the module on the ranks of the group "
                "only, or pass a group with all ranks that wrap it"
            )
        # duck-typed: backends and fake groups have rank() and size() too
        if not all(callable(getattr(group, name, None)) for name in ("rank", "size")):
            _check_type("process_group", group, dist.ProcessGroup, "torch.distributed.new_group(ranks)")


def _check_type(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__} or None, not {type(value).__name__} {value!r}: pass for "
            f"instance {example}"
        )


# ---- modules that cannot be wrapped


def refuse_foreign_units(tree: Subtree) -> None:
    """Raise ValueError if ``tree`` contains units of torch's own FSDP: implementations cannot be mixed."""
    foreign = (_FSDPState, fsdp2_module_class())
    for submodule, path in tree.modules.items():
        if isinstance(submodule, foreign):
            where = f"its submodule {path!r}" if path else "it"
            raise ValueError(
                f"cannot wrap {type(tree.root).__name__}: {where} is already sharded by torch's own FSDP "
                f"({type(submodule).__name__}). "
                "Build that part from the plain module with fsdp_c.FullyShardedDataParallel, or wrap the "
                "whole model with torch's"
            )


def warn_of_useless_unit(module: nn.Module) -> None:
    """Warn (UserWarning) about a unit without effect.

    A container's forward is never called, so its parameters would never be all-gathered. A unit around
    another unit owns no parameters.
    """
    if is_unit(module):
        warnings.warn(
            "the module is a FullyShardedDataParallel already, and another one around it would own "
            "no parameters: wrap it once",
            stacklevel=3,
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: wrap the "
            f"elements of the {type(module).__name__} instead",
            stacklevel=3,
        )


# ---- ignored states


class IgnoredStates(NamedTuple):
    """Modules, parameters and buffers that a unit ignores. Buffer names have no wrapper segments."""

    modules: set[nn.Module]
    params: set[nn.Parameter]
    buffer_names: set[str]


def resolve_ignored_states(
    tree: Subtree,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> IgnoredStates:
    """Return the ignored modules (with subtrees), parameters and buffers, including those of inner units."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time: ignored_states takes "
            "modules too"
        )
    inner_units = [unit for unit in tree.units if is_sharded_module(unit)]
    wrapping = current_auto_wrapping.get()
    shared = None if wrapping is None else wrapping.ignored_params
    if ignored_states is not shared or any(unit._ignored_params is not shared for unit in inner_units):
        shared = None
    modules, params = _split_ignored(ignored_modules, ignored_states if shared is None else None)
    for candidate in modules:
        if is_unit(candidate):
            raise ValueError(
                "`ignored_modules` should not include FSDP modules: pass the module that the unit wraps"
            )
    modules += [candidate for candidate in tree.modules if not is_composable(candidate)]
    ignored = IgnoredStates(set(), set(params) if shared is None else shared, set())
    if modules:
        ignored.modules.update(child for root in modules for child in root.modules() if not is_unit(child))
        if tree.root in ignored.modules:
            warnings.warn(
                "Trying to ignore the top-level module passed into the FSDP constructor itself will result in "
                f"all parameters being ignored: leave the {type(tree.root).__name__} out of ignored_modules or "
                "do not wrap it",
                stacklevel=3,
            )
        ignored.params.update(param for child in ignored.modules for param in child.parameters())
        buffers = {buffer for child in ignored.modules for buffer in child.buffers()}
        names = (clean_name(name) for buffer, name in tree.buffers.items() if buffer in buffers)
        ignored.buffer_names.update(names)
    for fsdp_module in inner_units:
        ignored.modules.update(fsdp_module._ignored_modules)
        ignored.buffer_names.update(fsdp_module._ignored_buffer_names)
    if shared is None:
        ignored.params.update(param for unit in inner_units for param in unit._ignored_params)
        flattened = {param for param in ignored.params if is_flattened(param)}
        ignored.params.difference_update(flattened)
    return ignored


def _split_ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Parameter] | Iterable[nn.Module] | None
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the ignored modules and parameters from the argument that was passed."""
    name = "ignored_modules" if states is None else "ignored_states"
    passed = modules if states is None else states
    if passed is None:
        return [], []
    try:
        given: list[Any] = list(passed)
    except TypeError as error:
        raise TypeError(f"{error}: pass a list as {name}") from error
    if all(isinstance(state, nn.Module) for state in given):
        return given, []
    if states is not None and all(isinstance(state, nn.Parameter) for state in given):
        return [], given
    types = sorted({type(state) for state in given}, key=repr)
    expected, remedy = "all nn.Parameter or all nn.Module", "pass one kind only"
    if states is None:
        expected, remedy = "nn.Module", "pass parameters as ignored_states"
    raise ValueError(f"{name} expects {expected} list elements but got types {types}: {remedy}")


# ---- process groups and strategy


class ProcessGroups(NamedTuple):
    """The process group to shard over, and for hybrid strategies the group of replicas."""

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None


def resolve_process_groups(
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    strategy: ShardingStrategy | None,
    device_mesh: DeviceMesh | None,
    has_policy: bool,
    device: torch.device,
) -> ProcessGroups:
    """Return the process groups. Collective over all ranks if a hybrid strategy needs new ones."""
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time: the groups are those of the "
            "mesh"
        )
    is_hybrid = strategy in HYBRID_SHARDING_STRATEGIES
    if device_mesh is not None:
        if not is_hybrid:
            return ProcessGroups(device_mesh.get_group(mesh_dim=0), None)
        if device_mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}: {strategy} takes "
                "dimensions (replicate, shard)"
            )
        return ProcessGroups(device_mesh.get_group(mesh_dim=1), device_mesh.get_group(mesh_dim=0))
    if not is_hybrid:
        if isinstance(process_group, (tuple, list)):
            raise ValueError(
                f"{strategy or ShardingStrategy.FULL_SHARD} takes one process group, but got "
                f"{len(process_group)}; a (shard, replicate) pair is for hybrid strategies"
            )
        return ProcessGroups(process_group if process_group is not None else _default_group(), None)
    if process_group is None:
        if not has_policy:
            raise ValueError(
                f"Manual wrapping with {strategy} requires explicit specification of process group or "
                "device_mesh, the same for all units: a (shard, replicate) pair or a 2-D mesh"
            )
        return _groups_by_node(_default_group(), device)
    groups = process_group if isinstance(process_group, tuple) else ()
    if len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise ValueError(
            "Expected process_group to be passed in as either None or a (shard, replicate) tuple of two "
            f"process groups with {strategy}, but got {type(process_group).__name__}"
        )
    return ProcessGroups(*groups)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized: call torch.distributed.init_process_group() "
            "before wrapping, in a script started with torchrun, or pass process_group"
        )
    return group


def _groups_by_node(world: dist.ProcessGroup, device: torch.device) -> ProcessGroups:
    """Shard within a node, replicate across nodes. Collective: every rank creates every group."""
    ranks_per_node = torch.get_device_module(device).device_count()
    if device.type == "cpu":
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size()))
    if world.size() % ranks_per_node:
        raise ValueError(
            f"hybrid sharding without groups needs nodes of equal size, but {world.size()} ranks do not fill "
            f"nodes of {ranks_per_node}; pass process_group as a (shard, replicate) pair or a 2-D device_mesh"
        )
    return groups_of_nodes(world, ranks_per_node)


def groups_of_nodes(world: dist.ProcessGroup, ranks_per_node: int) -> ProcessGroups:
    """Create the groups for nodes of ``ranks_per_node`` consecutive ranks. Collective over all ranks."""
    shard, _ = dist.new_subgroups(ranks_per_node)
    backend = dist.get_backend(world)
    replicas = [
        dist.new_group(list(range(place, world.size(), ranks_per_node)), backend=backend)
        for place in range(ranks_per_node)
    ]
    return ProcessGroups(shard, replicas[world.rank() % ranks_per_node])


def resolve_strategy(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """Return the effective strategy: FULL_SHARD by default, NO_SHARD on one rank. Warns if overridden."""
    asked = strategy or ShardingStrategy.FULL_SHARD
    if world_size == 1 and asked is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {asked} since the world size is 1.", stacklevel=3
        )
        return ShardingStrategy.NO_SHARD
    if asked is ShardingStrategy.NO_SHARD and world_size > 1:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated: torch.nn.parallel.DistributedDataParallel does "
            "the same.",
            FutureWarning,
            stacklevel=3,
        )
    return asked


def tensor_parallel_extension(device_mesh: DeviceMesh | None, device: torch.device) -> FSDPExtensions | None:
    """Return the extension that flattens DTensors if ``device_mesh`` is a slice of another mesh, else None."""
    if device_mesh is None or device_mesh._get_root_mesh() == device_mesh:
        return None
    return dtensor_extensions()(torch.get_device_module(device))


# ---- device


def resolve_device(
    tree: Subtree, ignored_params: set[nn.Parameter], device_id: int | torch.device | None
) -> torch.device:
    """Return the compute device: ``device_id``, else the parameters', else the accelerator, or the CPU."""
    if device_id is not None:
        return _with_index(device_id)
    params = (param for param in own_params(tree, ignored_params) if not is_flattened(param))
    found = {param.device for param in params} - {CPU, torch.device("meta")}
    types = sorted({device.type for device in found})
    if len(types) > 1:
        raise RuntimeError(
            f"FSDP does not support modules with different device types but got params on {types}: move the "
            f"module to one device, or pass each parameter of the others in ignored_states. {IGNORED_AND_TRAINED}."
        )
    if found:
        return min(found, key=str)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return CPU
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _with_index(device_id: int | torch.device) -> torch.device:
    """Return the device with an explicit index; the CPU without one."""
    rank = global_rank()
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise RuntimeError(
            f"device_id={device_id!r} on rank {rank} names no device here ({error}); leave it out to run on the CPU"
        ) from error
    if device.type == "cpu" and device.index:
        raise ValueError(
            f"device_id={device} on rank {rank} names no device: there is one CPU, torch.device('cpu')"
        )
    if device.type == "cpu":
        return CPU
    try:
        backend = torch.get_device_module(device)
    except RuntimeError as error:
        raise AttributeError(
            f"Device '{device}' does not have a corresponding backend registered as "
            f"'torch.{device.type}': import the package that provides it, or pass another device_id "
            f"(rank {rank})"
        ) from error
    if not backend.is_available():
        raise RuntimeError(
            f"device_id={device} on rank {rank}, but torch finds no {device.type} device; leave it out for "
            "the CPU"
        )
    if device.index is not None:
        return device
    current = torch.device(device.type, backend.current_device())
    warnings.warn(
        f"FSDP got the argument `device_id` {device} on rank {rank}, which does not have an explicit index: "
        f"it uses the current device, {current}; pass the index, or set the current device before wrapping",
        stacklevel=4,
    )
    return current


# ---- owned parameters


def is_flattened(param: torch.Tensor) -> bool:
    """Return True for a flat parameter, and for an original parameter that a unit manages."""
    return getattr(param, "_fsdp_flattened", False)


def own_params(tree: Subtree, ignored_params: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that a unit will own, in order: not ignored, in no inner unit."""
    return [param for param in tree.params if param not in ignored_params]


def check_all_flattened(tree: Subtree, ignored_params: set[nn.Parameter], unit: str) -> None:
    """Raise RuntimeError if a parameter is neither owned by a unit nor ignored."""
    for submodule, path in tree.modules.items():
        for name, param in submodule._parameters.items():
            if param is None or param in ignored_params or not tree.owns(param):
                continue
            if not is_flattened(param):
                raise RuntimeError(
                    f"Found an unflattened parameter: {clean_name(joined(path, name))} of shape "
                    f"{tuple(param.shape)} in {unit}"
                )


# ---- process exit

# Gloo's worker thread still holds tensors for microseconds after wait() returns.
_TURN_OF_THREADS_S = 0.1
_groups_of_units: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_OWNERS_OF_GROUPS = ("_handle", "_inter_node_state", "_comm_hook_state")  # attributes with groups


def record_groups(config: UnitConfig) -> None:
    """Record the groups of a unit: their threads may hold its tensors at process exit."""
    groups = (config.shard_group, config.replicate_group)
    _groups_of_units.update(group for group in groups if group is not None)


def _free_process_groups() -> None:
    """Free destroyed process groups before the interpreter finalizes.

    Threads of a group freed during finalization would abort the process, see [Note: the end of a process] in
    collective.h. Groups that the script did not destroy stay alive in torch.distributed; a short sleep lets
    their threads drop their tensors.
    """
    if not dist.is_initialized():
        _C.release_process_groups()
        for unit in live_units():
            for owner in (unit, *(getattr(unit, name, None) for name in _OWNERS_OF_GROUPS)):
                attributes = getattr(owner, "__dict__", {})
                held = [
                    name for name, it in attributes.items() if isinstance(it, dist.ProcessGroup | UnitConfig)
                ]
                attributes.update(dict.fromkeys(held))
    if _groups_of_units:
        time.sleep(_TURN_OF_THREADS_S)


atexit.register(_free_process_groups)
