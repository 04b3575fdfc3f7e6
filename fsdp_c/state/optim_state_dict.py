"""State dicts of optimizers over units: conversion to FQNs and back, and FSDP1's deprecated functions for it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_c import _C
from fsdp_c.compat.aliases import OptimInput, StateDict
from fsdp_c.compat.upstream import OptimStateKeyType, StateDictType
from fsdp_c.state.optim_loading import LoadOptions, load_optim_state
from fsdp_c.state.optim_params import (
    Key,
    OptimParams,
    check_optimizer,
    held_params,
    names_of_params,
    with_params,
)
from fsdp_c.state.optim_saving import SaveOptions, save_optim_state
from fsdp_c.state.quantized_state import dequantized, quantized, quantizes
from fsdp_c.state.state_dict import collector_paused, settings_of
from fsdp_c.tools import phases

Group = dist.ProcessGroup | None


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Group = None
) -> StateDict:
    """Return the state dict of ``optim`` keyed by FQNs, of the selected type. Collective.

    ``optim_state_dict``: replaces ``optim.state_dict()``. FULL_STATE_DICT gives full tensors, with
    ``rank0_only`` on rank 0 only ({} on other ranks); the other types give this rank's rows, as
    ShardedTensor, or as DTensor if the model has a device mesh. No tensor is shared with the optimizer. State
    in 8 or 4 bits of torchao's and bitsandbytes' optimizers is dequantized to float32.

    Raises IndexError for a model without units, RuntimeError if a rank lacks state that rank 0 has,
    ValueError for state whose shape differs from its parameter's, AssertionError if scalars differ between
    ranks.
    """
    params = OptimParams(model)
    check_optimizer(optim)
    settings = settings_of(params.all_units)
    config = settings.optim_state_dict_config
    options = SaveOptions(
        rank0_only=getattr(config, "rank0_only", False),
        shard_state=settings.state_dict_type != StateDictType.FULL_STATE_DICT,
        cpu_offload=getattr(config, "offload_to_cpu", True),
        group=group,
    )
    return _save(params, optim, optim_state_dict, None, options)


def _save(
    params: OptimParams,
    optim: Optimizer,
    given: StateDict | None,
    optim_input: OptimInput,
    options: SaveOptions,
) -> StateDict:
    osd = optim.state_dict() if given is None else given
    if options.shard_state and (options.rank0_only or optim_input is not None):
        raise AssertionError(
            "Expected optim_input to be None and rank0_only to be False for sharded state, got "
            f"{optim_input} and {options.rank0_only}"
        )
    is_named = isinstance(next(iter(osd["state"]), None), str)  # empty state has no names
    keys = params.keys(optim, optim_input, osd["state"] if is_named else None)
    if quantizes(optim):
        device = torch.device("cpu") if options.cpu_offload else None
        values = {key: dequantized(optim, osd["state"][key], device) for key in keys if key in osd["state"]}
        osd = {**osd, "state": {**osd["state"], **values}}
    with phases.enter(_C.PROGRESS_OPTIM_STATE_DICT), collector_paused():
        return save_optim_state(params, keys, osd, options)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Group = None,
) -> StateDict:
    """Return the argument for ``optim.load_state_dict()``, from a result of ``optim_state_dict()``.

    The state dict may have been saved with another number of ranks, other wrapping or another
    ``use_orig_params``. Only rank 0 passes one with ``rank0_only``. ``load_directly``: also load the result
    into ``optim``. ``optim_state_dict`` is not modified. State that ``optim`` keeps in 8 or 4 bits is
    quantized. Collective.

    Raises ValueError for a dict without "state" or for values whose shapes differ from their parameters'.
    """
    params = OptimParams(model)
    check_optimizer(optim)
    settings = settings_of(params.all_units)
    rank0_only = getattr(settings.optim_state_dict_config, "rank0_only", False)
    if rank0_only and settings.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise AssertionError(
            "Expected optim_input to be None and rank0_only to be False for sharded state, got True"
        )
    result = _load(optim_state_dict, params, None, optim, rank0_only, group, is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


# ----------------------------------------------------------------- deprecated functions


def _warn_legacy(old: str, new: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``.",
        FutureWarning,
        stacklevel=3,
    )


def _warn_optim_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed: pass `optim`, which has "
            "the same groups.",
            FutureWarning,
            stacklevel=3,
        )


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: Group = None,
) -> StateDict:
    """Return ``optim_state_dict()`` with full tensors on the CPU. Deprecated, like ``optim_input``. Collective."""
    _warn_legacy("full_optim_state_dict", "optim_state_dict")
    _warn_optim_input(optim_input)
    options = SaveOptions(rank0_only, False, True, group)
    return _save(OptimParams(model), optim, None, optim_input, options)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Group = None) -> StateDict:
    """Return ``optim_state_dict()`` with this rank's rows of each tensor. Deprecated. Collective."""
    _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
    return _save(OptimParams(model), optim, None, None, SaveOptions(False, True, True, group))


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Return ``optim_state_dict_to_load()`` of full tensors that every rank passes. Deprecated."""
    _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_optim_input(optim_input)
    return _load(full_optim_state_dict, OptimParams(model), optim_input, optim, False, None)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Return ``optim_state_dict_to_load()`` of the result of ``sharded_optim_state_dict()``. Deprecated. Collective."""
    _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _load(sharded_optim_state_dict, OptimParams(model), None, optim, False, None)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Group = None,
) -> StateDict:
    """Return ``optim_state_dict_to_load()`` of rank 0's full tensors. Other ranks pass None. Deprecated. Collective."""
    _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_optim_input(optim_input)
    return _load(full_optim_state_dict or {}, OptimParams(model), optim_input, optim, True, group)


def _load(
    osd: StateDict,
    params: OptimParams,
    optim_input: OptimInput,
    optim: Optimizer | None,
    rank0_only: bool,
    group: Group,
    is_named: bool = False,
) -> StateDict:
    owned_names = getattr(optim, "owned_names", None)  # method of WholeParameters
    owned = owned_names() if owned_names else None
    options = LoadOptions(rank0_only, optim if is_named else None, group, owned)
    with collector_paused():
        keys = params.keys(optim, optim_input, () if is_named else None)
        result = load_optim_state(params, keys, osd, options)
    if quantizes(optim):
        states = result["state"]
        states |= {key: quantized(optim, param, states[key]) for key, param in keys.items() if key in states}
    return result


# ----------------------------------------------------------------- keys of plain models


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Convert a state dict keyed by ids to one keyed by names, or back, for exchange with an unwrapped model.

    Returns the same object if its keys have the requested type already. Raises ValueError for keys of mixed
    types, RuntimeError for a parameter with several names.
    """
    osd, key_type = optim_state_dict, optim_state_key_type
    _warn_optim_input(optim_input)
    if key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {key_type}")
    kinds = {type(key) for key in osd["state"]} or {
        type(key) for group in osd["param_groups"] for key in group["params"]
    }
    if not (kinds <= {str} or kinds <= {int}):
        raise ValueError(
            f"Invalid parameter keys: expected all names or all ids, got {sorted(k.__name__ for k in kinds)}"
        )
    if kinds <= {str if key_type == OptimStateKeyType.PARAM_NAME else int}:
        return osd
    names = names_of_params(model)
    held = held_params(model, optim_input, optim)
    name_of: dict[Key, Key] = {index: names[param] for index, param in enumerate(held)}
    if key_type == OptimStateKeyType.PARAM_ID:
        name_of = {name: index for index, name in name_of.items()}
    groups = [
        with_params(group, sorted(name_of[key] for key in group["params"])) for group in osd["param_groups"]
    ]
    state = {name_of[key]: value for key, value in osd["state"].items()}
    return {**osd, "state": state, "param_groups": groups}
