"""The state of a model as a checkpoint holds it: by name, each rank its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c import _C, common
from fsdp_c.checkpoint.values import RangeTensor, box_of_rank, in_box, whole_value
from fsdp_c.sharded_values import ParamForm
from fsdp_c.state_dict_saving import split_shard
from fsdp_c.traversal import FLAT_PARAM, clean_name, is_unit, units_with_paths
from fsdp_c.unshard_params import check_idle

EXTRA_STATE = "_extra_state"


def model_state(model: nn.Module) -> dict[str, Any]:
    """The parameters and persistent buffers of ``model``, by the names that ``state_dict()`` gives them.

    A parameter of a unit is a ``RangeTensor``: the elements that this rank's shard has, in the shard's memory. So
    ``torch.distributed.checkpoint.save({"model": model_state(model)}, ...)`` saves without any exchange of parameters,
    and its ``load`` loads into the model, whatever the number of ranks and the wrapping were. Not collective.

    Raises AssertionError inside forward, backward or ``summon_full_params``, NotImplementedError for a DTensor that
    is a sum over ranks.
    """
    return _model_state(model, as_saved=False)


@torch.no_grad()
def _model_state(model: nn.Module, as_saved: bool) -> dict[str, Any]:
    """``as_saved``: copies of buffers that mixed precision keeps in another dtype, in the dtype of their own."""
    managed: dict[tuple[nn.Module, str], Any] = {}
    original: dict[tuple[nn.Module, str], torch.dtype] = {}
    for path, unit in units_with_paths(model):
        _settle(unit)
        managed.update(_params_of_unit(path, unit))
        if as_saved:
            original.update(_buffer_dtypes(unit))
    return dict(_in_order(model, managed, original))


def _settle(unit: Any) -> None:
    """Let the shard have what the user sees."""
    handle = unit._handle
    if handle is None:
        return
    check_idle(unit)
    if handle.training_state == _C.USE_SUMMON_FULL_PARAMS:
        raise AssertionError(
            f"checkpoint of a unit inside summon_full_params (rank {unit.rank}): save and load outside of it"
        )
    common.synchronize(unit.compute_device)
    with common.bound_runtime(unit):
        handle.writeback()


def part_value(unit: Any, form: ParamForm, part: Tensor) -> Tensor:
    """A parameter of a unit, or state of it, of which this rank holds ``part``: a range, or in its own shape."""
    box = None if form.parallel is None else box_of_rank(form.parallel)
    if part.dim() > 1 and box is None:
        return whole_value(part)
    is_replica = _is_replica(unit, form)
    if part.dim() > 1:
        return in_box(part, form.full_shape, box, is_replica)
    start = form.shard.bounds(unit.rank)[0] if unit._handle.layout.sharded else 0
    return RangeTensor(part, form.full_shape, start, form.order, box, is_replica)


def _is_replica(unit: Any, form: ParamForm) -> bool:
    """Whether tensor parallelism leaves the parameter whole here, and on a rank before this one too.

    Their shards may end elsewhere: what tensor parallelism divides unevenly makes flat parameters of several sizes.
    """
    specs = [spec for spec in unit._handle.flat_param._param_extensions if spec is not None]
    if not specs:
        return False
    mesh = specs[0].mesh
    placements = [None] * mesh.ndim if form.parallel is None else form.parallel.placements
    places = zip(mesh.get_coordinate(), placements, strict=True)
    return any(rank > 0 and (placement is None or placement.is_replicate()) for rank, placement in places)


def _params_of_unit(path: str, unit: Any) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    if unit._handle is None:
        return
    parts = list(split_shard(unit, unit._handle.local_shard))
    values = [part_value(unit, form, part) for form, part in parts]
    for param in common.managed_params(unit._handle):
        yield (param.module, param.name), values[param.index]


def _buffer_dtypes(unit: Any) -> Iterator[tuple[tuple[nn.Module, str], torch.dtype]]:
    """Of the buffers that the unit's mixed precision casts."""
    if unit.mixed_precision.buffer_dtype is None:
        return
    for path, module in unit._fsdp_wrapped_module.named_modules():
        if is_unit(module):
            continue
        for name in module._buffers:
            dtype = unit._buffer_name_to_orig_dtype.get(clean_name(f"{path}.{name}" if path else name))
            if dtype is not None:
                yield (module, name), dtype


def _in_order(
    model: nn.Module, managed: dict[tuple[nn.Module, str], Any], original: dict[tuple[nn.Module, str], torch.dtype]
) -> Iterator[tuple[str, Any]]:
    of_module: dict[nn.Module, dict[str, Any]] = {}
    for (module, name), value in managed.items():
        of_module.setdefault(module, {})[name] = value
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = clean_name(f"{path}.") if path else ""
        own = of_module.get(module, {})
        for name, param in module._parameters.items():
            if param is not None and name not in own and name != FLAT_PARAM:
                yield prefix + name, _plain(prefix + name, param)
        for name, value in own.items():
            yield prefix + name, value
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                dtype = original.get((module, name), buffer.dtype)
                yield prefix + name, _plain(prefix + name, buffer if dtype == buffer.dtype else buffer.to(dtype))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield prefix + EXTRA_STATE, module.get_extra_state()


def _plain(name: str, tensor: Tensor) -> Tensor:
    try:
        return whole_value(tensor)
    except NotImplementedError as error:
        raise NotImplementedError(f"{name}: {error}") from error


def show_loaded(model: nn.Module) -> None:
    """After the shards were written to: what is gathered is from before, and is freed."""
    for _, unit in units_with_paths(model):
        if unit._handle is not None:
            unit._handle.reshard(True)


def set_extra_state(model: nn.Module, values: dict[str, Any]) -> None:
    """Hand modules' own state, by name, to the modules."""
    for path, module in model.named_modules(remove_duplicate=False):
        name = (clean_name(f"{path}.") if path else "") + EXTRA_STATE
        if name in values and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(values[name])
