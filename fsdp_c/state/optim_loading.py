"""Conversion of an optimizer's state keyed by FQNs into this rank's: shards, under the optimizer's own keys."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_c.compat.aliases import ParamGroup, ParamState, StateDict
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import handle_of
from fsdp_c.state.loaded_parts import LoadedPart, LoadedValue, OnRank0, is_sharded, loaded_parts
from fsdp_c.state.optim_params import Key, OptimParam, OptimParams, names_of_numbers, with_params
from fsdp_c.state.redistribution import join_ranges
from fsdp_c.state.sharded_values import ParamLayout, dtype_of, shape_of
from fsdp_c.state.whole_state import WholeState, has_tensors, loaded_state, moved_to_owners

Names = tuple[str, ...]  # FQN of a parameter, and name of a state


class LoadOptions(NamedTuple):
    rank0_only: bool  # True if only rank 0 passes a state dict
    named_optim: torch.optim.Optimizer | None  # the optimizer if its state dict is keyed by names, else None
    group: dist.ProcessGroup | None  # None: the group of the ranks that hold the model
    # FQNs of the parameters that this rank steps unsharded; None if it steps its shard of each
    owned: frozenset[str] | None


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
        is_rank0 = dist.get_rank(options.group) == 0
        received: list[Any] = [pytree.tree_map_only(Tensor, _on_rank0, osd) if is_rank0 else {}]
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
    values = _loaded_values(params, states)
    parts = {values[part.position].names: part for part in loaded_parts(values, options.group)}
    key_of = {param: key for key, param in keys.items()}
    state = _rekeyed(params, key_of, states, parts, _copies(values, parts), options)
    result: ParamState = {"state": state}
    if "param_groups" in osd:
        result["param_groups"] = [
            with_params(group, sorted({key_of[params.by_fqn[fqn][0]] for fqn in group["params"]}))
            for group in osd["param_groups"]
        ]
    return result


def _on_rank0(value: Tensor) -> Tensor | OnRank0:
    return OnRank0(value.shape, value.dtype, value) if value.dim() else value.detach().cpu()


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
                if isinstance(value, (Tensor, OnRank0))
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
            if _fits(shape_of(value), layout) if is_tensor else not has_tensors(value, OnRank0):
                continue
            if options.rank0_only:
                whole = pytree.tree_map_only(OnRank0, _own_or_meta, value)
                found[fqn, name] = WholeState(whole, holder)
            else:
                found[fqn, name] = loaded_state(value)
    found |= moved_to_owners(found, options.owned, options.group, params.units[0].compute_device)
    merged = dict(states)
    for (fqn, name), state in found.items():
        merged[fqn] = {**merged[fqn], name: state}
    return merged


def _own_or_meta(one: OnRank0) -> Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta") if one.value is None else one.value


# ----------------------------------------------------------------- shards


def _is_tensor(value: object) -> bool:
    # type checked first: dim() of a ShardedTensor uses its dispatcher
    is_placed = isinstance(value, (OnRank0, ShardedTensor, DTensor))
    return is_placed or (isinstance(value, Tensor) and value.dim() > 0)


def _loaded_values(params: OptimParams, states: dict[str, ParamState]) -> list[LoadedValue]:
    """Return managed parameters' tensors, in one order on all ranks. Raise ValueError for other shapes."""
    values = []
    for known, fqn, layout in params.originals():
        for name, value in sorted(states.get(fqn, {}).items()):
            if not _is_tensor(value):
                continue
            shape = shape_of(value)
            if known.takes_any_shape and shape != layout.full_shape and not is_sharded(value):
                continue
            if not _fits(shape, layout):
                raise ValueError(
                    f"Tensor optimizer state does not have same shape as its parameter: {name!r} of {fqn} has "
                    f"shape {tuple(shape)}, the parameter {tuple(layout.full_shape)}"
                )
            values.append(LoadedValue(known.owner, layout, (fqn, name), dtype_of(value), value))
    return values


def _copies(values: Sequence[LoadedValue], parts: dict[Names, LoadedPart]) -> dict[Names, Tensor]:
    """Return the state of parameters that the optimizer holds one by one, with memory of its own.

    1-D if the unit is sharded. Parts in CPU memory are copied by one call: cheaper than two calls per part.
    """
    copies: dict[Names, Tensor] = {}
    sources: dict[Names, Tensor] = {}
    ranges: list[int] = []
    shapes: list[tuple[int]] = []
    for names, (position, tensor, start, end, is_new) in parts.items():
        if not values[position].module._use_orig_params:
            continue
        if is_new:
            copies[names] = tensor
        elif tensor.is_cpu:
            ranges += [len(sources), start * tensor.itemsize, (end - start) * tensor.itemsize]
            sources[names] = tensor
            shapes.append((end - start,))
        else:
            copies[names] = tensor.reshape(-1)[start:end].clone()
    if sources:
        given = list(sources.values())
        copies.update(zip(sources, join_ranges(given, ranges, [1] * len(given), given, shapes), strict=True))
    for names, flat in copies.items():
        module, layout, *_ = values[parts[names].position]
        if not handle_of(module).layout.sharded:
            copies[names] = layout.shaped(flat)
    return copies


# ----------------------------------------------------------------- the result


def _rekeyed(
    params: OptimParams,
    key_of: dict[nn.Parameter, Key],
    states: dict[str, ParamState],
    parts: dict[Names, LoadedPart],
    copies: dict[Names, Tensor],
    options: LoadOptions,
) -> dict[Key, object]:
    result: dict[Key, object] = {}
    for param, known in params.by_param.items():
        names = [fqn for fqn in known.fqns if fqn in states]
        if not names:
            continue
        state: ParamState = {}
        if known.module is None:
            state = _copied(states[names[0]], options)
        elif not known.is_original:
            state = _flat_state(known, states, parts, options)
        else:
            holds_elements = known.holds_elements
            for name, value in states[names[0]].items():
                if (names[0], name) in copies and holds_elements:
                    state[name] = copies[names[0], name]
                elif holds_elements or isinstance(value, WholeState):
                    # every rank copies tensors of other shapes, see OptimParam.takes_any_shape
                    state[name] = _copied(value, options)
                elif options.rank0_only and not _is_tensor(value):
                    _copied(value, options)  # collective for tensors in lists and dicts
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
    result |= {name: _copied(value, options) for name, value in states.items() if name not in params.by_fqn}
    return result


def _copied(value: Any, options: LoadOptions) -> Any:
    """Return a copy of state that is not divided. Collective if only rank 0 has it."""
    if isinstance(value, OnRank0):
        device = torch.device(dist.distributed_c10d._get_object_coll_device(options.group))
        return value.broadcast(device, options.group)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if has_tensors(value, OnRank0):
        return pytree.tree_map(lambda one: _copied(one, options), value)
    return value if isinstance(value, WholeState) else copy.deepcopy(value)


# ----------------------------------------------------------------- state of flat parameters


def _flat_state(
    known: OptimParam, states: dict[str, ParamState], parts: dict[Names, LoadedPart], options: LoadOptions
) -> ParamState:
    """Return the state of a flat parameter, joined from the states of its original parameters.

    Missing tensors are zeros. Raises ValueError if state names, types, dtypes or scalars differ between them,
    except for empty parameters, which an optimizer over shards never steps.
    """
    fqns = [fqn for fqn, layout in known.layouts.items() if layout.shape.numel()] or known.fqns
    given = {fqn: states[fqn] for fqn in fqns if states.get(fqn)}
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
        _check_alike(fqns, name, values)
        if _is_tensor(first[name]):
            result[name] = _flat_tensor(known, name, parts, dtype_of(first[name]))
        else:
            result[name] = _copied(first[name], options)
    return result


def _kind(value: object) -> str:
    if _is_tensor(value):
        return "tensor"
    return "scalar tensor" if isinstance(value, Tensor) else type(value).__name__


def _check_alike(fqns: Sequence[str], name: str, values: dict[str, Any]) -> None:
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
    missing = [fqn for fqn in fqns if fqn not in values]
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


def _flat_tensor(known: OptimParam, name: str, parts: dict[Names, LoadedPart], dtype: torch.dtype) -> Tensor:
    """Join the parts of a flat parameter's state in one call, with zeros between them and for missing ones."""
    layout, size = handle_of(known.owner).layout, dtype.itemsize
    found = [
        (parts[fqn, name], offset, numel)
        for fqn, (_, offset, numel, _) in zip(known.fqns, layout.shard_ranges(), strict=True)
        if numel and (fqn, name) in parts
    ]
    device = found[0][0].tensor.device if found else torch.device("cpu")
    missing = layout.shard_numel - sum(numel for *_, numel in found)
    zeros = torch.zeros(missing, dtype=dtype, device=device)
    sources, ranges, end = [zeros], [], 0
    for part, offset, numel in found:
        ranges += [0, 0, (offset - end) * size, len(sources), part.start * size, numel * size]
        sources.append(part.tensor.to(device))
        end = offset + numel
    ranges += [0, 0, (layout.shard_numel - end) * size]
    (flat,) = join_ranges(sources, ranges, [2 * len(found) + 1], [zeros], [(layout.shard_numel,)])
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
