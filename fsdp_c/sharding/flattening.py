"""Flattening: concatenates a unit's parameters and copies this rank's shard of them."""

from collections.abc import Sequence

import torch

from fsdp_c import _C
from fsdp_c.compat.errors import IGNORED_AND_TRAINED, first_names
from fsdp_c.compat.upstream import _ShardParamInfo

ALIGNMENT_NBYTES = 16
PADDING_VALUE = 42.0  # recognizable in a debugger; never visible in a user's tensor


def check_uniform(
    params: Sequence[torch.Tensor], fqns: Sequence[str], use_orig_params: bool, floating: bool = True
) -> None:
    """Raise ValueError, naming the parameters, unless ``params`` can share one flat parameter."""
    dtype, device, requires_grad = params[0].dtype, params[0].device, params[0].requires_grad
    for fqn, param in zip(fqns, params, strict=True):
        if getattr(param, "_is_flat_param", False):
            raise ValueError(f"Cannot flatten a `FlatParameter`: {fqn}")
        if param.is_complex() or (floating and not param.is_floating_point()):
            kind = "complex" if param.is_complex() else "integer"
            raise ValueError(
                f"Cannot flatten {kind} dtype tensors: {fqn} is {param.dtype}. Pass it in ignored_states. "
                f"{IGNORED_AND_TRAINED}."
            )
        if param.dtype != dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {dtype} ({fqns[0]}) and {param.dtype} "
                f"({fqn}). Cast the module to one dtype, or wrap the modules of the other dtype as units of "
                "their own."
            )
        if param.device != device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {device} ({fqns[0]}) and "
                f"{param.device} ({fqn}). Move the module to one device."
            )
        if not use_orig_params and param.requires_grad != requires_grad:
            trainable = [name for name, p in zip(fqns, params, strict=True) if p.requires_grad]
            frozen = [name for name, p in zip(fqns, params, strict=True) if not p.requires_grad]
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: trainable "
                f"are {first_names(trainable)}, frozen are {first_names(frozen)}. Pass use_orig_params=True, "
                "or wrap the frozen modules on their own."
            )


def is_truly_contiguous(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Return True if ``tensor`` is contiguous and its last stride is 1, even for a last size of 1."""
    return (not stride or stride[-1] == 1) and tensor.is_contiguous()


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if its elements fill its memory exactly, else a contiguous copy.

    Slices of larger tensors have gaps; expanded tensors have elements that share memory.
    """
    is_whole = are_dense(tensor.shape, tensor.stride()) or not tensor.numel()
    return tensor if is_whole else tensor.detach().contiguous()


def are_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if a tensor of these sizes and strides fills its memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda each: (each[1], each[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_order(dense: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of a dense tensor, in memory order."""
    data = dense.detach()
    return (
        data.view(-1) if is_truly_contiguous(data, data.stride()) else data.as_strided((data.numel(),), (1,))
    )


def aligned_numel(compute_dtype: torch.dtype, use_orig_params: bool) -> int:
    """Return the alignment of a unit's parameters in elements; 0 for none."""
    return ALIGNMENT_NBYTES // compute_dtype.itemsize if use_orig_params else 0


def own_part(params: Sequence[torch.Tensor], layout: _C.FlatLayout) -> torch.Tensor:
    """Return this rank's shard of the flattened parameters, 1-D, of ``layout.shard_numel`` elements.

    Only the shard is allocated, never the unsharded flat parameter.
    """
    shard = torch.empty(layout.shard_numel, dtype=params[0].dtype, device=params[0].device)
    if shard.device.type == "meta":
        return shard
    places = zip(layout.param_offsets, layout.param_numels, strict=True)
    ranges = layout.shard_ranges() if layout.sharded else [(True, *place, 0) for place in places]
    end = 0
    for param, (in_shard, offset, numel, offset_in_param) in zip(params, ranges, strict=True):
        if not in_shard or numel == 0:
            continue
        _fill(shard, end, offset, PADDING_VALUE)
        shard.narrow(0, offset, numel).copy_(memory_order(param).narrow(0, offset_in_param, numel))
        end = offset + numel
    _fill(shard, end, layout.shard_numel_valid, PADDING_VALUE)
    _fill(shard, layout.shard_numel_valid, layout.shard_numel, 0.0)
    return shard


def _fill(shard: torch.Tensor, start: int, end: int, value: float) -> None:
    if start < end:
        shard.narrow(0, start, end - start).fill_(value)


_NOT_IN_SHARD = _ShardParamInfo(False, None, None, None, None)


def shard_param_infos(layout: _C.FlatLayout) -> tuple[_ShardParamInfo, ...]:
    return tuple(
        _ShardParamInfo(True, offset, numel, start, start + numel - 1) if in_shard else _NOT_IN_SHARD
        for in_shard, offset, numel, start in layout.shard_ranges()
    )


def part_in_range(start: int, last: int, range_start: int, range_last: int) -> _ShardParamInfo:
    """Return the intersection of a parameter at [start, last] with a shard at [range_start, range_last].

    All bounds are inclusive.
    """
    begin, end = max(start, range_start), min(last, range_last)
    if begin > end:
        return _NOT_IN_SHARD
    return _ShardParamInfo(True, begin - range_start, end - begin + 1, begin - start, end - start)
