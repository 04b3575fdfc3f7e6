"""Optimizers over shards that need whole parameters, and averages of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_c.sharding.sharded_module import handle_of
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.state.optim_params import OptimParam, OptimParams
from fsdp_c.state.parameter_average import ParameterAverage
from fsdp_c.state.whole_parameters import WholeParameters

__all__ = ["ParameterAverage", "WholeParameters", "param_groups"]

# ----------------------------------------------------------------- groups of parameters


def param_groups(model: nn.Module, rule: Callable[[str, torch.Size], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters of a wrapped ``model`` for any optimizer, grouped by the options that ``rule`` gives
    each.

    ``rule(name, shape)`` is asked with name and whole shape of each parameter as the model before wrapping
    had it (what a rank shows of one is 1-D): ``lambda name, shape: {"weight_decay": 0.0} if len(shape) < 2
    else {}``. Not collective; groups, and the names in them, are the same on all ranks.

    Where ``rule`` divides a unit without ``use_orig_params``, which has one flat parameter, the groups hold
    views of it: its range for each original parameter, whose ``grad`` is that range of the flat parameter's.
    Optimizers that treat each element by itself take them; one optimizer has all of them, as its
    ``zero_grad`` clears the flat parameter's gradient. State dicts have the original names in any
    case. Raises ValueError where such a unit has tensor parallelism inside.
    """
    known = OptimParams(model)
    groups = _grouped(known, rule)
    if groups is None:
        parallel = [unit for unit in known.units if handle_of(unit).is_parallel]
        if parallel:
            raise ValueError(
                f"the rule divides the flat parameters of {unit_name(parallel[0].module)}, which has tensor "
                "parallelism inside: wrap the model with use_orig_params=True"
            )
        groups = _grouped(OptimParams.of_originals(model), rule)
        assert groups is not None
    return [{**options, "params": params} for options, params in groups]


def _grouped(
    known: OptimParams, rule: Callable[[str, torch.Size], dict[str, Any]]
) -> list[tuple[dict[str, Any], list[nn.Parameter]]] | None:
    """None where one parameter would be in several groups."""
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for param, one in known.by_param.items():
        chosen, *others = [rule(name, shape) for name, shape in _original_shapes(param, one)]
        if any(other != chosen for other in others):
            return None
        params = next((params for found, params in groups if found == chosen), None)
        if params is None:
            groups.append((chosen, [param]))
        else:
            params.append(param)
    return groups


def _original_shapes(param: nn.Parameter, known: OptimParam) -> list[tuple[str, torch.Size]]:
    if known.module is None or known.module._handle is None:
        return [(known.name, param.shape)]
    managed = known.module._handle.managed_params
    return [(fqn, managed[index].shape) for fqn, index in zip(known.fqns, known.indices, strict=True)]
