"""State of a model for a checkpoint: each rank's part, by FQN."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from fsdp_c.checkpoint.values import (
    RangeTensor,
    box_of_rank,
    in_box,
    is_part,
    map_tensors,
    unless_part,
    whole_value,
)
from fsdp_c.compat.aliases import StateDict
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, is_summoned, units_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name, is_flat_param_name, is_unit, joined
from fsdp_c.state.sharded_values import ParamLayout, split_shard
from fsdp_c.state.state_dict_saving import local_shard
from fsdp_c.training.unshard_params import bound_runtime, check_idle, synchronize

EXTRA = "extra"  # key of the script's own values in a checkpoint
EXTRA_STATE = "_extra_state"


def model_state(model: nn.Module) -> StateDict:
    """Return the parameters and persistent buffers of ``model``, with the names of its uncompiled ``state_dict()``.

    A parameter of a unit is a ``RangeTensor``: the elements of this rank's shard, in the shard's memory.
    Therefore ``torch.distributed.checkpoint.save({"model": model_state(model)}, ...)`` saves without exchange
    of parameters, and its ``load`` loads into the model, for any number of ranks and wrapping of the saved
    one. Not collective. torch's ``HuggingFaceStorageWriter`` is refused, because it keeps one box of a tensor
    per rank: ``python -m fsdp_c.checkpoint export`` writes safetensors.

    Raises AssertionError inside forward, backward or ``summon_full_params``, NotImplementedError for a
    DTensor that is a sum over ranks, ValueError if a module called ``_orig_mod`` by the user hides another value.
    """
    return _model_state(model, as_saved=False)


_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")


def uncompiled(name: str) -> str:
    """Return the name of a parameter or module without torch.compile's prefixes. Names in extra state are kept."""
    of_model, mark, of_module = name.partition(EXTRA_STATE)
    return _COMPILED.sub("", of_model) + mark + of_module


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if two values have one name: in a module called ``_orig_mod`` by the user, and beside it."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"two values of the model are named {twice[0]} without torch.compile's prefix _orig_mod: rename the "
            "module called _orig_mod"
        )


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix, module) for every module at each of its places."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield uncompiled(clean_name(f"{path}.")) if path else "", module


@torch.no_grad()
def _model_state(model: nn.Module, as_saved: bool, waits: bool = True) -> StateDict:
    """Return the state. ``as_saved``: copies of buffers in their original dtype where mixed precision casts them.

    ``waits``: False to skip the host's wait for a GPU that holds the shards; readers must then be ordered on
    its stream.
    """
    managed = _params_of_units(model, waits)
    original = dict(_cast_buffers(model)) if as_saved else {}
    values = [*_in_order(model, managed, original)]
    check_names(name for name, _ in values)
    return dict(values)


def _up_to_date_shard(module: ShardedModule, waits: bool) -> Tensor:
    """Return the shard, with user edits of parameters written back."""
    handle = handle_of(module)
    check_idle(module)
    if is_summoned(module):
        raise AssertionError(
            f"checkpoint of a unit inside summon_full_params (rank {module.rank}): save and load outside of "
            "it"
        )
    if waits or handle.flat_param.device != module.compute_device:
        synchronize(module.compute_device)
    with bound_runtime(module):
        handle.writeback()
    return local_shard(module)


def visible_params(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter that a script may write to) for the parameters of units."""
    for path, module in units_with_paths(model):
        if module._handle is not None:
            flat_param = module._handle.flat_param
            params = flat_param._params or [flat_param] * len(flat_param._fqns)
            for fqn, param in zip(flat_param._fqns, params, strict=True):
                yield clean_name(joined(path, fqn)), param


def part_value(module: ShardedModule, layout: ParamLayout, part: Tensor) -> Tensor:
    """Return a unit's parameter, or its state, from this rank's ``part``: a 1-D range, or a tensor in its own shape."""
    box = None if layout.parallel is None else box_of_rank(layout.parallel)
    if part.dim() != 1 and box is None:
        return whole_value(part)
    is_replica = _is_replica(module, layout)
    if part.dim() != 1:
        return in_box(part, layout.full_shape, box, is_replica)
    start = layout.shard.bounds(module.rank)[0] if handle_of(module).layout.sharded else 0
    return RangeTensor(part, layout.full_shape, start, layout.order, box, is_replica)


def _is_replica(module: ShardedModule, layout: ParamLayout) -> bool:
    """Return True if tensor parallelism replicates the parameter on this rank and a previous one.

    Shards of the two may have different boundaries: uneven division makes flat parameters of several sizes.
    """
    specs = [spec for spec in handle_of(module).flat_param._param_extensions if spec is not None]
    if not specs:
        return False
    mesh = specs[0].mesh
    placements = [None] * mesh.ndim if layout.parallel is None else layout.parallel.placements
    places = zip(mesh.get_coordinate(), placements, strict=True)
    return any(rank > 0 and (placement is None or placement.is_replicate()) for rank, placement in places)


def _params_of_units(model: nn.Module, waits: bool) -> dict[nn.Module, dict[str, Tensor]]:
    """Return the values of units' parameters, by module and name in it."""
    found: dict[nn.Module, dict[str, Tensor]] = {}
    for module in units_of(model):
        if module._handle is not None:
            if any(map(is_part, module._handle.flat_param._params or ())):
                for name, param in visible_params(model):
                    map_tensors(name, param, unless_part)
            parts = split_shard(module, _up_to_date_shard(module, waits))
            values = [part_value(module, layout, part) for layout, part in parts]
            for managed in module._handle.managed_params:
                found.setdefault(managed.module, {})[managed.name] = values[managed.place]
    return found


def _cast_buffers(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], torch.dtype]]:
    """Yield ((module, name), original dtype) of the buffers that the units' mixed precision casts."""
    for unit in units_of(model):
        if unit.mixed_precision.buffer_dtype is None:
            continue
        for path, module in unit._fsdp_wrapped_module.named_modules():
            for name in () if is_unit(module) else module._buffers:
                dtype = unit._buffer_name_to_orig_dtype.get(clean_name(joined(path, name)))
                if dtype is not None:
                    yield (module, name), dtype


def _in_order(
    model: nn.Module,
    of_module: dict[nn.Module, dict[str, Tensor]],
    original: dict[tuple[nn.Module, str], torch.dtype],
) -> Iterator[tuple[str, object]]:
    for prefix, module in named_modules(model):
        own = of_module.get(module, {})
        for name, param in module._parameters.items():
            if param is not None and name not in own and not is_flat_param_name(name):
                yield prefix + name, map_tensors(prefix + name, param, whole_value)
        for name, value in own.items():
            yield prefix + name, value
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                value = buffer.to(dtype=original.get((module, name)))
                yield prefix + name, map_tensors(prefix + name, value, whole_value)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            key = prefix + EXTRA_STATE
            yield key, map_tensors(key, module.get_extra_state(), unless_part)


def extra_state_setters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with set_extra_state(), by the name of the state."""
    return {
        prefix + EXTRA_STATE: module
        for prefix, module in named_modules(model)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
