"""Parameters of a model as held by its optimizer, flat or original: names, FQNs, keys and units."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_c.compat.aliases import OptimInput, ParamGroup
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name, joined, named_params
from fsdp_c.state.sharded_values import ParamLayout, param_layouts

Key = int | str  # key of a parameter in an optimizer's state dict: its position over all groups, or its name


class OptimParam(NamedTuple):
    """One parameter that an optimizer may hold."""

    name: str  # clean name in the model; ends in _flat_param for a flat parameter
    fqns: tuple[str, ...]  # original parameters that it represents
    module: ShardedModule | None  # None if no unit manages it
    indices: tuple[int, ...]  # indices of the original parameters in the unit's flat parameter

    @property
    def owner(self) -> ShardedModule:
        """Module whose unit manages the parameter."""
        assert self.module is not None
        return self.module

    @property
    def is_original(self) -> bool:
        """True if this is one original parameter."""
        return self.owner._use_orig_params

    @property
    def layout(self) -> ParamLayout:
        """Layout of the only original parameter."""
        return param_layouts(self.owner)[self.indices[0]]

    @property
    def layouts(self) -> dict[str, ParamLayout]:
        """Layouts of the original parameters, by FQN."""
        layouts = param_layouts(self.owner)
        return {fqn: layouts[index] for fqn, index in zip(self.fqns, self.indices, strict=True)}

    @property
    def own_numel(self) -> int:
        """Number of elements of this rank's state."""
        layout = handle_of(self.owner).layout
        return layout.shard_ranges()[self.indices[0]][2] if self.is_original else layout.shard_numel

    @property
    def holds_elements(self) -> bool:
        """False for a parameter without elements on this rank, unless it is empty on all ranks.

        Some optimizers keep state of the former, with scalars that no step has updated.
        """
        return not self.is_original or self.own_numel > 0 or self.layout.shape.numel() == 0

    @property
    def is_whole(self) -> bool:
        """True if every rank's optimizer has the original parameter in its own shape."""
        return self.is_original and not handle_of(self.owner).layout.sharded

    @property
    def takes_any_shape(self) -> bool:
        """True if state of any shape is kept unchanged, because every rank has all of it."""
        return self.is_whole and self.owner._fsdp_extension is None


class OptimParams:
    """Parameters of ``model`` in the order of ``named_parameters()``.

    Raises IndexError for a model without units, AssertionError for units that differ in ``use_orig_params``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        modules = units_with_paths(model)
        if not modules:
            raise IndexError(
                f"list index out of range: {type(model).__name__} has no FullyShardedDataParallel in it: "
                "pass the wrapped model, or save a plain one's optimizer by optim.state_dict()"
            )
        self.use_orig_params = modules[0][1]._use_orig_params
        if any(module._use_orig_params != self.use_orig_params for _, module in modules):
            raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
        self.all_units = [module for _, module in modules]
        self.units = [module for module in self.all_units if module._handle is not None]
        self._shown: dict[torch.Tensor, nn.Parameter] = {}
        managed = self._managed(modules)
        self.raw_names = {name: self.original(param) for name, param in named_params(model).items()}
        self.by_param = {
            param: managed.get(param) or OptimParam(clean_name(name), (clean_name(name),), None, ())
            for name, param in self.raw_names.items()
        }

    def _managed(self, modules: Sequence[tuple[str, ShardedModule]]) -> dict[nn.Parameter, OptimParam]:
        found: dict[nn.Parameter, OptimParam] = {}
        for path, module in modules:
            if module._handle is None:
                continue
            flat_param = module._handle.flat_param
            params = module._handle.managed_params[: flat_param._num_params]
            fqns = tuple(clean_name(joined(path, param.fqn)) for param in params)
            if module._use_orig_params:
                for index, (place, original) in enumerate(zip(params, flat_param._params or (), strict=True)):
                    found[original] = OptimParam(fqns[index], (fqns[index],), module, (index,))
                    shown = place.module._parameters.get(place.name)
                    if shown is not None and shown is not original:
                        self._shown[shown] = original
            else:
                name = clean_name(joined(path, module._flat_param_name))
                found[flat_param] = OptimParam(name, fqns, module, tuple(range(len(fqns))))
        return found

    def original(self, param: nn.Parameter) -> nn.Parameter:
        """Return the parameter that an optimizer holds.

        Between a forward and its backward, modules may expose views of unsharded parameters instead.
        """
        return self._shown.get(param, param)

    def originals(self) -> Iterator[tuple[OptimParam, str, ParamLayout]]:
        """Yield (entry, FQN, layout) of each original parameter that units manage."""
        for known in self.by_param.values():
            if known.module is not None:
                for fqn, layout in known.layouts.items():
                    yield known, fqn, layout

    @functools.cached_property
    def by_fqn(self) -> dict[str, tuple[nn.Parameter, OptimParam]]:
        """(Parameter, entry) by FQN of the original parameter."""
        return {fqn: (param, known) for param, known in self.by_param.items() for fqn in known.fqns}

    def keys(
        self, optim: torch.optim.Optimizer | None, optim_input: OptimInput, names: Iterable[object] | None
    ) -> dict[Key, nn.Parameter]:
        """Return the parameters by their keys in the optimizer's state dict. ``optim_input`` wins if not None.

        ``names``: keys of a state dict keyed by names, with or without the wrappers' segments; None for ids.
        """
        if names is not None:
            clean: dict[Key, nn.Parameter] = {
                clean_name(name): param for name, param in self.raw_names.items()
            }
            if any(name in clean and name not in self.raw_names for name in names):
                return clean
            return dict(self.raw_names.items())
        held = held_params(self.model, optim_input, optim)
        found = list(dict.fromkeys(map(self.original, held)))
        if strangers := [tuple(param.shape) for param in found if param not in self.by_param]:
            raise KeyError(
                "the optimizer holds parameters that are not the model's, of shapes "
                f"{first_names(strangers)}: create the optimizer from model.parameters() after "
                "wrapping, and take its state outside of summon_full_params"
            )
        return dict(enumerate(found))


# names of 0-d states of torch's optimizers
_NUMBERS = frozenset({"step", "mu", "eta", "mu_product"})


def names_of_numbers(states: Iterable[tuple[torch.Size, Mapping[str, tuple[int, ...]]]]) -> set[str]:
    """Return the names of states that are one number per parameter, such as "step".

    ``states``: (parameter shape, state shapes by name) of each parameter. Parameters with dimensions
    determine the result. All states of 0-d parameters are 0-d, so without other parameters torch's own names
    decide.
    """
    numbers: set[str] = set()
    others: set[str] = set()
    for shape, shapes in states:
        for name, own in shapes.items() if shape else ():
            if not own:
                numbers.add(name)
            elif own == shape and shape.numel() > 1:
                others.add(name)
    return (numbers | _NUMBERS) - others


def with_params(group: ParamGroup, params: list[Any]) -> ParamGroup:
    """Return a group with copies of the options of ``group``, and with ``params``."""
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    return {**options, "params": params}


def check_optimizer(optim: object) -> None:
    if not hasattr(optim, "param_groups"):
        raise TypeError(
            f"expected an optimizer but got {type(optim).__name__}: pass the one over model.parameters()"
        )


def held_params(
    model: nn.Module, optim_input: OptimInput, optim: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """Return the parameters of ``optim_input`` (tensors or groups), ``optim`` or ``model``, the first that is given.

    Raises TypeError for other input, ValueError for empty input, AssertionError for a group without "params".
    """
    if optim_input is None and optim is not None:
        return [param for group in optim.param_groups for param in group["params"]]
    source = model if optim_input is None else optim_input
    if isinstance(source, nn.Module):
        return list(source.parameters())
    try:
        given: list[Any] = list(source)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {type(source).__name__}"
        ) from error
    if not given:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(param, torch.Tensor) for param in given):
        return given
    if not all(isinstance(group, dict) for group in given):
        kinds = sorted({type(one).__name__ for one in given})
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got elements of {kinds}"
        )
    if any("params" not in group for group in given):
        raise AssertionError('A parameter group should map "params" to a list of the parameters in the group')
    found: list[Any] = []
    for group in given:
        found += [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
    return found


def names_of_params(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the only name of each parameter of a model, wrapped or not. Raise RuntimeError for several names."""
    names: dict[nn.Parameter, str] = {}
    params = OptimParams(model) if units_with_paths(model) else None
    for name, shown in model.named_parameters(remove_duplicate=False):
        param = params.original(shown) if params else shown
        if param in names:
            raise RuntimeError(
                "Each parameter should only map to one parameter name but got "
                f"{[names[param], clean_name(name)]} for the same; "
                "state of shared parameters can be keyed by ids only"
            )
        known = params.by_param.get(param) if params else None
        fqns = (clean_name(name),) if known is None else known.fqns
        if len(fqns) != 1:
            raise RuntimeError(
                f"Each parameter should only map to one parameter name but got {list(fqns)} for "
                f"{clean_name(name)!r}; wrap with use_orig_params=True, or save a full state dict"
            )
        names[param] = fqns[0]
    return names
