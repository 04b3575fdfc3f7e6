"""Conversion of an optimizer's state keyed by FQNs into this rank's: shards, under the optimizer's own keys."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_c.compat.aliases import ParamGroup, ParamState, StateDict
from fsdp_c.sharding.agreement import values_if_different
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.sharding.tensor_parallel import local_part
from fsdp_c.state.optim_params import (
    Key,
    OptimParam,
    OptimParams,
    names_of_numbers,
    with_params,
)
from fsdp_c.state.redistribution import join_ranges, rank_partition, redistribute
from fsdp_c.state.sharded_values import (
    ParamLayout,
    by_group,
    dtype_of,
    from_memory_order,
    own_part,
    param_layouts,
    rows_of_value,
    shape_of,
    shards_of_rows,
    to_memory_order,
    wholes_of_rows,
)
from fsdp_c.state.whole_state import WholeState, has_tensors, loaded_state, moved_to_owners


class LoadOptions(NamedTuple):
    rank0_only: bool  # True if only rank 0 passes a state dict
    named_optim: torch.optim.Optimizer | None  # the optimizer if its state dict is keyed by names, else None
    group: dist.ProcessGroup | None  # None: the group of the ranks that hold the model
    # FQNs of the parameters that this rank steps unsharded; None if it steps its shard of each
    owned: frozenset[str] | None = None


class _OnRank0:
    """Tensor on rank 0. Other ranks receive its shape and dtype by pickle."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, value: Tensor | None = None) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value

    def __reduce__(self) -> tuple[type[_OnRank0], tuple[torch.Size, torch.dtype]]:
        return _OnRank0, (self.shape, self.dtype)

    def broadcast(self, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
        """Return a copy on every rank. Collective."""
        if self.value is None:
            received = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            received = self.value.detach().to(device, copy=True).contiguous()
        dist.broadcast(received, group=group, group_src=0)
        return received


class _Target(NamedTuple):
    """One tensor of the state of one original parameter."""

    module: ShardedModule
    layout: ParamLayout
    key: tuple[str, str]  # FQN of the parameter, name of the state
    value: Tensor | _OnRank0


def load_optim_state(
    params: OptimParams, keys: dict[Key, nn.Parameter], osd: StateDict, options: LoadOptions
) -> ParamState:
    """Return the argument for ``optim.load_state_dict()``. Collective if ``osd`` is sharded or on rank 0 only.

    ``osd`` is not modified. Raises ValueError for a dict without "state" and for values of wrong shape,
    KeyError for a group that names parameters missing in the optimizer.
    """
    if options.rank0_only or options.owned is not None:
        options = options._replace(group=options.group or group_of_model(params.model))
    if options.rank0_only:
        received = [_without_tensors(osd) if dist.get_rank(options.group) == 0 else {}]
        dist.broadcast_object_list(received, group=options.group, group_src=0)
        osd = received[0]
    if not isinstance(osd, Mapping):
        raise TypeError(
            f"expected an optimizer's state dict but got {type(osd).__name__}: pass one on every rank"
        )
    if "state" not in osd:
        raise ValueError('`optim_state_dict` must have the keys "state" to be a valid optimizer state dict')
    _check_groups(osd.get("param_groups", ()), params, keys)
    states = _with_vectors(params, osd["state"])
    if options.owned is not None:
        states = _with_whole_states(params, states, options)
    state = _rekeyed(params, keys, states, dict(_shards(_targets(params, states), options)), options)
    result: ParamState = {"state": state}
    if "param_groups" in osd:
        key_of = {param: key for key, param in keys.items()}
        result["param_groups"] = [
            with_params(group, sorted({key_of[params.by_fqn[fqn][0]] for fqn in group["params"]}))
            for group in osd["param_groups"]
        ]
    return result


def _without_tensors(value: object) -> Any:
    """Return ``value`` with each tensor replaced by an ``_OnRank0``, except 0-d ones."""
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.dim() == 0 else _OnRank0(value.shape, value.dtype, value)
    if isinstance(value, dict):
        return {key: _without_tensors(one) for key, one in value.items()}
    return pytree.tree_map_only(Tensor, _without_tensors, value) if has_tensors(value) else value


# ----------------------------------------------------------------- parameters without dimensions


def _with_vectors(params: OptimParams, states: dict[str, ParamState]) -> dict[str, ParamState]:
    """Reshape state of 0-d parameters to vectors of one element, the shape of their shards.

    Single numbers, such as "step", keep their shape.
    """
    if all(shape for module in params.units for shape in handle_of(module).flat_param._shapes):
        return states
    numbers = names_of_numbers(
        (
            layout.full_shape,
            {
                name: shape_of(value)
                for name, value in states.get(fqn, {}).items()
                if isinstance(value, (Tensor, _OnRank0))
            },
        )
        for _, fqn, layout in params.originals()
    )
    result = dict(states)
    for known, fqn, layout in params.originals():
        for name, value in states.get(fqn, {}).items() if not layout.shape and not known.is_whole else ():
            if isinstance(value, Tensor) and not _is_tensor(value) and name not in numbers:
                result[fqn] = {**result[fqn], name: value.reshape(1)}
    return result


def _fits(shape: torch.Size, layout: ParamLayout) -> bool:
    """Return True for the parameter's full shape, and for (1,) if the parameter is 0-d."""
    return shape == layout.full_shape or (not layout.shape and shape == (1,))


# ----------------------------------------------------------------- whole state


def _with_whole_states(
    params: OptimParams, states: dict[str, ParamState], options: LoadOptions
) -> dict[str, ParamState]:
    """Wrap state whose shape differs from its parameter's in ``WholeState``, and move it to the parameter's owner.

    Collective if only one rank has such state. See [Note: Whole state] in fsdp_c/state/whole_state.py.
    """
    assert options.owned is not None
    holder = 0 if options.group is None else dist.get_global_rank(options.group, 0)
    found: dict[tuple[str, str], WholeState] = {}
    for _, fqn, layout in params.originals():
        for name, value in sorted(states.get(fqn, {}).items()):
            is_tensor = _is_tensor(value)
            if _fits(shape_of(value), layout) if is_tensor else not has_tensors(value, _OnRank0):
                continue
            if options.rank0_only:
                whole = pytree.tree_map_only(_OnRank0, _own_or_meta, value)
                found[fqn, name] = WholeState(whole, holder)
            else:
                found[fqn, name] = loaded_state(value)
    found |= moved_to_owners(found, options.owned, options.group, params.units[0].compute_device)
    merged = dict(states)
    for (fqn, name), state in found.items():
        merged[fqn] = {**merged[fqn], name: state}
    return merged


def _own_or_meta(one: _OnRank0) -> Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta") if one.value is None else one.value


# ----------------------------------------------------------------- shards


def _is_tensor(value: object) -> bool:
    # type checked first: dim() of a ShardedTensor uses its dispatcher
    is_placed = isinstance(value, (_OnRank0, ShardedTensor, DTensor))
    return is_placed or (isinstance(value, Tensor) and value.dim() > 0)


def _targets(params: OptimParams, states: dict[str, ParamState]) -> list[_Target]:
    """Return all tensors of managed parameters, in the same order on all ranks. Raise ValueError for wrong shapes."""
    targets = []
    for known, fqn, layout in params.originals():
        for name, value in sorted(states.get(fqn, {}).items()):
            if not _is_tensor(value):
                continue
            shape = shape_of(value)
            is_kept = known.takes_any_shape and not isinstance(value, (ShardedTensor, DTensor))
            if not _fits(shape, layout) and not is_kept:
                raise ValueError(
                    f"Tensor optimizer state does not have same shape as its parameter: {name!r} of {fqn} has "
                    f"shape {tuple(shape)}, the parameter {tuple(layout.full_shape)}"
                )
            targets.append(_Target(known.owner, layout, (fqn, name), value))
    return targets


def _shards(targets: Sequence[_Target], options: LoadOptions) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((FQN, state name), this rank's part) of each tensor, in its own shape if the unit is not
    sharded, else 1-D.
    """
    world_size = dist.get_world_size(options.group)
    parallel, scattered, sharded, whole = [], [], [], []
    for target in targets:
        module, value = target.module, target.value
        if module._fsdp_extension is not None:
            parallel.append(target)
        elif isinstance(value, (ShardedTensor, DTensor)):
            sharded.append(target)
        elif (
            isinstance(value, _OnRank0)
            and handle_of(module).layout.sharded
            and module.world_size == world_size
        ):
            scattered.append(target)
        else:
            whole.append(target)
    for group, members in by_group(parallel):
        _agree_on(members, group)
    for group, members in by_group(scattered):
        yield from _scattered_parts(members, group)
    for group, members in by_group(sharded):
        yield from _parts_of_rows(members, group, options)
    yield from _own_parts([*parallel, *whole], options)


def _scattered_parts(
    targets: Sequence[_Target], group: dist.ProcessGroup
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield this rank's parts of values on rank 0, for units that shard over all ranks. Collective."""
    values = [target.value.value for target in targets if isinstance(target.value, _OnRank0)]
    shards = redistribute(
        (
            torch.empty(0, dtype=dtype_of(target.value), device="cpu")
            if value is None
            else to_memory_order(value.detach(), target.layout.order)
            for target, value in zip(targets, values, strict=True)
        ),
        [rank_partition(target.layout.shape.numel(), 0) for target in targets],
        [target.layout.shard for target in targets],
        group,
        device=targets[0].module.compute_device,
    )
    yield from ((target.key, shard) for target, shard in zip(targets, shards, strict=True))


def _parts_of_rows(
    targets: Sequence[_Target], group: dist.ProcessGroup, options: LoadOptions
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield this rank's parts of sharded values, from its rows. Collective. All ranks raise the error of any."""
    error, rows = None, []
    try:
        rows = [(t, rows_of_value(t.value, t.key[0], t.module, t.layout).detach()) for t in targets]
    except AssertionError as found:
        error = found
    _agree_on(targets, group, error)
    device = targets[0].module.compute_device
    divided = [(target, own) for target, own in rows if handle_of(target.module).layout.sharded]
    undivided = [(target, own) for target, own in rows if not handle_of(target.module).layout.sharded]
    shards = shards_of_rows([(target.layout, own) for target, own in divided], group, device)
    wholes = wholes_of_rows([(target.layout, own) for target, own in undivided], group, device)
    yield from ((target.key, shard) for (target, _), shard in zip(divided, shards, strict=True))
    for (target, _), whole in zip(undivided, wholes, strict=True):
        yield target.key, _own_part(target._replace(value=whole), options)


def _agree_on(targets: Sequence[_Target], group: dist.ProcessGroup, error: Exception | None = None) -> None:
    """Raise on all ranks, before any transfer, if one has an error or ranks pass different state. Collective."""
    known = [(*target.key, str(dtype_of(target.value))) for target in targets]
    own = dist.get_rank(), None if error is None else str(error), known
    compared = repr(own[1:]).encode()
    everyone = values_if_different(own, compared, [group], targets[0].module.compute_device)
    if error is not None:
        raise error
    for rank, failure, _ in everyone:
        if failure is not None:
            raise AssertionError(f"rank {rank} cannot load its part of the optimizer state: {failure}")
    if everyone:
        held = {rank: set(theirs) for rank, _, theirs in everyone}
        fqn, name, dtype = min(set(known).union(*held.values()) - set(known).intersection(*held.values()))
        having = [rank for rank, one in held.items() if (fqn, name, dtype) in one]
        raise ValueError(
            f"ranks pass different sharded optimizer state: {name!r} of {fqn}, {dtype}, is on ranks {having} "
            f"only of {list(held)}. Pass each rank what was saved on it, or load through "
            "torch.distributed.checkpoint"
        )


def _own_parts(targets: Sequence[_Target], options: LoadOptions) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield this rank's parts of full values, except of those that ``_flat_tensor`` copies directly.

    Collective if only rank 0 has the values.
    """
    sources: dict[tuple[str, str], Tensor] = {}  # joined by one call: cheaper than two calls per value
    ranges, numels = [], []
    for module, members in itertools.groupby(targets, lambda target: target.module):
        copies = module._fsdp_extension is not None or not handle_of(module).layout.sharded
        for target in members:
            value, key = target.value, target.key
            if copies or isinstance(value, _OnRank0) or not _is_plain(value, target.layout):
                yield key, _own_part(target, options)
            elif module._use_orig_params:
                start, end = target.layout.shard.bounds(module.rank)
                ranges += [len(sources), start * value.itemsize, (end - start) * value.itemsize]
                numels.append((end - start,))
                sources[key] = value
    if sources:
        values = list(sources.values())
        yield from zip(sources, join_ranges(values, ranges, [1] * len(values), values, numels), strict=True)


def _is_plain(value: Tensor, layout: ParamLayout) -> bool:
    """Return True if ``value`` is in CPU memory, in the memory order of its parameter in the flat parameter."""
    is_cpu = type(value) is Tensor and value.is_cpu and not value.requires_grad
    return is_cpu and layout.order is None and value.is_contiguous()


def _own_part(target: _Target, options: LoadOptions) -> Tensor:
    """Return a copy of this rank's part of a full value. Collective if only rank 0 has the value."""
    module, layout, _, value = target
    if isinstance(value, _OnRank0):
        value = value.broadcast(module.compute_device, options.group)
    value = value.detach()
    if module._fsdp_extension is not None:
        value = local_part(value, layout.parallel)
    if handle_of(module).layout.sharded:
        return own_part(module, layout, value).clone()
    if value.shape != layout.shape:  # kept, see OptimParam.takes_any_shape
        return value.clone()
    return from_memory_order(to_memory_order(value, layout.order).clone(), layout.shape, layout.order)


# ----------------------------------------------------------------- the result


def _rekeyed(
    params: OptimParams,
    keys: dict[Key, nn.Parameter],
    states: dict[str, ParamState],
    shards: dict[tuple[str, str], Tensor],
    options: LoadOptions,
) -> dict[Key, object]:
    key_of = {param: key for key, param in keys.items()}
    result: dict[Key, object] = {}
    unknown = set(states)
    for param, known in params.by_param.items():
        names = [fqn for fqn in known.fqns if fqn in states]
        unknown.difference_update(names)
        if not names:
            continue
        state: ParamState = {}
        if known.module is None:
            state = _user_state(states[names[0]], options)
        elif not known.is_original:
            state = _flat_state(known, states, shards)
        else:
            (_, _, numel, _) = handle_of(known.module).layout.shard_ranges()[known.indices[0]]
            for name, value in states[names[0]].items():
                if numel or isinstance(value, WholeState):
                    state[name] = shards[names[0], name] if _is_tensor(value) else _own_scalar(value)
        if not state and options.named_optim is not None:
            # optimizers keyed by names expect state of every parameter, also without elements on this rank
            if param in options.named_optim.state:
                state = copy.deepcopy(options.named_optim.state[param])
            else:
                warnings.warn(f"optim_state[{known.fqns}] is not on rank{known.owner.rank}.", stacklevel=4)
        if state:
            if param not in key_of:
                raise KeyError(
                    f"Can't find {known.fqns[0]} from the parameters that the optimizer holds, but the state "
                    f"dict has state of {known.fqns}"
                )
            result[key_of[param]] = state
    result |= {name: _user_state(states[name], options) for name in states if name in unknown}
    return result


def _own_scalar(value: object) -> object:
    if isinstance(value, WholeState):
        return value
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _user_state(value: Any, options: LoadOptions) -> Any:
    """Return a copy of state that no unit manages. Collective if only rank 0 has it."""
    if isinstance(value, dict):
        return {key: _user_state(one, options) for key, one in value.items()}
    if isinstance(value, _OnRank0):
        device = torch.device(dist.distributed_c10d._get_object_coll_device(options.group))
        return value.broadcast(device, options.group)
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


# ----------------------------------------------------------------- state of flat parameters


def _flat_state(
    known: OptimParam, states: dict[str, ParamState], shards: dict[tuple[str, str], Tensor]
) -> ParamState:
    """Return the state of a flat parameter, joined from the states of its original parameters.

    Missing tensors are zeros. Raises ValueError if state names, types, dtypes or scalars differ between them.
    """
    given = {fqn: states[fqn] for fqn in known.fqns if states.get(fqn)}
    if not given:
        return {}
    first_fqn, first = next(iter(given.items()))
    for fqn, state in given.items():
        if state.keys() != first.keys():
            raise ValueError(
                f"Differing optimizer state names for the unflattened parameters: {first_fqn} has "
                f"{sorted(first)}, {fqn} has {sorted(state)}"
            )
    result: ParamState = {}
    for name in first:
        values = {fqn: state[name] for fqn, state in given.items()}
        _check_alike(known, name, values)
        if _is_tensor(first[name]):
            result[name] = _flat_tensor(known, name, values, shards, dtype_of(first[name]))
        else:
            result[name] = _own_scalar(first[name])
    return result


def _kind(value: object) -> str:
    if _is_tensor(value):
        return "tensor"
    return "scalar tensor" if isinstance(value, Tensor) else type(value).__name__


def _check_alike(known: OptimParam, name: str, values: dict[str, Any]) -> None:
    """Raise ValueError for values that cannot be joined: a flat parameter has one kind and one scalar per state."""
    (first_fqn, first), *others = values.items()
    kind = _kind(first)
    for fqn, value in others:
        if _kind(value) != kind:
            raise ValueError(
                f"Differing optimizer state types for state {name}: {first_fqn} has a {kind}, {fqn} has a "
                f"{_kind(value)}"
            )
        if kind == "tensor" and dtype_of(value) != dtype_of(first):
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have positive-dimension "
                f"tensor state with the same dtype: {first_fqn} has {name} in {dtype_of(first)}, {fqn} in "
                f"{dtype_of(value)}"
            )
    if kind == "tensor":
        return
    missing = [fqn for fqn in known.fqns if fqn not in values]
    wanted = _scalar(first)
    differing = [fqn for fqn, value in others if _scalar(value) != wanted]
    if missing or differing:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the "
            f"same value and dtype: {first_fqn} has {name}={first}, {differing or missing} have another or none; "
            "load with use_orig_params=True"
        )


def _scalar(value: object) -> tuple[object, torch.dtype | None]:
    return (value.item(), value.dtype) if isinstance(value, Tensor) else (value, None)


def _flat_tensor(
    known: OptimParam,
    name: str,
    values: dict[str, Any],
    shards: dict[tuple[str, str], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Join the parts in one call, with zeros between them. Parts missing in ``shards`` are read from ``values``."""
    layout, size = handle_of(known.owner).layout, dtype.itemsize
    # (source, first element in the source, first element in the shard, numel)
    parts: list[tuple[Tensor, int, int, int]] = []
    for fqn, own, (_, offset, numel, start) in zip(
        known.fqns, param_layouts(known.owner), layout.shard_ranges(), strict=True
    ):
        if numel and fqn in values:
            part = shards.get((fqn, name))
            if part is None:
                parts.append((values[fqn], start, offset, numel))
            else:
                parts.append((part if layout.sharded else to_memory_order(part, own.order), 0, offset, numel))
    device = parts[0][0].device if parts else torch.device("cpu")
    missing = layout.shard_numel - sum(numel for *_, numel in parts)
    zeros = torch.zeros(missing, dtype=dtype, device=device)
    sources, ranges, end = [zeros], [], 0
    for part, start, offset, numel in parts:
        ranges += [0, 0, (offset - end) * size, len(sources), start * size, numel * size]
        sources.append(part.to(device))
        end = offset + numel
    ranges += [0, 0, (layout.shard_numel - end) * size]
    (flat,) = join_ranges(sources, ranges, [2 * len(parts) + 1], [zeros], [(layout.shard_numel,)])
    return flat


# ----------------------------------------------------------------- param groups


def _check_groups(groups: Sequence[ParamGroup], params: OptimParams, keys: dict[Key, nn.Parameter]) -> None:
    held = set(keys.values())
    known = [fqn for fqn, (param, _) in params.by_fqn.items() if param in held]
    for index, group in enumerate(groups):
        unknown = sorted(set(group["params"]).difference(known), key=str)
        if unknown:
            shown = ", ".join(map(repr, unknown[:4]))
            raise KeyError(
                f"Can't find {shown} from the parameters that the optimizer holds, which "
                f"param_groups[{index}] of the state dict names ({len(unknown)} in all; the optimizer's have "
                f"names like {known[:1]}). Pass state of this model and optimizer, and change names or leave "
                "them out where the models differ; numbers become names by "
                "FullyShardedDataParallel.rekey_optim_state_dict()"
            )
