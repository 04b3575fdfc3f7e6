"""The parameters of a model as its optimizer knows them: flat ones or original ones, their names, ids and units."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_c import common
from fsdp_c.traversal import clean_name, joined, named_params, units_with_paths

Key = int | str  # of a parameter in the state dict of an optimizer: its position over all groups, or its name


class OptimParam(NamedTuple):
    """One parameter that an optimizer may hold."""

    name: str  # its own in the model; a flat parameter's ends in _flat_param
    fqns: tuple[str, ...]  # of the original parameters that it stands for
    unit: Any  # None for one that no unit manages
    indices: tuple[int, ...]  # of the original parameters in the unit's flat parameter


class OptimParams:
    """The parameters of ``model`` in the order of ``named_parameters()``.

    Raises IndexError for a model without units, AssertionError for units that differ in ``use_orig_params``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        units = units_with_paths(model)
        if not units:
            raise IndexError(
                f"{type(model).__name__} has no FullyShardedDataParallel in it: pass the wrapped model, or save a "
                "plain one's optimizer by optim.state_dict()"
            )
        self.use_orig_params = units[0][1]._use_orig_params
        if any(unit._use_orig_params != self.use_orig_params for _, unit in units):
            raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
        self.all_units = [unit for _, unit in units]
        self.units = [unit for unit in self.all_units if unit._handle is not None]
        managed = self._managed(units)
        self.raw_names = named_params(model)
        self.by_param = {
            param: managed.get(param) or OptimParam(clean_name(name), (clean_name(name),), None, ())
            for name, param in self.raw_names.items()
        }

    def _managed(self, units: Sequence[tuple[str, Any]]) -> dict[nn.Parameter, OptimParam]:
        found: dict[nn.Parameter, OptimParam] = {}
        for path, unit in units:
            if unit._handle is None:
                continue
            flat_param = unit._handle.flat_param
            prefix = clean_name(f"{path}.") if path else ""
            fqns = [prefix + param.fqn for param in common.managed_params(unit._handle)[: flat_param._num_params]]
            if self.use_orig_params:
                for index, (param, fqn) in enumerate(zip(flat_param._params, fqns, strict=True)):
                    found[param] = OptimParam(fqn, (fqn,), unit, (index,))
            else:
                name = clean_name(joined(path, "_flat_param"))
                found[flat_param] = OptimParam(name, tuple(fqns), unit, tuple(range(len(fqns))))
        return found

    @functools.cached_property
    def by_fqn(self) -> dict[str, tuple[nn.Parameter, OptimParam]]:
        """What stands for an original parameter of this name."""
        return {fqn: (param, known) for param, known in self.by_param.items() for fqn in known.fqns}

    def keys(self, optim: Any, optim_input: Any, names: Iterable[Any] | None) -> dict[Key, nn.Parameter]:
        """The parameters by their keys in the optimizer's state dict; ``optim_input`` counts where it is not None.

        ``names``: those in a state dict that is keyed by names, which may have the wrappers' segments or not.
        """
        if names is not None:
            clean: dict[Key, nn.Parameter] = {clean_name(name): param for name, param in self.raw_names.items()}
            has_clean = any(name in clean and name not in self.raw_names for name in names)
            return clean if has_clean else dict(self.raw_names)
        if optim_input is None and optim is not None:
            held = [param for group in optim.param_groups for param in group["params"]]
        else:
            held = params_of_input(self.model if optim_input is None else optim_input)
        return dict(enumerate(dict.fromkeys(held)))


def params_of_input(optim_input: Any) -> list[nn.Parameter]:
    """The parameters that an optimizer built of ``optim_input`` holds, in order: of tensors, groups, or a model.

    Raises TypeError for anything else, ValueError for nothing, AssertionError for a group without "params".
    """
    if isinstance(optim_input, nn.Module):
        return list(optim_input.parameters())
    try:
        given = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {type(optim_input).__name__}"
        ) from error
    if not given:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(param, torch.Tensor) for param in given):
        return given
    if not all(isinstance(group, dict) for group in given):
        kinds = sorted({type(one).__name__ for one in given})
        raise TypeError(f"Optimizer input should be an iterable of Tensors or dicts, but got elements of {kinds}")
    if any("params" not in group for group in given):
        raise AssertionError('A parameter group should map "params" to a list of the parameters in the group')
    return [param for group in given for param in _group_params(group["params"])]


def _group_params(params: Any) -> Iterable[nn.Parameter]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def names_of_params(model: nn.Module) -> dict[nn.Parameter, str]:
    """The one name of each parameter of a model, wrapped or not. Raises RuntimeError for one with several."""
    names: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in names:
            raise RuntimeError(
                f"Each parameter should have one name, but {names[param]!r} and {clean_name(name)!r} are the same; "
                "state of shared parameters can be keyed by ids only"
            )
        names[param] = clean_name(name)
    known = _flat_names(model)
    for param in names:
        if param in known and len(known[param]) != 1:
            raise RuntimeError(
                f"Each parameter should have one name, but {names[param]!r} stands for {list(known[param])}; "
                "wrap with use_orig_params=True, or save a full state dict"
            )
    return {param: known[param][0] if param in known else name for param, name in names.items()}


def _flat_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    if not units_with_paths(model):
        return {}
    return {param: known.fqns for param, known in OptimParams(model).by_param.items() if known.unit is not None}
