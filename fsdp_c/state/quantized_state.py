"""State of torchao's and bitsandbytes' 8-bit and 4-bit optimizers: conversion to float32 values and back.

[Note: Quantized state]
torchao keeps an average in a tensor subclass. bitsandbytes keeps bytes, a scale per block and a table of
levels. Blocks divide this rank's shard, so another number of ranks has other blocks. State dicts and
checkpoints therefore hold float32 values, and a load quantizes them again. A shard with unchanged blocks gets
the saved codes and scales, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from fsdp_c.compat.aliases import ParamState


class _Blockwise:
    """One state of bitsandbytes: ``codes`` in the parameter's shape, a scale per block, and a table of levels."""

    block_size = 256

    def __init__(self, codes: Tensor, scales: Tensor, levels: Tensor) -> None:
        self.codes, self.scales, self.levels = codes, scales, levels

    @classmethod
    def all_of(cls, state: ParamState) -> dict[str, _Blockwise]:
        """Return the states of one parameter, by name. AdEMAMix, with two averages in one state, is not supported."""
        found = {}
        for number in "12":
            codes, scales, levels = (state.get(f"{part}{number}") for part in ("state", "absmax", "qmap"))
            if codes is not None and levels is not None and scales is not None and scales.dim() == 1:
                found[f"state{number}"] = cls(codes, scales, levels)
        return found

    def dequantize(self) -> Tensor:
        scales = self.scales.repeat_interleave(self.block_size)[: self.codes.numel()]
        return self.levels[self.codes.int()] * scales.view_as(self.codes)

    def copy_(self, value: Tensor) -> None:
        """Quantize ``value`` to the nearest levels."""
        blocks = _blocks(value, self.block_size)
        scales = blocks.abs().amax(1)
        scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(scaled, (self.levels[1:] + self.levels[:-1]) / 2)
        self.codes.copy_(_unblocked(codes, value))
        self.scales.copy_(scales)


def _blocks(value: Tensor, size: int) -> Tensor:
    flat = value.reshape(-1)
    return pad(flat, (0, -len(flat) % size)).view(-1, size)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten()[: like.numel()].view_as(like)


def _write(state: Any, value: Tensor) -> None:
    """Quantize a float32 ``value`` into ``state`` so that dequantized values give their original codes and scales.

    Libraries take the largest magnitude of a block as its scale, and their lowest level is above -1. The
    largest magnitude of a dequantized block is below its scale if that element is negative, so quantizing the
    block again would change it. The original scale is reconstructed per block, and its two neighbours are
    tried against rounding.
    """
    best = blocks = _blocks(value, state.block_size)
    largest = blocks.abs().amax(1, keepdim=True)
    state.copy_(torch.full_like(value, -1.0))
    lowest = state.dequantize().flatten()[0].abs()
    is_lowest = ((blocks == -largest) & (largest > 0)).any(1, keepdim=True)
    scale = torch.where(is_lowest, largest / lowest, largest)
    limits = torch.zeros_like(scale), torch.full_like(scale, torch.inf)
    for near in (*(scale.nextafter(limit) for limit in limits), scale):
        signed = torch.where(is_lowest, -near, near)
        given = torch.where(blocks == largest.copysign(signed), signed, blocks)
        state.copy_(_unblocked(given, value))
        is_same = (_blocks(state.dequantize(), state.block_size) == blocks).all(1, keepdim=True)
        best = torch.where(is_same, given, best)
    state.copy_(_unblocked(best, value))


# ----------------------------------------------------------------- optimizer types


def _unwrapped(optim: Optimizer | None) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optim, "optimizer", optim)


def is_made_of_tensors(value: object) -> bool:
    """Return True if a tensor, or the local part of a DTensor, stores its elements in other tensors."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return isinstance(local, Tensor) and type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_torchao(optim: Any) -> bool:
    # _AdamW, which does not quantize, has an infinite block size
    return hasattr(optim, "_new_buffer") and isinstance(getattr(optim, "block_size", None), int)


def _is_bitsandbytes(optim: Any) -> bool:
    return hasattr(optim, "non_castable_tensor_keys") and hasattr(optim, "init_state")


def quantizes(optim: Optimizer | None) -> bool:
    """Return True if ``optim`` is an optimizer whose quantized state is supported."""
    inner = _unwrapped(optim)
    return _is_torchao(inner) or _is_bitsandbytes(inner)


# ----------------------------------------------------------------- saving and loading


@torch.no_grad()
def dequantized(optim: Optimizer | None, state: ParamState, device: torch.device | None = None) -> ParamState:
    """Return the state of one parameter with quantized values as float32, on ``device`` if given."""
    inner = _unwrapped(optim)
    if _is_torchao(inner):
        # float32 on every rank: a shard whose size is no multiple of a block has the parameter's dtype
        return {
            name: value.dequantize().to(device or value.device) if _is_average(value) else value
            for name, value in state.items()
        }
    if not _is_bitsandbytes(inner):
        return state
    # key of a nested dict in the result of its state_dict()
    wrapped = getattr(inner, "_FSDP_WRAPPED_QUANT_STATE_KEY", "")
    held = {**state, **state.get(wrapped, {})}
    states = _Blockwise.all_of(held)
    parts = {name.replace("state", part) for name in states for part in ("absmax", "qmap")} | {wrapped}
    return {
        name: states[name].dequantize().to(device or value.device) if name in states else value
        for name, value in held.items()
        if name not in parts
    }


def _is_average(value: object) -> bool:
    """Return True if torchao may quantize this state of a parameter; False for "step"."""
    return isinstance(value, Tensor) and value.dim() > 0 and not isinstance(value, DTensor)


@torch.no_grad()
def quantized(optim: Optimizer | None, param: Tensor, state: ParamState) -> ParamState:
    """Return the state of one parameter, given as float32, in the storage format of ``optim``."""
    inner = _unwrapped(optim)
    if _is_torchao(inner):
        result = dict(state)
        for name, value in state.items():
            if _is_average(value):
                result[name] = new = inner._new_buffer(param.detach(), name == "exp_avg")
                write = _write if is_made_of_tensors(new) else Tensor.copy_
                write(new, value.dequantize().to(new.device))
        return result
    if not _is_bitsandbytes(inner):
        return state
    new = _new_state(inner, param)
    if not all(name in state for name in new if name.startswith("state")):
        return state  # state of another optimizer
    blockwise = _Blockwise.all_of(new)
    for name, one in blockwise.items():
        _write(one, state[name].to(one.codes.device, torch.float32))
    return {**new, **{name: value for name, value in state.items() if name not in blockwise}}


def _new_state(optim: Any, param: Tensor) -> ParamState:
    """Return bitsandbytes' initial state of ``param``. The optimizer's current state is unchanged."""
    held = optim.state.pop(param, None)
    try:
        for group_index, group in enumerate(optim.param_groups):
            for index, each in enumerate(group["params"]):
                if each is param:
                    optim.init_state(group, param, group_index, index)
        new: ParamState = optim.state.pop(param, {})
        return new
    finally:
        if held is not None:
            optim.state[param] = held
