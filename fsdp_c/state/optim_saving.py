"""State of an optimizer over shards, saved under FQNs: full tensors, or this rank's rows.

[Note: One agreement]
Ranks hold state of different parameters: with original parameters, a rank without elements of a parameter
holds no state of it. All ranks therefore exchange, once per model, the names, dtypes and scalar values of
their state. After that every rank can compute all transfers, and tensors are moved in few large ones.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c.compat.aliases import ParamState, StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.agreement import digest_of
from fsdp_c.sharding.holders import Ranks, group_of_model, ranks_of
from fsdp_c.sharding.process_groups import all_gather_objects, multi_rank_groups
from fsdp_c.sharding.sharded_module import handle_of
from fsdp_c.state.optim_params import Key, OptimParam, OptimParams, with_params
from fsdp_c.state.quantized_state import is_made_of_tensors
from fsdp_c.state.redistribution import join_ranges
from fsdp_c.state.sharded_values import saved_parts, saved_shards, value_of_rows
from fsdp_c.state.whole_state import WholeState, full_values, has_tensors, sharded_value
from fsdp_c.tools import collective_errors


class SaveOptions(NamedTuple):
    rank0_only: bool  # False with shard_state
    shard_state: bool  # True for rows of each tensor, False for full tensors
    cpu_offload: bool
    group: dist.ProcessGroup | None  # None: the group of the ranks that hold the model

    @property
    def returns_state(self) -> bool:
        """True if this rank returns state. All ranks take part in the collectives."""
        return not self.rank0_only or dist.get_rank(self.group) == 0


_Tensors = tuple[tuple[str, torch.dtype], ...]


class _Held(NamedTuple):
    """State of one parameter on one rank, sent to other ranks: small picklable values only."""

    tensors: _Tensors
    scalars: tuple[tuple[str, complex, torch.dtype], ...]  # 0-d tensors
    others: tuple[tuple[str, object], ...]


def save_optim_state(
    params: OptimParams, keys: dict[Key, nn.Parameter], osd: StateDict, options: SaveOptions
) -> StateDict:
    """Return the state dict keyed by FQNs. Collective. ``osd`` is not modified and shares no tensor with the result."""
    options = options._replace(group=options.group or group_of_model(params.model))
    local = {  # order of the optimizer
        params.by_param[param]: osd["state"][key] for key, param in keys.items() if key in osd["state"]
    }
    held = _agree(params, local, options)
    values: dict[tuple[str, str], Any] = {**_tensors(params, local, held, options)}
    values |= _whole_states(params, local, held, options)
    if not options.returns_state:
        return {}
    state = _assembled(params, local, held, values, options)
    _copy_unknown(osd["state"], keys, state)
    result: StateDict = {"state": state}
    if "param_groups" in osd:
        result["param_groups"] = [
            with_params(group, [fqn for key in group["params"] for fqn in params.by_param[keys[key]].fqns])
            for group in osd["param_groups"]
        ]
    return result


# ----------------------------------------------------------------- agreement


class _RankReport(NamedTuple):
    """Report of one rank to all others."""

    held: dict[str, _Held]
    lacking: frozenset[str]  # parameters with elements on the rank, but without optimizer state
    names: bytes  # digest of all names
    # per process group of units: number of its ranks that report, digest of its ranks and names
    group_names: list[tuple[int, bytes]]
    error: str | None


def _agree(
    params: OptimParams, local: dict[OptimParam, ParamState], options: SaveOptions
) -> dict[OptimParam, _Held]:
    """Return each managed parameter's state, in the result's order. Collective. See [Note: One agreement]."""
    managed = {known.name: known for known in params.by_param.values() if known.module is not None}
    own = {
        known.name: state
        for known, state in local.items()
        if known.module is not None and known.holds_elements
    }
    mine = _RankReport(
        _described(managed, own),
        frozenset(name for name, known in managed.items() if name not in own and known.own_numel),
        digest_of(sorted(managed)),
        _group_names(managed, options.group),
        _misfit(managed, own),
    )
    with collective_errors.explained("gathering optimizer states"):
        reports = all_gather_objects(mine, options.group)
    if errors := [report.error for report in reports if report.error is not None]:
        raise ValueError(errors[0])
    held = [report.held for report in reports]
    if not params.use_orig_params:
        missing = {
            rank: [list(managed[name].fqns) for name in held[0] if name not in one]
            for rank, one in enumerate(held)
            if not held[0].keys() <= one.keys()
        }
        if missing:
            raise RuntimeError(
                "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's "
                f"optimizer but some ranks are missing some of those states: {missing}"
            )
        for name in held[0]:
            _common_state(name, held, only_tensors=True)
        return {managed[name]: mine.held[name] for name in held[0]}
    names = {name for one in held for name in one}
    if names and _names_conflict(reports, options):
        raise RuntimeError(
            "ranks call the model's parameters by different names (do they ignore different modules?), so "
            f"that optimizer state cannot be saved by name: rank {dist.get_rank(options.group)} has "
            f"{first_names(sorted(managed))}. Save optimizer.state_dict() of each rank instead"
        )
    for rank, report in enumerate(reports):
        for name in sorted(report.lacking & names):
            raise ValueError(
                f"rank {rank} holds elements of {name} but no optimizer state of it, as other ranks do"
            )
    common = sorted(names & managed.keys())
    units = {unit: place for place, unit in enumerate(dict.fromkeys(managed[name].owner for name in common))}
    common.sort(key=lambda name: units[managed[name].owner])  # unit by unit, as in torch
    return {managed[name]: _common_state(name, held, only_tensors=False) for name in common}


def _group_names(managed: dict[str, OptimParam], group: dist.ProcessGroup | None) -> list[tuple[int, bytes]]:
    """Return :attr:`_RankReport.group_names` of this rank, where the ranks of ``group`` report."""
    reporting = {*(range(dist.get_world_size()) if group is None else ranks_of(group))}
    names: dict[Ranks, list[str]] = {}
    for module, same in itertools.groupby(sorted(managed.items()), lambda item: item[1].owner):
        own = [name for name, _ in same]
        for each in multi_rank_groups(module.process_group, module._replicate_group):
            names.setdefault(ranks_of(each), []).extend(own)
    return [(len(reporting & {*ranks}), digest_of((ranks, own))) for ranks, own in names.items()]


def _names_conflict(reports: Sequence[_RankReport], options: SaveOptions) -> bool:
    """Return True if ranks that exchange states name parameters differently.

    Ranks of different groups may have units of different names, such as experts.
    """
    if len({report.names for report in reports}) == 1:
        return False
    others = (value for report in reports for held in report.held.values() for _, value in held.others)
    if options.rank0_only or any(isinstance(value, WholeState) for value in others):
        return True  # all ranks exchange these
    entries = Counter(entry for report in reports for entry in report.group_names)
    return any(count != expected for (expected, _), count in entries.items())


def _misfit(managed: dict[str, OptimParam], states: dict[str, ParamState]) -> str | None:
    """Return the error message for state whose shape differs from its parameter's, or None."""
    found = []
    for name, state in states.items():
        known = managed[name]
        if known.takes_any_shape:
            continue
        numel = known.own_numel
        for key, value in state.items():
            if _is_sharded(value):
                fits = value.numel() == numel and not is_made_of_tensors(value)
            else:
                fits = not has_tensors(value)
            if not fits:
                found.append((name, key, value))
    if not found:
        return None
    name, key, value = found[0]
    if is_made_of_tensors(value):
        return (
            f"optimizer state {key!r} of {name} is a {type(value).__name__} on rank "
            f"{managed[name].owner.rank}, a tensor whose elements are in other tensors: only "
            "torchao's optimizers are supported with such state. Save optimizer.state_dict() of each "
            "rank in a separate file"
        )
    shape = (
        f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"tensors in a {type(value).__name__}"
    )
    return (
        f"optimizer state {key!r} of {name} has {shape} on rank {managed[name].owner.rank}, whose "
        f"shard holds {managed[name].own_numel} elements of it, the first of {len(found)} states "
        "that do not fit: only state of the parameter's own shape can be saved. Optimizers with "
        "other state need full parameters: wrap this one in fsdp_c.optim.WholeParameters, or use "
        "ShardingStrategy.NO_SHARD with use_orig_params=True"
    )


def _described(managed: dict[str, OptimParam], states: dict[str, ParamState]) -> dict[str, _Held]:
    """Return the description of this rank's state.

    All 0-d tensors are read with one synchronization per dtype and device.
    """
    held: dict[str, tuple[list[Any], list[Any], list[Any]]] = {}
    numbers: dict[tuple[torch.dtype, torch.device], list[tuple[list[Any], int, Tensor]]] = {}
    for name, state in states.items():
        tensors, scalars, others = held[name] = [], [], []
        # state of a 0-d parameter that every rank has is a tensor, not a number
        is_whole = managed[name].takes_any_shape and not managed[name].layout.shape
        for key, value in sorted(state.items()):
            if not isinstance(value, Tensor):
                others.append((key, value.described() if isinstance(value, WholeState) else value))
            elif _is_sharded(value) or is_whole:
                tensors.append((key, value.dtype))
            else:
                numbers.setdefault((value.dtype, value.device), []).append((scalars, len(scalars), value))
                scalars.append(key)
    for (dtype, _), entries in numbers.items():
        read = torch.stack([value for *_, value in entries]).tolist()
        for (scalars, index, _), number in zip(entries, read, strict=True):
            scalars[index] = (scalars[index], number, dtype)
    kinds: dict[_Tensors, _Tensors] = {}  # equal tuples share one object, which is pickled once
    result = {}
    for name, (tensors, scalars, others) in held.items():
        kind = tuple(tensors)
        result[name] = _Held(kinds.setdefault(kind, kind), tuple(scalars), tuple(others))
    return result


def _is_sharded(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _common_state(name: str, held: Sequence[dict[str, _Held]], only_tensors: bool) -> _Held:
    """Return the state of a parameter on the first rank that has any. Raise if another rank's differs.

    ``only_tensors``: compare only the names and dtypes of tensors.
    """
    having = {rank: one[name] for rank, one in enumerate(held) if name in one}
    first_rank, first = next(iter(having.items()))
    for rank, other in having.items():
        if other.tensors != first.tensors:
            raise ValueError(
                f"ranks hold different optimizer state of {name}: rank {first_rank} {first.tensors}, rank {rank} "
                f"{other.tensors}"
            )
        if only_tensors or other == first:
            continue
        ours, theirs = (*first.scalars, *first.others), (*other.scalars, *other.others)
        key = next(one[0] for one in (*theirs, *ours) if one not in ours or one not in theirs)
        found, wanted = ([one[1:] for one in entries if one[0] == key] for entries in (theirs, ours))
        raise AssertionError(
            f"Rank {rank} has different values for {key}: {found}, where rank {first_rank} has "
            f"{wanted} for {name}; optimizer state that is no tensor must be equal on all ranks"
        )
    return first


# ----------------------------------------------------------------- tensors


def _tensors(
    params: OptimParams,
    local: dict[OptimParam, ParamState],
    held: dict[OptimParam, _Held],
    options: SaveOptions,
) -> dict[tuple[str, str], Tensor]:
    """Return the tensors that are sharded like their parameters, by (FQN, state name). Collective."""
    nothing = {
        dtype: torch.empty(0, dtype=dtype, device="cpu") for one in held.values() for _, dtype in one.tensors
    }
    units = {unit: place for place, unit in enumerate(dict.fromkeys(known.owner for known in held))}
    # states of one name in a unit are together one evenly sharded flat tensor
    order = sorted(
        (units[known.owner], name, known.indices, dtype, known)
        for known, one in held.items()
        for name, dtype in one.tensors
    )
    own = [
        (known, local.get(known, {}).get(name, nothing[dtype]).detach()) for _, name, _, dtype, known in order
    ]
    form = (
        options.shard_state,
        options.rank0_only,
        lambda _: options.cpu_offload,
        options.returns_state if options.rank0_only else None,
    )
    if params.use_orig_params:
        parts = [
            (known.owner, known.layout, value if known.is_whole else value.reshape(-1))
            for known, value in own
        ]
        saved = [[value] for value in saved_parts(parts, *form)]
    else:
        saved = saved_shards([(known.owner, value) for known, value in own], *form)
    values: dict[tuple[str, str], Any] = {}
    for (_, name, _, _, known), made in zip(order, saved, strict=True):
        module = known.owner
        is_rows = options.shard_state and handle_of(module).layout.sharded and module._fsdp_extension is None
        # no values on ranks without a result
        for (fqn, layout), value in zip(known.layouts.items(), made, strict=False):
            values[fqn, name] = value_of_rows(module, value, layout) if is_rows else value
    return values


def _whole_states(
    params: OptimParams,
    local: dict[OptimParam, ParamState],
    held: dict[OptimParam, _Held],
    options: SaveOptions,
) -> dict[tuple[str, str], Any]:
    """Return the values of states with their own shapes. Collective. See fsdp_c/state/whole_state.py."""
    found: dict[tuple[str, str], WholeState] = {}
    for known, one in held.items():
        for name, value in one.others:
            if isinstance(value, WholeState):
                found[known.name, name] = local.get(known, {}).get(name, value)
    if not found:
        return {}
    if options.shard_state:
        return {key: sharded_value(state, options.group, options.cpu_offload) for key, state in found.items()}
    device = params.units[0].compute_device
    made = full_values(list(found.values()), options.group, device, options.rank0_only, options.cpu_offload)
    return dict(zip(found, made, strict=True))


# ----------------------------------------------------------------- the result


def _assembled(
    params: OptimParams,
    local: dict[OptimParam, ParamState],
    held: dict[OptimParam, _Held],
    values: dict[tuple[str, str], Any],
    options: SaveOptions,
) -> dict[str, ParamState]:
    state: dict[str, ParamState] = {}
    scalars = _new_scalars(held)
    for known, one in held.items():
        for fqn in known.fqns:
            state[fqn] = {name: values[fqn, name] for name, _ in one.tensors}
            state[fqn] |= {name: next(scalars[dtype]) for name, _, dtype in one.scalars}
            state[fqn] |= {
                name: values[fqn, name] if isinstance(value, WholeState) else copy.deepcopy(value)
                for name, value in one.others
            }
            if params.use_orig_params:
                # order of keys as in torch: the optimizer's for units that are not sharded, else tensors last
                names = [entry[0] for kind in (one.others, one.scalars, one.tensors) for entry in kind]
                is_local = known in local and not handle_of(known.owner).layout.sharded
                state[fqn] = {name: state[fqn][name] for name in (local[known] if is_local else names)}
    outside = {
        known.name: {key: _copied(value, options) for key, value in own.items()}
        for known, own in local.items()
        if known.module is None
    }
    return dict(sorted(outside.items())) | state if params.use_orig_params else state | outside


def _new_scalars(held: dict[OptimParam, _Held]) -> dict[torch.dtype, Iterator[Tensor]]:
    """Return 0-d tensors by dtype, one per parameter and scalar, in the order of the result.

    All are on the CPU, as in torch: an optimizer that is not capturable counts its steps there.
    """
    values: dict[torch.dtype, list[complex]] = {}
    for known, one in held.items():
        for _ in known.fqns:
            for _, value, dtype in one.scalars:
                values.setdefault(dtype, []).append(value)
    scalars = {}
    for dtype, given in values.items():
        together, count = torch.tensor(given, dtype=dtype, device="cpu"), len(given)
        ranges = [each for at in range(count) for each in (0, at * dtype.itemsize, dtype.itemsize)]
        scalars[dtype] = iter(join_ranges([together], ranges, [1] * count, [together] * count, [()] * count))
    return scalars


def _copied(value: Any, options: SaveOptions) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True) if options.cpu_offload else value.detach().clone()


def _copy_unknown(
    states: dict[Key, ParamState], keys: dict[Key, nn.Parameter], result: dict[str, ParamState]
) -> None:
    for key, value in states.items():
        if key in keys or key in result:
            continue
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to "
            "the returned state_dict: it belongs to no parameter of the model and is taken for the user's "
            "own.",
            stacklevel=5,
        )
        result[key] = copy.copy(value)  # type: ignore[index]  # the user's own keys may have any type
