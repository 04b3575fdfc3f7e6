"""Flattening: groups a unit's parameters by flat parameter and copies this rank's shard of each group."""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from fsdp_c import _C
from fsdp_c.compat.errors import IGNORED_AND_TRAINED, first_names

ALIGNMENT_NBYTES = 16  # of each parameter, with use_orig_params
PADDING_VALUE = 42.0  # recognizable in a debugger; never visible in a user's tensor

splits_by_default = False  # set by ``python -m fsdp_c --split-frozen``
_splits_frozen = contextvars.ContextVar("_splits_frozen", default=False)


@contextlib.contextmanager
def split_frozen() -> Iterator[None]:
    """Put frozen parameters into flat parameters of their own, for units built in the body.

    Applies with ``use_orig_params=True`` too. Frozen parameters then cost no gradient memory, packing,
    reduction or offload. State dicts keep their names and shapes. Results are bitwise equal on two ranks
    without clipping; norms, and sums over more ranks, are added in another order. ``python -m fsdp_c
    --split-frozen`` does the same for unmodified scripts. All ranks must build alike.
    """
    token = _splits_frozen.set(True)
    try:
        yield
    finally:
        _splits_frozen.reset(token)


def splits_frozen() -> bool:
    """Return True under ``split_frozen`` or ``--split-frozen``."""
    return _splits_frozen.get() or splits_by_default


def groups_of(params: Iterable[nn.Parameter], use_orig_params: bool) -> list[list[nn.Parameter]]:
    """Split ``params`` by dtype and ``requires_grad``, one group per flat parameter.

    Trainable groups come first, integer groups last. With ``use_orig_params`` and without ``split_frozen``,
    parameters of one dtype form a single group even if some are frozen.
    """
    groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault((param.requires_grad, param.dtype), []).append(param)
    if not splits_frozen() and use_orig_params and len({dtype for _, dtype in groups}) == 1:
        return [list(params)]
    return [groups[key] for key in sorted(groups, key=lambda key: (not key[0], not key[1].is_floating_point))]


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


def is_truly_contiguous(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is contiguous and its last stride is 1, even for a last size of 1."""
    return (not tensor.dim() or tensor.stride(-1) == 1) and tensor.is_contiguous()


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


def flat_view(dense: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of a dense tensor, in memory order."""
    data = dense.detach()
    return data.view(-1) if is_truly_contiguous(data) else data.as_strided((data.numel(),), (1,))


def own_shard(params: Sequence[torch.Tensor], layout: _C.FlatLayout) -> torch.Tensor:
    """Return this rank's shard of the flattened parameters, 1-D, of ``layout.shard_numel`` elements.

    Only the shard is allocated, never the unsharded flat parameter.
    """
    shard = torch.empty(layout.shard_numel, dtype=params[0].dtype, device=params[0].device)
    if shard.device.type == "meta":
        return shard
    end = 0
    for param, (_, offset, numel, offset_in_param) in zip(params, layout.shard_ranges(), strict=True):
        if numel == 0:
            continue
        if end < offset:
            shard[end:offset].fill_(PADDING_VALUE)
        shard.narrow(0, offset, numel).copy_(flat_view(param).narrow(0, offset_in_param, numel))
        end = offset + numel
    shard[end : layout.shard_numel_valid].fill_(PADDING_VALUE)
    shard[layout.shard_numel_valid :].fill_(0.0)
    return shard
