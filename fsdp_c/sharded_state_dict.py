"""The sharded and the local form of a model's state dict, saved and loaded for many units at once.

[Note: Loaded before the modules load]
The outermost unit of a ``load_state_dict()`` takes the values of all units below it, brings them into the shards, and
leaves ``LOADED`` in their place: so an inner unit, whose hook is called later with a dict of its own, knows that
nothing is left to do, and a load that fails half-way leaves nothing behind that a later one could mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fsdp_c import _C, common
from fsdp_c.sharded_values import (
    ParamForm,
    by_group,
    flat_value,
    own_rows,
    param_forms,
    rows_of_shards,
    rows_of_value,
    sharded_value,
    shards_of_rows,
)
from fsdp_c.traversal import FLAT_PARAM

logger = logging.getLogger(__name__)

LOADED = object()  # stands for a value that is in the shard already


def names_of(unit: Any) -> list[tuple[str, int]]:
    """Every name of the unit's parameters, those of shared ones too, and each one's index in the flat parameter."""
    infos = unit._handle.flat_param._param_infos
    places = {(info.module, info.param_name): index for index, info in enumerate(infos)}
    places.update(
        ((info.module, info.param_name), places[info.prim_module, info.prim_param_name])
        for info in unit._handle.flat_param._shared_param_infos
    )
    return [(param.fqn, places[param.module, param.name]) for param in common.managed_params(unit._handle)]


# ----------------------------------------------------------------- saving


def shard_pieces(unit: Any) -> Iterator[tuple[ParamForm, Tensor]]:
    """This rank's part of each parameter in the unit's shard: views."""
    handle = unit._handle
    shard = handle.local_shard
    for form, (_, offset, numel, _) in zip(param_forms(unit), handle.layout.shard_ranges(), strict=True):
        yield form, shard.narrow(0, offset, numel)


def rows_of_units(units: Iterable[Any]) -> dict[Any, list[Tensor]]:
    """Per unit this rank's rows of each parameter, as they are now, with memory of their own. Collective."""
    summoned, sharded = [], []
    for unit in units:
        is_summoned = unit._handle.training_state == _C.USE_SUMMON_FULL_PARAMS
        (summoned if is_summoned else sharded).append(unit)
    for unit in sharded:
        unit._handle.writeback()
    rows = rows_of_shards(sharded, lambda unit: list(shard_pieces(unit)))
    for unit in summoned:
        infos = unit._handle.flat_param._param_infos
        full = [getattr(info.module, info.param_name).detach() for info in infos]
        rows[unit] = [own_rows(one, unit.rank, unit.world_size).clone() for one in full]
    return rows


def put_sharded_values(unit: Any, state_dict: dict[str, Any], prefix: str, rows: Sequence[Tensor]) -> None:
    """Put a sharded value of its own under every name of the unit's parameters (F-030)."""
    offload = unit._state_dict_config.offload_to_cpu
    used: set[int] = set()
    forms = param_forms(unit)
    for fqn, index in names_of(unit):
        own = rows[index].clone() if index in used else rows[index]
        used.add(index)
        state_dict[prefix + fqn] = sharded_value(unit, own.cpu() if offload else own, forms[index])


def put_local_value(unit: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the unit's entries by its flat parameter, a view of this rank's shard without its padding (F-040).

    Upstream with use_orig_params keeps the original parameters' entries, which cannot be loaded (parity 10).
    """
    handle = unit._handle
    handle.writeback()
    for fqn, _ in names_of(unit):
        state_dict.pop(prefix + fqn, None)
    local = handle.local_shard[: handle.layout.shard_numel_valid]
    if unit._state_dict_config.offload_to_cpu:
        local = local.cpu()
    state_dict[prefix + FLAT_PARAM] = flat_value(unit, local, handle.layout.numel)


# ----------------------------------------------------------------- loading


def load_sharded_values(units: Iterable[tuple[str, Any]], state_dict: dict[str, Any]) -> None:
    """Bring the values of units, given with the prefix of their names, into the shards. Collective.

    See [Note: Loaded before the modules load]. A parameter without a value keeps what it has, with a warning (F-034).
    Raises AssertionError for values of another kind or division, before anything is written.
    """
    prefixes = {unit: prefix for prefix, unit in units}
    found = {unit: _values_of(unit, prefix, state_dict) for unit, prefix in prefixes.items()}
    for group, members in by_group(found):
        items = [item for unit in members for item in found[unit]]
        shards = shards_of_rows([(form, rows) for form, rows, _ in items], group, members[0].compute_device)
        for unit in members:
            for _, _, target in found[unit]:
                target.copy_(next(shards))
    for unit, prefix in prefixes.items():
        unit._handle.reshard(True)
        for fqn, _ in names_of(unit):
            if prefix + fqn in state_dict:
                state_dict[prefix + fqn] = LOADED


def _values_of(unit: Any, prefix: str, state_dict: dict[str, Any]) -> list[tuple[ParamForm, Tensor, Tensor]]:
    """What was found for a unit: the form, this rank's rows of the value, and the part of the shard to write."""
    targets = list(shard_pieces(unit))
    values: dict[int, tuple[ParamForm, Tensor, Tensor]] = {}
    for fqn, index in names_of(unit):
        if prefix + fqn not in state_dict:
            logger.warning("Did not find param with FQN %s, skipping it: it keeps the value it has", prefix + fqn)
            continue
        form, target = targets[index]
        rows = rows_of_value(state_dict[prefix + fqn], prefix + fqn, unit, form)
        values[index] = (form, rows.detach().to(target.dtype), target)
    return [values[index] for index in sorted(values)]


def load_local_value(unit: Any, state_dict: dict[str, Any], prefix: str) -> None:
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
