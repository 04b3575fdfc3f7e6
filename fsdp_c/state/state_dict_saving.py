"""``state_dict()`` values of the parameters of units: full, sharded and local.

[Note: Saving many units at once]
The outermost unit of a ``state_dict()`` makes the values of all units below it, by few large transfers from
the shards directly into new memory; no unit is unsharded. Memory beyond the result is one batch: see
``wholes_of_shards``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.upstream import ShardingStrategy, StateDictType
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, is_summoned
from fsdp_c.sharding.tensor_parallel import divide_over_mesh
from fsdp_c.state.sharded_values import (
    flat_value,
    param_layouts,
    saved_rows,
    saved_shards,
    split_shard,
    value_of_rows,
)
from fsdp_c.training.unshard_params import mounted


def local_shard(module: ShardedModule) -> Tensor:
    """Return this rank's shard of the unit's parameters, padding included."""
    shard = handle_of(module).local_shard
    assert shard is not None
    return shard


def type_of(module: ShardedModule) -> StateDictType:
    """Return the type that the unit saves and loads: the selected one, or FULL_STATE_DICT under NO_SHARD."""
    if module.sharding_strategy == ShardingStrategy.NO_SHARD:
        return StateDictType.FULL_STATE_DICT
    return module._state_dict_type


def is_full(module: ShardedModule) -> bool:
    return type_of(module) == StateDictType.FULL_STATE_DICT


def is_shown(param: ManagedParam) -> bool:
    """Return True if the module has the full parameter with memory. False on ranks but 0 under ``rank0_only``."""
    full = getattr(param.module, param.name)
    if full.shape != param.shape:
        return False
    return isinstance(full, DTensor) or full.untyped_storage().nbytes() >= full.nbytes


def is_dropped(module: ShardedModule) -> bool:
    """Return True if this rank returns no values of the unit."""
    return _is_rank0_only(module) and module.rank != 0


# ----------------------------------------------------------------- values of all units


def saved_values(modules: Iterable[ShardedModule], as_rows: bool) -> dict[ShardedModule, list[Tensor]]:
    """Return copies of each unit's current parameters, or this rank's rows of them. Collective.

    Full values are empty lists on ranks without a result. Values under ``offload_to_cpu`` are in CPU memory
    already, except rows of summoned units.
    """
    values: dict[ShardedModule, list[Tensor]] = {module: [] for module in modules}
    shards: list[tuple[ShardedModule, Tensor]] = []
    for module in values:
        if not is_summoned(module):
            handle_of(module).writeback()
            if handle_of(module).layout.sharded or not is_dropped(module):
                shards.append((module, local_shard(module)))
    saved = saved_shards(shards, as_rows, bool(shards) and _is_rank0_only(shards[0][0]), _offloads)
    values.update(zip((module for module, _ in shards), saved, strict=True))
    # last: ranks without full parameters raise here, and no collective follows for others to wait in
    for module in filter(is_summoned, values):
        if as_rows:
            values[module] = _rows_of_shown(module)
        elif not is_dropped(module):
            values[module] = _copies_of_shown(module)
    return values


def _is_rank0_only(module: ShardedModule) -> bool:
    return getattr(module._state_dict_config, "rank0_only", False)


def _offloads(module: ShardedModule) -> bool:
    return module._state_dict_config.offload_to_cpu


def _copies_of_shown(module: ShardedModule) -> list[Tensor]:
    copies = []
    for param in handle_of(module).managed_params[: handle_of(module).layout.num_params]:
        full = getattr(param.module, param.name)
        if not is_shown(param):
            raise AssertionError(
                f"{param.fqn} is not shown on rank {module.rank} in its full shape {tuple(param.shape)}: "
                "inside summon_full_params(rank0_only=True) only rank 0 can save; select "
                "FullStateDictConfig(rank0_only=True)"
            )
        copies.append(full.detach().to("cpu", copy=True) if _offloads(module) else full.detach().clone())
    return copies


def full_values_shown(module: ShardedModule, values: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Register ``values`` on the modules, where nn.Module and user code collect them."""
    shown = []
    handle = handle_of(module)
    of_flat_param = handle.flat_param.requires_grad
    for index, param in enumerate(handle.managed_params if values else ()):
        # further names of shared parameters get copies
        value = values[param.place] if index == param.place else values[param.place].clone()
        registered = param.module._parameters.get(param.name)
        requires_grad = of_flat_param if registered is None else registered.requires_grad
        shown.append((param, handle.as_param(param.place, value, requires_grad)))
    return mounted(shown)


def put_full_values(module: ShardedModule, state_dict: StateDict, prefix: str) -> None:
    """Replace entries of the unit's parameters by plain tensors with their own memory, or remove them."""
    state_dict.pop(prefix + module._flat_param_name, None)
    dropped = is_dropped(module)
    for param in handle_of(module).managed_params:
        fqn = prefix + param.fqn
        if dropped:
            state_dict.pop(fqn, None)
            continue
        if fqn not in state_dict:
            raise AssertionError(
                f"FSDP assumes {fqn} is in the state_dict but the state_dict only has {list(state_dict)} "
                f"(prefix={prefix!r}, rank={module.rank})"
            )
        # Under keep_vars the entry is the copy as a Parameter.
        state_dict[fqn] = state_dict[fqn].detach()


# ----------------------------------------------------------------- sharded and local values


def _rows_of_shown(module: ShardedModule) -> list[Tensor]:
    """Return copies of this rank's rows; DTensors over all mesh dimensions for a unit under tensor parallelism."""
    extension, mesh = module._fsdp_extension, module._device_mesh
    copies = _copies_of_shown(module)
    if extension is None:
        return [saved_rows(full, module).clone() for full in copies]
    assert mesh is not None
    return [divide_over_mesh(full, extension, module.rank, mesh) for full in copies]


def names_shown(module: ShardedModule) -> AbstractContextManager[None]:
    """Register placeholders for parameters of a unit without original ones, so that their names are in order."""
    nothing = torch.empty(0, device="cpu")
    params = [] if module._use_orig_params else handle_of(module).managed_params
    placeholders = [handle_of(module).as_param(param.place, nothing, requires_grad=False) for param in params]
    return mounted(list(zip(params, placeholders, strict=True)))


def put_sharded_values(
    module: ShardedModule, state_dict: StateDict, prefix: str, rows: Sequence[Tensor]
) -> None:
    """Store a separate sharded value under every name of the unit's parameters."""
    state_dict.pop(prefix + module._flat_param_name, None)
    layouts = param_layouts(module)
    for index, param in enumerate(handle_of(module).managed_params):
        # further names of shared parameters get copies
        own = rows[param.place] if index == param.place else rows[param.place].clone()
        own = own.cpu() if _offloads(module) else own
        if not isinstance(own, DTensor):  # a DTensor already spans both meshes
            own = value_of_rows(module, own, layouts[param.place])
        state_dict[prefix + param.fqn] = own


def put_local_value(module: ShardedModule, state_dict: StateDict, prefix: str) -> None:
    """Store the unit's flat parameter, a view of this rank's shard without its padding, in the dict.

    Original parameters of ``use_orig_params`` are stored too, as 1-D views of their parts of the same shard.
    """
    handle = handle_of(module)
    handle.writeback()
    shard = local_shard(module)
    if module._use_orig_params:
        parts = [part for _, part in split_shard(module, shard)]
        named = ((prefix + param.fqn, parts[param.place]) for param in handle.managed_params)
        state_dict.update((fqn, part) for fqn, part in named if fqn in state_dict)
    local = shard[: handle.layout.shard_numel_valid]
    local = local.cpu() if _offloads(module) else local
    state_dict[prefix + module._flat_param_name] = flat_value(module, local)
