"""What ``state_dict()`` returns for the parameters of units: full, sharded and local values.

[Note: Saving many units at once]
The outermost unit of a ``state_dict()`` has the values of all units below it made, by few large transfers from the
shards, straight into memory of their own; nothing is gathered on the modules. Memory beyond the result is one batch:
the largest unit, or ``FULL_BATCH_NBYTES`` if units are smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c import _C, common
from fsdp_c.redistribution import gather
from fsdp_c.sharded_values import (
    ParamForm,
    by_group,
    dims_from_memory,
    flat_value,
    from_memory_order,
    own_rows,
    param_forms,
    rows_of_shards,
    sharded_values,
)
from fsdp_c.tensor_parallel import is_parallel
from fsdp_c.traversal import FLAT_PARAM

FULL_BATCH_NBYTES = 8 * 2**20


def shard_pieces(unit: Any) -> Iterator[tuple[ParamForm, Tensor]]:
    """This rank's part of each parameter in the unit's shard: views."""
    return split_shard(unit, unit._handle.local_shard)


def split_shard(unit: Any, shard: Tensor) -> Iterator[tuple[ParamForm, Tensor]]:
    """Views of each parameter's part of a tensor that is sharded as the unit's flat parameter is."""
    sizes, end = [], 0  # one split costs less than a view per parameter
    for _, offset, numel, _ in unit._handle.layout.shard_ranges():
        start = max(offset, end) if numel else end
        sizes += [start - end, numel]
        end = start + numel
    parts = shard.split([*sizes, shard.numel() - end])
    return zip(param_forms(unit), parts[1::2], strict=True)


def is_summoned(unit: Any) -> bool:
    """Whether the user is inside ``summon_full_params``: the parameters are gathered already."""
    return unit._handle.training_state == _C.USE_SUMMON_FULL_PARAMS


def is_dropped(unit: Any) -> bool:
    """Whether this rank returns nothing that the unit manages."""
    return getattr(unit._state_dict_config, "rank0_only", False) and unit.rank != 0


@contextlib.contextmanager
def summoned(unit: Any, writeback: bool = False) -> Iterator[None]:
    """With the unit's parameters gathered on the modules: the way of those that are DTensors. Collective."""
    unit._handle.summon_enter(writeback)
    try:
        yield
    finally:
        unit._handle.summon_exit()


# ----------------------------------------------------------------- full values


def full_values(units: Iterable[Any]) -> dict[Any, list[Tensor]]:
    """Per unit a copy of each parameter as it is now; nothing on ranks that return nothing. Collective."""
    values: dict[Any, list[Tensor]] = {}
    sharded = []
    for unit in units:
        if is_summoned(unit):
            values[unit] = [] if is_dropped(unit) else _copies_of_shown(unit)
            continue
        unit._handle.writeback()
        if is_parallel(unit._handle):
            with summoned(unit):
                values[unit] = [] if is_dropped(unit) else _copies_of_shown(unit)
        elif unit._handle.layout.sharded:
            sharded.append(unit)
        else:
            values[unit] = [] if is_dropped(unit) else _copies_of_own(unit)
    for group, members in by_group(sharded):
        config = members[0]._state_dict_config
        values.update(_gathered(group, members, config.rank0_only, config.offload_to_cpu))
    return values


def gathered_values(unit: Any, rank0_only: bool, offload_to_cpu: bool) -> list[Tensor]:
    """Copies of one unit's whole parameters; empty where ``rank0_only`` leaves this rank nothing. Collective."""
    unit._handle.writeback()
    if is_parallel(unit._handle):
        with summoned(unit):
            copies = [] if rank0_only and unit.rank else _copies_of_shown(unit)
    elif unit._handle.layout.sharded:
        return _gathered(unit.process_group, [unit], rank0_only, offload_to_cpu)[unit]
    else:
        copies = [] if rank0_only and unit.rank else _copies_of_own(unit)
    return [copy.cpu() for copy in copies] if offload_to_cpu else copies


def _gathered(group: Any, units: Sequence[Any], rank0_only: bool, offload_to_cpu: bool) -> dict[Any, list[Tensor]]:
    """Per unit the whole parameters; nothing on ranks that get nothing. Collective over ``group``."""
    items = [(unit, form, piece) for unit in units for form, piece in shard_pieces(unit)]
    largest = max(unit._handle.layout.padded_numel * unit._handle.local_shard.element_size() for unit in units)
    wholes = gather(
        (piece for _, _, piece in items),
        [form.shard for _, form, _ in items],
        group,
        device=units[0].compute_device,
        shapes=[form.memory_shape for _, form, _ in items],
        rank0_only=rank0_only,
        batch_nbytes=max(largest, FULL_BATCH_NBYTES),
    )
    values: dict[Any, list[Tensor]] = {unit: [] for unit in units}
    for (unit, form, _), flat in zip(items, wholes, strict=True):
        if flat is not None:
            whole = dims_from_memory(flat, form.order)
            values[unit].append(whole.cpu() if offload_to_cpu else whole)
    return values


def _copies_of_own(unit: Any) -> list[Tensor]:
    return [_copy(unit, from_memory_order(piece, form.shape, form.order)) for form, piece in shard_pieces(unit)]


def _copies_of_shown(unit: Any) -> list[Tensor]:
    copies = []
    for param in common.managed_params(unit._handle)[: unit._handle.layout.num_params]:
        full = getattr(param.module, param.name)
        if full.shape != param.shape:
            raise AssertionError(
                f"{param.fqn} has shape {tuple(full.shape)} on rank {unit.rank}, not its full "
                f"{tuple(param.shape)}: inside summon_full_params(rank0_only=True) only rank 0 can save; "
                "select FullStateDictConfig(rank0_only=True)"
            )
        copies.append(_copy(unit, full.detach()))
    return copies


def _copy(unit: Any, tensor: Tensor) -> Tensor:
    if getattr(unit._state_dict_config, "offload_to_cpu", False):
        return tensor.to("cpu", copy=True)
    return tensor.clone()


@contextlib.contextmanager
def full_values_shown(unit: Any, values: Sequence[Tensor]) -> Iterator[None]:
    """Show them on the modules, from where nn.Module, and code of the user's modules, collects them."""
    used: set[int] = set()
    shown = []
    for param in common.managed_params(unit._handle) if values else ():
        value = values[param.index].clone() if param.index in used else values[param.index]
        used.add(param.index)
        registered = param.module._parameters.get(param.name)
        requires_grad = unit._handle.flat_param.requires_grad if registered is None else registered.requires_grad
        shown.append((param, nn.Parameter(value, requires_grad=requires_grad)))
    with common.mounted(shown):
        yield


def put_full_values(unit: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Leave plain tensors with their own memory, or nothing, under the names of the unit's parameters."""
    state_dict.pop(prefix + FLAT_PARAM, None)
    dropped = is_dropped(unit)
    for param in common.managed_params(unit._handle):
        fqn = prefix + param.fqn
        if dropped:
            state_dict.pop(fqn, None)
            continue
        if fqn not in state_dict:
            raise AssertionError(
                f"FSDP expects {fqn} in the state dict but it holds only {list(state_dict)} "
                f"(prefix={prefix!r}, rank={unit.rank})"
            )
        # Under keep_vars the entry is the copy as a Parameter.
        state_dict[fqn] = state_dict[fqn].detach()


# ----------------------------------------------------------------- sharded and local values


def sharded_rows(units: Iterable[Any]) -> dict[Any, list[Tensor]]:
    """Per unit this rank's rows of each parameter as it is now, with memory of their own. Collective."""
    units = list(units)
    parallel = [unit for unit in units if unit._fsdp_extension is not None]
    sharded = [unit for unit in units if not is_summoned(unit) and unit not in parallel]
    for unit in sharded:
        unit._handle.writeback()
    rows = rows_of_shards(sharded, lambda unit: list(shard_pieces(unit)))
    for unit in parallel:
        with contextlib.nullcontext() if is_summoned(unit) else summoned(unit):
            rows[unit] = [_parallel_rows(unit, full) for full in _copies_of_shown(unit)]
    for unit in units:
        if unit not in rows:
            rows[unit] = [own_rows(full, unit.rank, unit.world_size).clone() for full in _copies_of_shown(unit)]
    return rows


def _parallel_rows(unit: Any, full: Tensor) -> Tensor:
    """The rows of a parameter as a DTensor over all dimensions of the mesh (F-032)."""
    return unit._fsdp_extension.chunk_dtensor(full, unit.rank, unit._device_mesh)


@contextlib.contextmanager
def names_shown(unit: Any) -> Iterator[None]:
    """Placeholders for the parameters of a unit without original ones, so that their names come in their order."""
    placeholder = nn.Parameter(torch.empty(0), requires_grad=False)
    with common.mounted([(param, placeholder) for param in common.managed_params(unit._handle)]):
        yield


def put_sharded_values(unit: Any, state_dict: dict[str, Any], prefix: str, rows: Sequence[Tensor]) -> None:
    """Put a sharded value of its own under every name of the unit's parameters (F-030)."""
    state_dict.pop(prefix + FLAT_PARAM, None)
    offload = unit._state_dict_config.offload_to_cpu
    used: set[int] = set()
    forms = param_forms(unit)
    params = common.managed_params(unit._handle)
    values: list[Any] = []
    for param in params:
        own = rows[param.index].clone() if param.index in used else rows[param.index]
        used.add(param.index)
        values.append(own.cpu() if offload else own)
    if not any(isinstance(value, DTensor) for value in values):  # which are of both meshes already
        values = sharded_values(unit, values, [forms[param.index] for param in params])
    state_dict.update((prefix + param.fqn, value) for param, value in zip(params, values, strict=True))


def put_local_value(unit: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the unit's entries by its flat parameter, a view of this rank's shard without its padding (F-040).

    Upstream with use_orig_params keeps the original parameters' entries, which cannot be loaded (parity 10).
    """
    handle = unit._handle
    handle.writeback()
    for param in common.managed_params(handle):
        state_dict.pop(prefix + param.fqn, None)
    local = handle.local_shard[: handle.layout.shard_numel_valid]
    if unit._state_dict_config.offload_to_cpu:
        local = local.cpu()
    state_dict[prefix + FLAT_PARAM] = flat_value(unit, local, handle.layout.numel)
