"""Optimizers over shards that need whole parameters, or step in the backward; and averages of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_c.sharding.sharded_module import handle_of, units_of
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.state.optim_params import OptimParam, OptimParams
from fsdp_c.state.parameter_average import ParameterAverage
from fsdp_c.state.whole_parameters import WholeParameters
from fsdp_c.training.backward_steps import BackwardSteps

__all__ = ["ParameterAverage", "WholeParameters", "param_groups", "step_in_backward"]

# ----------------------------------------------------------------- steps in the backward


def step_in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    clip_by_last_norm: bool = False,
) -> torch.optim.Optimizer:
    """From now on ``optimizer`` steps each unit of ``model`` amid the backward, as soon as the unit's
    gradients are reduced, and the gradients are freed.

    ``optimizer`` is one over the wrapped model's parameters, or what makes it of
    ``list(model.parameters())``; it is returned. Steps run beside the backward: on the CPU, and with
    ``CPUOffload``, in a thread, on a GPU on a stream. After ``loss.backward()`` all are over, with the bits
    of ``optimizer.step()`` there. A loop may go on to call ``step()`` and ``zero_grad()``: that steps what
    belongs to no unit, and nothing else. Schedulers, state dicts and checkpoints take the optimizer as
    before.

    Each backward that reduces gradients is a step: accumulate under ``no_sync``. ``clip_grad_norm_`` raises,
    as the total norm is not known in time; with ``clip_by_last_norm`` it returns the norm, and the factor by
    which it would clip scales the gradients of the next backward (of the first one nothing does). Scaled
    losses do not go with it, as gradients are stepped with before they are unscaled: ``ShardedGradScaler``
    raises.

    Not collective. Raises ValueError where no unit has parameters of the optimizer, a unit has another one,
    or the optimizer needs all parameters at once: a closure, ``WholeParameters``; in the backward where it
    keeps what it changes for a whole group. What it raises there is raised by the backward, with rank and
    unit.
    """
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(list(model.parameters()))
    closure = inspect.signature(made.step).parameters.get("closure")
    if isinstance(made, WholeParameters) or (closure is not None and closure.default is closure.empty):
        raise ValueError(
            f"{type(made).__name__} steps over all parameters at once: it cannot step unit by unit"
        )
    wanted = {param for group in made.param_groups for param in group["params"]}
    handles = [
        handle
        for unit in units_of(model)
        if (handle := unit._handle) is not None and not wanted.isdisjoint(handle.script_params)
    ]
    if not handles:
        raise ValueError(
            f"no unit has parameters of the {type(made).__name__}: make it of model.parameters() after wrapping"
        )
    for handle in handles:
        if handle._has_optim_in_backward:
            raise ValueError(
                f"unit {handle.name} on rank {handle.rank} has an optimizer that steps in the backward"
            )
    stepper = BackwardSteps(made, clip_by_last_norm)
    for handle in handles:
        handle.stepper = stepper
        handle.optimizer_in_backward = True
    return made


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
