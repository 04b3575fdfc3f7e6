"""An optimizer's state over shards, saved by original names: whole tensors, or this rank's rows of them.

[Note: One agreement]
Ranks hold state of different parameters: with original parameters a rank whose shard has nothing of one holds
no state of it. So they tell each other once what they have, for the whole model: names, dtypes and the values
of scalars. Then every rank knows what comes, and the tensors move by few large transfers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c.compat.aliases import ParamState, StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding import common
from fsdp_c.sharding.agreement import digest_of
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.sharding.tensor_parallel import divide_over_mesh
from fsdp_c.state.optim_params import Key, OptimParam, OptimParams, has_originals, with_params
from fsdp_c.state.quantized_state import is_made_of_tensors
from fsdp_c.state.redistribution import join_ranges
from fsdp_c.state.sharded_values import (
    ParamLayout,
    by_group,
    from_memory_order,
    rows_of_shards,
    sharded_values,
    split_shard,
    wholes_of_parts,
    wholes_of_shards,
)
from fsdp_c.state.whole_state import WholeState, full_values, has_tensors, sharded_value
from fsdp_c.tools import collective_errors


class SaveOptions(NamedTuple):
    rank0_only: bool
    shard_state: bool  # rows of each tensor instead of whole ones
    cpu_offload: bool
    group: dist.ProcessGroup | None  # None: of the ranks that hold the model

    @property
    def returns_state(self) -> bool:
        """Whether this rank returns what all take part in making."""
        return not self.rank0_only or self.shard_state or dist.get_rank(self.group) == 0


Number = int | float | complex | bool
_Tensors = tuple[tuple[str, torch.dtype], ...]


class _Held(NamedTuple):
    """What a rank has of one parameter's state: told to the others, so of small picklable values."""

    tensors: _Tensors
    scalars: tuple[tuple[str, Number, torch.dtype], ...]  # 0-d tensors
    others: tuple[tuple[str, object], ...]


def save_optim_state(
    params: OptimParams, keys: dict[Key, nn.Parameter], osd: StateDict, options: SaveOptions
) -> StateDict:
    """The state dict by original names. Collective. ``osd`` is not changed, and no tensor shared with it."""
    options = options._replace(group=options.group or group_of_model(params.model))
    key_of = {param: key for key, param in keys.items()}
    local = {  # in the optimizer's order
        params.by_param[param]: osd["state"][key]
        for param, key in key_of.items()
        if param in params.by_param and key in osd["state"]
    }
    held = _agree(params, local, options.group)
    values: dict[tuple[str, str], Any] = {**_tensors(params, local, held, options)}
    values |= _whole_states(params, local, held, options)
    if not options.returns_state:
        return {}
    state = _assembled(params, local, held, values, options)
    _copy_unknown(osd["state"], keys, params, state)
    result: StateDict = {"state": state}
    if "param_groups" in osd:
        result["param_groups"] = [
            with_params(group, [fqn for key in group["params"] for fqn in params.by_param[keys[key]].fqns])
            for group in osd["param_groups"]
        ]
    return result


# ----------------------------------------------------------------- agreement


class _Told(NamedTuple):
    """What one rank tells the others."""

    held: dict[str, _Held]
    lacking: frozenset[str]  # parameters of which its shard has elements and its optimizer no state
    names: bytes  # a digest of all names
    error: str | None


def _agree(
    params: OptimParams, local: dict[OptimParam, ParamState], group: dist.ProcessGroup | None
) -> dict[OptimParam, _Held]:
    """What there is of each managed parameter's state, in the result's order; see [Note: One agreement]."""
    managed = {known.name: known for known in params.by_param.values() if known.module is not None}
    own = {
        known.name: state
        for known, state in local.items()
        if known.module is not None and holds_elements(known)
    }
    mine = _Told(
        _described(managed, own),
        frozenset(name for name, known in managed.items() if name not in own and _own_numel(known)),
        digest_of(repr(sorted(managed)).encode()),
        _misfit(managed, own),
    )
    with collective_errors.explained("gathering optimizer states"):
        told = common.tell(mine, group)
    if errors := [one.error for one in told if one.error is not None]:
        raise ValueError(errors[0])
    held = [one.held for one in told]
    if not params.use_orig_params:
        _check_states_of_rank_0(held, managed)
        for name in held[0]:
            _check_same_tensors(name, held)
        return {managed[name]: mine.held[name] for name in held[0]}
    names = {name for one in held for name in one}
    if names and len({one.names for one in told}) > 1:
        raise RuntimeError(
            "ranks call the model's parameters by different names (do they ignore different modules?), so "
            f"that optimizer state cannot be saved by name: rank {dist.get_rank(group)} has "
            f"{first_names(sorted(managed))}. Save optimizer.state_dict() of each rank instead"
        )
    for rank, one in enumerate(told):
        for name in sorted(one.lacking & names):
            raise ValueError(
                f"rank {rank} holds elements of {name} but no optimizer state of it, as other ranks do"
            )
    return {managed[name]: _merged(name, held) for name in sorted(names)}


def _own_numel(known: OptimParam) -> int:
    """How many elements this rank's state of a parameter has."""
    layout = handle_of(known.owner).layout
    return layout.shard_ranges()[known.indices[0]][2] if known.is_original else layout.shard_numel


def holds_elements(known: OptimParam) -> bool:
    """Some optimizers keep state of a parameter without elements, whose scalars then are those of no step."""
    if not known.is_original or _own_numel(known):
        return True
    return known.layout.shape.numel() == 0


def _misfit(managed: dict[str, OptimParam], states: dict[str, ParamState]) -> str | None:
    """The error for state that is not of its parameter's shape, or None."""
    found = [
        (name, key, value)
        for name, state in states.items()
        if not managed[name].takes_any_shape
        for key, value in state.items()
        if (_is_misfit(value, _own_numel(managed[name])) if _is_sharded(value) else has_tensors(value))
    ]
    if not found:
        return None
    name, key, value = found[0]
    if is_made_of_tensors(value):
        return (
            f"optimizer state {key!r} of {name} is a {type(value).__name__} on rank {managed[name].owner.rank}, a "
            "tensor whose elements are in other tensors: of such state only that of torchao's optimizers can be "
            "saved. Save optimizer.state_dict() of each rank in a file of its own"
        )
    shape = (
        f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"tensors in a {type(value).__name__}"
    )
    return (
        f"optimizer state {key!r} of {name} has {shape} on rank {managed[name].owner.rank}, whose shard holds "
        f"{_own_numel(managed[name])} elements of it, the first of {len(found)} states that do not fit: only state "
        "of the parameter's own shape can be saved. Optimizers with other state need whole parameters: make "
        "this one inside fsdp_c.optim.WholeParameters; or they need ShardingStrategy.NO_SHARD with "
        "use_orig_params=True"
    )


def _is_misfit(value: Tensor, own_numel: int) -> bool:
    return value.numel() != own_numel or is_made_of_tensors(value)


def _described(managed: dict[str, OptimParam], states: dict[str, ParamState]) -> dict[str, _Held]:
    whole = {name for name in states if managed[name].takes_any_shape and not managed[name].layout.shape}
    scalars = _scalar_values({name: state for name, state in states.items() if name not in whole})
    kinds: dict[_Tensors, _Tensors] = {}  # equal tuples become one object, which is pickled once
    result = {}
    for name, state in states.items():
        tensors = tuple(
            sorted(
                (key, value.dtype)
                for key, value in state.items()
                # state of a parameter without dimensions that every rank has
                if _is_sharded(value) or (name in whole and isinstance(value, Tensor))
            )
        )
        others = tuple(
            sorted(
                (key, value.described() if isinstance(value, WholeState) else value)
                for key, value in state.items()
                if not isinstance(value, Tensor)
            )
        )
        result[name] = _Held(kinds.setdefault(tensors, tensors), tuple(scalars.get(name, ())), others)
    return result


def _is_sharded(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _scalar_values(states: dict[str, ParamState]) -> dict[str, list[tuple[str, Number, torch.dtype]]]:
    """The values of all 0-d tensors, read with one synchronisation per dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, str, Tensor]]] = {}
    for name, state in states.items():
        for key in sorted(state):
            value = state[key]
            if isinstance(value, Tensor) and value.dim() == 0:
                kinds.setdefault((value.dtype, value.device), []).append((name, key, value))
    found: dict[str, list[tuple[str, Number, torch.dtype]]] = {name: [] for name in states}
    for (dtype, _), entries in kinds.items():
        for (name, key, _), value in zip(
            entries, torch.stack([v for _, _, v in entries]).tolist(), strict=True
        ):
            found[name].append((key, value, dtype))
    return found


def _check_states_of_rank_0(told: Sequence[dict[str, _Held]], managed: dict[str, OptimParam]) -> None:
    missing = {rank: [name for name in told[0] if name not in one] for rank, one in enumerate(told)}
    missing = {rank: names for rank, names in missing.items() if names}
    if missing:
        listed = {rank: [list(managed[name].fqns) for name in names] for rank, names in missing.items()}
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's "
            f"optimizer but some ranks are missing some of those states: {listed}"
        )


def _check_same_tensors(name: str, told: Sequence[dict[str, _Held]]) -> None:
    having = {rank: one[name].tensors for rank, one in enumerate(told) if name in one}
    first_rank, first = next(iter(having.items()))
    for rank, tensors in having.items():
        if tensors != first:
            raise ValueError(
                f"ranks hold different optimizer state of {name}: rank {first_rank} {first}, rank {rank} "
                f"{tensors}"
            )


def _merged(name: str, told: Sequence[dict[str, _Held]]) -> _Held:
    """What the ranks that have state of a parameter agree on."""
    having = {rank: one[name] for rank, one in enumerate(told) if name in one}
    first_rank, first = next(iter(having.items()))
    for rank, other in having.items():
        if other == first:
            continue
        _check_same_tensors(name, told)
        for ours, theirs in ((first.scalars, other.scalars), (first.others, other.others)):
            if ours != theirs:
                key = next(one[0] for one in (*theirs, *ours) if one not in ours or one not in theirs)
                found, wanted = ([one[1:] for one in entries if one[0] == key] for entries in (theirs, ours))
                raise AssertionError(
                    f"Rank {rank} has different values for {key}: {found}, where rank {first_rank} has "
                    f"{wanted} for {name}; optimizer state that is no tensor must be equal on all ranks"
                )
    return first


# ----------------------------------------------------------------- tensors


class _Piece(NamedTuple):
    key: tuple[str, str]  # the parameter's FQN, and the name of the state
    layout: ParamLayout
    data: Tensor


def _tensors(
    params: OptimParams,
    local: dict[OptimParam, ParamState],
    held: dict[OptimParam, _Held],
    options: SaveOptions,
) -> dict[tuple[str, str], Tensor]:
    """By FQN and state name, the tensors that are sharded as parameters are."""
    pieces: dict[ShardedModule, list[_Piece]] = {module: [] for module in params.units}
    flat: list[tuple[ShardedModule, Tensor, OptimParam, str]] = []  # of which every rank has an even part
    nothing = {
        dtype: torch.empty(0, dtype=dtype, device="cpu") for one in held.values() for _, dtype in one.tensors
    }
    for module, same_unit in _by_unit(held):
        dtypes = [dict(held[known].tensors) for known in same_unit]
        is_plain = handle_of(module).layout.sharded and module._fsdp_extension is None
        is_flat = is_plain and not has_originals(module) and not options.shard_state
        for name in sorted({name for one in dtypes for name in one}):
            # of one name, they are a flat parameter evenly spread
            for known, one in zip(same_unit, dtypes, strict=True):
                if name not in one:
                    continue
                value = local.get(known, {}).get(name, nothing[one[name]])
                if is_flat:
                    flat.append((module, value.detach().reshape(-1), known, name))
                else:
                    pieces[module] += _pieces(known, name, value)
    values: dict[tuple[str, str], Tensor] = {}
    sharded = [module for module in params.units if handle_of(module).layout.sharded and pieces[module]]
    for module in params.units:
        for piece in pieces[module] if module not in sharded else ():
            value = _with_mesh(module, piece.layout, piece.data, options)
            values[piece.key] = value.to("cpu", copy=True) if options.cpu_offload else value.clone()
    by_rows = [module for module in sharded if options.shard_state and module._fsdp_extension is None]
    rows = rows_of_shards(
        by_rows,
        lambda module: [(piece.layout, piece.data) for piece in pieces[module]],
        lambda _: options.cpu_offload,
    )
    for module in by_rows:
        made = sharded_values(module, rows[module], [piece.layout for piece in pieces[module]])
        values.update(zip([piece.key for piece in pieces[module]], made, strict=True))
    for group, states in by_group(flat):
        found = wholes_of_shards([(module, own) for module, own, *_ in states], group, options.rank0_only)
        for (_, _, known, name), wholes in zip(states, found, strict=True):
            if wholes and options.returns_state:
                made = [whole.cpu() for whole in wholes] if options.cpu_offload else wholes
                values.update(((fqn, name), one) for fqn, one in zip(known.fqns, made, strict=True))
    gathered = [module for module in sharded if module not in by_rows]
    for group, items in by_group((module, piece) for module in gathered for piece in pieces[module]):
        given = [(module, piece.layout, piece.data) for module, piece in items]
        for (module, piece), whole in zip(
            items, wholes_of_parts(given, group, options.rank0_only), strict=True
        ):
            if whole is not None:
                whole = _with_mesh(module, piece.layout, whole, options)
                if options.returns_state:
                    values[piece.key] = whole.cpu() if options.cpu_offload else whole
    return values


def _whole_states(
    params: OptimParams,
    local: dict[OptimParam, ParamState],
    held: dict[OptimParam, _Held],
    options: SaveOptions,
) -> dict[tuple[str, str], Any]:
    """See [Note: Whole state] in fsdp_c/state/whole_state.py."""
    found: dict[tuple[str, str], WholeState] = {}
    for known, one in held.items():
        for name, told in one.others:
            if isinstance(told, WholeState):
                found[known.name, name] = local.get(known, {}).get(name, told)
    if options.shard_state:
        return {key: sharded_value(state, options.group, options.cpu_offload) for key, state in found.items()}
    device = params.units[0].compute_device if params.units else torch.device("cpu")
    states = list(found.values())
    made = full_values(states, options.group, device, options.rank0_only, options.cpu_offload)
    return dict(zip(found, made, strict=True))


def _by_unit(held: Iterable[OptimParam]) -> list[tuple[ShardedModule, list[OptimParam]]]:
    members: dict[ShardedModule, list[OptimParam]] = {}
    for known in held:
        members.setdefault(known.owner, []).append(known)
    return [(module, sorted(each, key=lambda known: known.indices)) for module, each in members.items()]


def _pieces(known: OptimParam, name: str, value: Tensor) -> list[_Piece]:
    """This rank's part of one state of the original parameters that ``known`` stands for."""
    module = known.owner
    value = value.detach() if value.requires_grad else value
    sharded = handle_of(module).layout.sharded
    if known.is_original:
        part = value.reshape(-1) if sharded and value.dim() != 1 else value
        return [_Piece((known.fqns[0], name), known.layout, part)]
    return [
        _Piece((fqn, name), layout, part if sharded else from_memory_order(part, layout.shape, layout.order))
        for fqn, (layout, part) in zip(known.fqns, split_shard(module, value), strict=True)
    ]


def _with_mesh(module: ShardedModule, layout: ParamLayout, whole: Tensor, options: SaveOptions) -> Tensor:
    """What is whole over the ranks of a unit, as it is over those of tensor parallelism (parity 24).

    In the form of the model's own state dict: a DTensor. Rank 0 alone, which has all, gets plain tensors.
    """
    extension, mesh = module._fsdp_extension, module._device_mesh
    if extension is not None and layout.parallel is not None:
        whole = extension.post_unflatten_transform(whole, layout.parallel)
    if options.shard_state and extension is not None and mesh is not None:
        return divide_over_mesh(whole, extension, module.rank, mesh)
    return whole.full_tensor() if options.rank0_only and isinstance(whole, DTensor) else whole


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
                state[fqn] = {name: state[fqn][name] for name in _order_of_orig(known, one, local)}
    for known, own in local.items():
        if known.module is None:
            state[known.name] = {key: _copied(value, options) for key, value in own.items()}
    return dict(sorted(state.items())) if params.use_orig_params else state


def _order_of_orig(known: OptimParam, one: _Held, local: dict[OptimParam, ParamState]) -> Iterable[str]:
    """torch's: the optimizer's where nothing is gathered, else tensors of the parameter's shape come last."""
    if known in local and not handle_of(known.owner).layout.sharded:
        return local[known]
    return [entry[0] for kind in (one.others, one.scalars, one.tensors) for entry in kind]


def _new_scalars(held: dict[OptimParam, _Held]) -> dict[torch.dtype, Iterator[Tensor]]:
    """By dtype, 0-d tensors in the order of the result: one for each parameter's each scalar (parity 23).

    They are on the CPU, as in torch: an optimizer that is not capturable counts its steps there.
    """
    values: dict[torch.dtype, list[Number]] = {}
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


def _copied(value: object, options: SaveOptions) -> object:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True) if options.cpu_offload else value.detach().clone()


def _copy_unknown(
    states: dict[Key, ParamState], keys: dict[Key, nn.Parameter], params: OptimParams, result: StateDict
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
        result[key] = copy.copy(value)  # type: ignore[index]  # the user's own keys are copied, of whatever type
