"""State of an optimizer for a checkpoint: each rank's part, by FQNs of original parameters.

The format is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, so that each side
loads checkpoints of the other.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_c.checkpoint.contents import Checkpoint, PathInDict, TensorEntry
from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.checkpoint.model_state import check_names, part_value, uncompiled
from fsdp_c.checkpoint.planning import path_below
from fsdp_c.checkpoint.storage import read_entries, set_nested
from fsdp_c.checkpoint.values import RangeTensor, in_box, map_tensors, whole_value
from fsdp_c.compat.aliases import ParamGroup, ParamState, StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.optim import WholeParameters
from fsdp_c.sharding.sharded_module import units_of
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.state.optim_params import OptimParam, OptimParams, check_optimizer, names_of_numbers
from fsdp_c.state.quantized_state import dequantized, is_made_of_tensors, quantized, quantizes
from fsdp_c.state.sharded_values import split_shard
from fsdp_c.state.whole_state import WholeState


def _params_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[list[tuple[nn.Parameter, OptimParam]]]:
    """Return the parameters of each group. Raise ValueError for a parameter of another model."""
    check_optimizer(optimizer)
    if units_of(model):
        by_param = OptimParams(model).by_param
    else:
        named = ((clean_name(path), param) for path, param in model.named_parameters())
        by_param = {param: OptimParam(name, (name,), None, ()) for name, param in named}
    known = {param: each._replace(fqns=tuple(map(uncompiled, each.fqns))) for param, each in by_param.items()}
    check_names(fqn for each in known.values() for fqn in each.fqns)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = [tuple(param.shape) for param in group["params"] if param not in known]
        if strangers:
            raise ValueError(
                f"group {index} of the optimizer holds parameters that are not the model's, of shapes "
                f"{strangers[:4]}: create the optimizer from model.parameters() after wrapping"
            )
        groups.append([(param, known[param]) for param in group["params"]])
    return groups


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]  # type: ignore[list-item]  # validated later


@torch.no_grad()
def optim_state(model: nn.Module, optimizer: Optimizers) -> StateDict:
    """Return {"state": {fqn: {...}}, "param_groups": [...]}, with tensors sharded like parameters as ``RangeTensor``.

    Several optimizers are merged into one dict, with their groups in sequence. Tensors share the optimizer's
    memory; see ``model_state``. State in 8 or 4 bits is a float32 copy on the CPU, and ``dcp.load`` into it
    is refused. Collective for WholeParameters only: a rank has entries for the elements that it holds. Raises
    ValueError for a parameter of two optimizers, and for state not specific to one parameter: LBFGS's, and in
    other optimizers over shards nested state or state of another shape.
    """
    merged: StateDict = {"state": {}, "param_groups": []}
    optimizers = as_list(optimizer)
    # collective: before errors that only one rank may have
    held = [one.sharded_state() if isinstance(one, WholeParameters) else None for one in optimizers]
    for one, sharded in zip(optimizers, held, strict=True):
        of_one = _state_of_one(model, one, sharded)
        merged["state"].update(of_one["state"])
        merged["param_groups"] += of_one["param_groups"]
    names = [name for group in merged["param_groups"] for name in group["params"]]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"{first_names(twice)} are parameters of several optimizers, whose states cannot be saved "
            "under one name. Give each parameter to one optimizer"
        )
    return merged


def _state_of_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, sharded: dict[Tensor, ParamState] | None
) -> StateDict:
    groups = _params_of(model, optimizer)
    _refuse_shared(optimizer)
    held = optimizer.state if sharded is None else sharded
    state: dict[str, ParamState] = {}
    for param, known in (each for group in groups for each in group):
        for name, value in dequantized(optimizer, held.get(param, {}), torch.device("cpu")).items():
            for fqn, part in _parts(param, known, name, value):
                state.setdefault(fqn, {})[name] = _mark_as_copy(part) if quantizes(optimizer) else part
    names = [[fqn for _, known in group for fqn in known.fqns] for group in groups]
    named = [group | {"params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
    return {"state": state, "param_groups": named}


def _mark_as_copy(part: object) -> object:
    """Mark dequantized state as a copy, outside of the optimizer's memory."""
    if not isinstance(part, Tensor) or not part.dim():
        return part
    marked = part if isinstance(part, RangeTensor) else in_box(part, part.shape)
    marked.is_copy = True
    return marked


_REMEDY = "pass optimizer=None, and save optimizer.state_dict() of each rank in a separate file"


def _refuse_shared(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for state of no parameter: a checkpoint has no name for it, and other wrapping no place."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise ValueError(
            f"{kind} has one state for all parameters, flattened, which cannot be saved by name: {_REMEDY}"
        )
    odd = [key for key, value in optimizer.state.items() if value and not isinstance(key, Tensor)]
    if odd:
        raise ValueError(
            f"{kind} has state of {odd[:4]}, which are not parameters and cannot be saved by name: {_REMEDY}"
        )


def _check_state(known: OptimParam, name: object, held: object) -> None:
    """Raise ValueError for values that DCP would flatten, or save from one rank only although ranks differ."""
    value = held.value if isinstance(held, WholeState) else held
    if is_made_of_tensors(value):
        raise ValueError(
            f"optimizer state {name!r} of {known.fqns[0]} is a {type(value).__name__}, a tensor whose "
            "elements are in other tensors: only torchao's optimizers are supported with such state: "
            f"{_REMEDY}"
        )
    if isinstance(value, Tensor) and isinstance(name, str):
        return
    _, paths = flatten_state_dict({"": value})
    own = (
        isinstance(value, tuple)
        and known.module is not None
        and any(isinstance(one, Tensor) for one in value)
    )
    whole = known.module is None or isinstance(held, WholeState)
    if own or not isinstance(name, str) or (not whole and list(paths.values()) != [("",)]):
        raise ValueError(
            f"optimizer state {name!r} of {known.fqns[0]} is {type(value).__name__}: only tensors and "
            f"single values with string keys can be saved by parameter: {_REMEDY}. "
            "fsdp_c.optim.WholeParameters can save tensors in lists and dicts"
        )


def _parts(param: nn.Parameter, known: OptimParam, name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (FQN, value) of one state of a parameter, for each original parameter."""
    _check_state(known, name, value)
    if isinstance(value, WholeState):
        yield known.fqns[0], value.mapped(_whole_or_nothing).value
    elif known.module is None:
        yield known.fqns[0], map_tensors(name, value, whole_value)
    elif not isinstance(value, Tensor) or value.dim() == 0:
        if known.holds_elements:
            yield from ((fqn, value) for fqn in known.fqns)
    elif value.shape != param.shape:
        raise ValueError(
            f"optimizer state {name!r} of {known.fqns} has shape {tuple(value.shape)} on rank "
            f"{known.owner.rank}, whose shard has {tuple(param.shape)}: only state of the parameter's "
            "own shape can be saved. Optimizers with other state need full parameters: wrap this one "
            "in fsdp_c.optim.WholeParameters"
        )
    elif known.holds_elements:
        yield from _sharded(known, value)


def _sharded(known: OptimParam, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, part) of state, or of memory for it, with the parameter's own shape."""
    if known.module is None:
        yield known.fqns[0], whole_value(value)
        return
    parts = [(known.layout, value)] if known.is_original else split_shard(known.owner, value)
    for fqn, (layout, part) in zip(known.fqns, parts, strict=True):
        yield fqn, part_value(known.owner, layout, part)


def _whole_or_nothing(tensor: Tensor) -> Tensor:
    """Return the tensor as saved by its owner, or on other ranks, where it is on the meta device, none of it."""
    if tensor.is_meta:
        return RangeTensor(torch.empty(0, dtype=tensor.dtype, device="cpu"), tensor.shape, 0)
    return whole_value(tensor)


# ----------------------------------------------------------------- loading


Parts = dict[PathInDict, str]  # keys of a state by path in lists and dicts; path () for a single value


class OptimTarget:
    """Target of a load into an optimizer: memory to read into, applied to the optimizer at the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoint: Checkpoint,
        key: str,
        first_group: int,
    ) -> None:
        """Match the checkpoint with the optimizer. ``first_group``: index of its first group among all optimizers'.

        Raises ValueError if the checkpoint lacks state of this optimizer.
        """
        self.first_group = first_group
        self.optimizer, self.checkpoint, self.prefix = optimizer, checkpoint, f"{key}."
        self.groups = _params_of(model, optimizer)
        self.found: dict[str, dict[str, Parts]] = {}  # keys of the saved states, by FQN and state name
        for key_of_state, (fqn, name, *below) in self._paths_below("state").items():
            self.found.setdefault(str(fqn), {}).setdefault(str(name), {})[tuple(below)] = key_of_state
        # shapes of states saved as one tensor, by FQN and state name
        self._shapes: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for fqn, states in self.found.items():
            for name, parts in states.items():
                entry = checkpoint.entries[parts[()]] if () in parts else None
                if isinstance(entry, TensorEntry):
                    self._shapes[fqn][name] = entry.shape
        self._numbers = names_of_numbers(
            (layout.full_shape, self._shapes[fqn])
            for params in self.groups
            for _, known in params
            if known.module is not None
            for fqn, layout in known.layouts.items()
        )
        self.tensors: dict[str, Tensor] = {}  # memory to read into, by key
        # keys of entries read before any change: scalars that must agree, objects, groups
        self.early_keys: list[str] = []
        self.values: dict[str, Any] = {}  # values of early_keys once read, and memory of whole state, by key
        # functions that return the value once everything is read, by parameter and state name
        self._state: dict[nn.Parameter, dict[str, Callable[[], object]]] = {}
        for param, known in (each for group in self.groups for each in group):
            if state := self._state_of(param, known):
                self._state[param] = state
        self._group_keys = self._paths_below("param_groups")
        self.early_keys += self._group_keys

    def _paths_below(self, name: str) -> dict[str, PathInDict]:
        """Return the paths below "state" or "param_groups" of their keys, also in flattened dicts."""
        root, found = f"{self.prefix}{name}", {}
        for key, path in self.checkpoint.paths.items():
            if key.startswith(f"{root}."):
                flat = tuple(key.removeprefix(f"{root}.").rpartition(".")[::2])
                found[key] = path_below(path, root) or flat
        return found

    def unknown_fqns(self) -> set[str]:
        """Return FQNs with state in the checkpoint that are not this optimizer's.

        Raises CheckpointError for a checkpoint without an optimizer.
        """
        if not self.found and not self._group_keys:
            raise CheckpointError(f"{self.checkpoint.folder} holds no optimizer under {self.prefix[:-1]!r}")
        own = {fqn for group in self.groups for _, known in group for fqn in known.fqns}
        return {*self.found} - own

    # ------------------------------------------------------------- state

    def _state_of(self, param: nn.Parameter, known: OptimParam) -> dict[str, Callable[[], object]]:
        found = {fqn: self.found[fqn] for fqn in known.fqns if fqn in self.found}
        whole = {
            name: parts
            for fqn, states in found.items()
            for name, parts in states.items()
            if self._is_whole(known, parts, self._shapes[fqn].get(name))
        }
        state: dict[str, Callable[[], object]] = {}
        if whole and known.module is not None and not isinstance(self.optimizer, WholeParameters):
            raise ValueError(
                f"{self.checkpoint.folder} has optimizer state {next(iter(whole))!r} of "
                f"{next(iter(found))} in a list or dict, which belongs to full parameters: load it "
                "into fsdp_c.optim.WholeParameters"
            )
        if not isinstance(self.optimizer, WholeParameters) or known.name in self.optimizer.owned_names():
            state = {name: self._whole_state(param, known, parts) for name, parts in whole.items()}
        keys = {
            fqn: {name: parts[()] for name, parts in states.items() if name not in whole}
            for fqn, states in found.items()
            if states.keys() - whole
        }
        if not keys or (known.module is not None and not known.holds_elements):
            return state
        first = next(iter(keys))
        names = {*keys[first]}
        for fqn in known.fqns:
            own = {*keys.get(fqn, ())}
            # a parameter without elements may have no state
            if own != names and (own or known.layouts[fqn].shape.numel()):
                raise ValueError(
                    f"{self.checkpoint.folder}: parameters of one flat parameter have different optimizer "
                    f"state: {first} has {sorted(names)}, {fqn} {sorted(own)}; load with "
                    "use_orig_params=True"
                )
        for name in names:
            state[name] = self._target(param, known, name, {fqn: each[name] for fqn, each in keys.items()})
        return state

    def _is_whole(self, known: OptimParam, parts: Parts, shape: tuple[int, ...] | None) -> bool:
        """Return True for saved state of a full parameter: nested, or of another shape.

        See [Note: Whole state] in fsdp_c/state/whole_state.py.
        """
        if () not in parts:
            return True
        by_wholes = isinstance(self.optimizer, WholeParameters) and known.module is not None
        return by_wholes and shape not in (None, (), tuple(known.layout.full_shape))

    def _whole_state(self, param: nn.Parameter, known: OptimParam, parts: Parts) -> Callable[[], object]:
        for key in parts.values():
            entry = self.checkpoint.entries[key]
            if isinstance(entry, TensorEntry):
                self.values[key] = torch.zeros(entry.shape, dtype=entry.dtype, device=param.device)
                self.tensors[key] = whole_value(self.values[key])
            else:
                self.early_keys.append(key)

        def value() -> object:
            nested: StateDict = {}
            for path, key in parts.items():
                set_nested(self.checkpoint, key, nested, ("", *path), self.values[key])
            return nested[""] if known.module is None else WholeState(nested[""], None)

        return value

    def _target(
        self, param: nn.Parameter, known: OptimParam, name: str, keys: dict[str, str]
    ) -> Callable[[], object]:
        """Prepare one state of a parameter. ``keys``: keys of the original parameters' state, by FQN."""
        first, own = next(iter(keys)), [*keys.values()]
        shapes = [self._shapes[fqn].get(name) for fqn in keys]  # None for an object
        is_number = known.module is not None and (
            name in self._numbers or (not shapes[0] and known.layouts[first].shape)
        )
        if None in shapes or is_number:
            self.early_keys += own
            return functools.partial(self._common_value, own, self._device_of(param, name))
        entry = self.checkpoint.tensor(own[0])
        shape = entry.shape if known.module is None else tuple(param.shape)
        value = self._memory(param, name, shape, entry.dtype)
        for fqn, part in _sharded(known, value):
            if fqn not in keys:
                continue
            self.tensors[keys[fqn]], found = part, self.checkpoint.tensor(keys[fqn]).shape
            if found != tuple(part.shape):
                raise ValueError(
                    f"{keys[fqn]} has shape {found} in {self.checkpoint.folder}, the parameter "
                    f"{tuple(part.shape)}"
                )
        return lambda: value

    def _common_value(self, keys: list[str], device: torch.device) -> object:
        """Return the value for a flat parameter. Raise ValueError unless all original parameters have the same."""
        values = [self.values[key] for key in keys]
        for key, other in zip(keys[1:], values[1:], strict=True):
            is_same = other == values[0] or (other != other and values[0] != values[0])  # NaN is NaN
            if type(other) is not type(values[0]) or not is_same:
                raise ValueError(
                    f"All parameters of one flat parameter must have the same optimizer state: {keys[0]} is "
                    f"{values[0]}, {key} is {other}; load with use_orig_params=True"
                )
        return values[0].to(device) if isinstance(values[0], Tensor) else values[0]

    def _device_of(self, param: nn.Parameter, name: str) -> torch.device:
        """Return the device of new state. Steps are on the CPU until ``_place_steps()``."""
        return torch.device("cpu") if name == "step" or quantizes(self.optimizer) else param.device

    def _memory(self, param: nn.Parameter, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the optimizer's current memory, or new memory: zeros, for the padding of shards."""
        present = self.optimizer.state.get(param, {}).get(name)
        if isinstance(present, Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
            if not is_made_of_tensors(present):
                return present
        device = self._device_of(param, name)
        if tuple(param.shape) == shape:
            return torch.zeros_like(
                param, dtype=dtype, device=device, memory_format=torch.preserve_format
            ).detach()
        return torch.zeros(shape, dtype=dtype, device=device)

    # ------------------------------------------------------------- groups

    def _groups(self) -> Iterator[tuple[ParamGroup, ParamGroup]]:
        """Yield (optimizer's group, saved group). Raise ValueError if groups differ."""
        saved: dict[str | int, ParamGroup] = {}
        for key, (owner, *rest) in self._group_keys.items():
            value = self.values[key]
            if not rest:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {key} is {type(value).__name__}, not a group"
                )
            set_nested(self.checkpoint, key, saved.setdefault(owner, {}), tuple(rest), value)
        for owner, group in saved.items():
            names = group.get("params", ())
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: group {owner} of the optimizer lists {names!r:.80} as its "
                    "parameters, which are not names: the checkpoint is damaged, or not saved by DCP or fsdp_c"
                )
        by_fqn = {
            uncompiled(fqn): group for group in saved.values() for fqn in group.get("params", ())
        } or saved
        if not saved:
            return
        for index, (group, params) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            fqns = [fqn for _, known in params for fqn in known.fqns]
            # groups are saved by one rank, perhaps without names on this one
            others = saved.get(self.first_group + index)
            matching = [by_fqn.get(fqn, others if fqn in self.found else None) for fqn in fqns]
            odd = [
                fqn for fqn, each in zip(fqns, matching, strict=True) if each is None or each != matching[0]
            ]
            if odd:
                raise ValueError(
                    f"{self.checkpoint.folder}: group {index} of the optimizer has parameters that "
                    f"were not saved, or in another group than {fqns[0]}: {odd[:8]}; create the "
                    "groups as they were saved. A flat parameter is in one group: for several, load "
                    "with use_orig_params=True"
                )
            found = matching[0] if fqns else others
            # a group without parameters is found by its position, if no parameter was saved in it either
            if found is not None and (fqns or not found.get("params")):
                yield group, {name: value for name, value in found.items() if name != "params"}

    # ------------------------------------------------------------- update of the optimizer

    def check(self) -> None:
        """Read ``early_keys``. Raise ValueError for other groups, or differing scalars."""
        self.values |= read_entries(self.checkpoint, self.early_keys)
        self.matching_groups = [*self._groups()]
        for value in (value for own in self._state.values() for value in own.values()):
            value()

    def apply(self) -> None:
        """Replace all state of the optimizer by the saved state. Called once everything has been read."""
        state: dict[Tensor, ParamState] = {
            param: quantized(self.optimizer, param, {name: value() for name, value in own.items()})
            for param, own in self._state.items()
        }
        for param, _ in (each for group in self.groups for each in group):
            self.optimizer.state.pop(param, None)
        self.optimizer.state.update(state)
        for group, saved in self.matching_groups:
            group.update(copy.deepcopy(saved))
        if not quantizes(self.optimizer):
            self._place_steps()

    def _place_steps(self) -> None:
        """Move steps to the device that the loaded groups need, as ``load_state_dict`` of the optimizer does."""
        for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
            on_device = group.get("capturable") or group.get("fused")
            for param, _ in params:
                state = self.optimizer.state.get(param, {})
                if isinstance(step := state.get("step"), Tensor):
                    state["step"] = step.to(param.device if on_device else "cpu")
