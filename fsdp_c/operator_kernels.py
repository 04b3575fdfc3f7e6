"""The kernels as operators of torch, for devices that have none of ours. kernels.h says what each computes.

``csrc/torch/operator_kernels.c`` calls them with tensors over the memory that the kernels of C are given, on
the current stream. What parameters and gradients go through has the bits of those kernels, and of torch's
FSDP1.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_c import _C

# checksum.c has these numbers, as unsigned ones.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_WORDS = 1 << 22
_LOW = 0xFFFFFFFF
logger = logging.getLogger("fsdp_c")


@functools.cache
def warn_if_used(device_type: str) -> None:
    """Log, once in a process, that torch's operators run in place of fsdp_c's kernels on such devices."""
    if why := _C.why_no_kernels(device_type):
        logger.warning(
            "on %s torch's operators compute what fsdp_c's kernels would: the same values, with more work for "
            "the host. %s",
            device_type,
            why,
        )


def pack(
    output: Tensor, targets: list[Tensor], sources: list[Tensor], gaps: list[Tensor], divisor: float
) -> None:
    """Cast, flatten and divide: ``targets`` are parts of ``output``, as ``gaps`` are, between which nothing
    is left."""
    if gaps:
        torch._foreach_zero_(gaps)
    if targets:
        torch._foreach_copy_(targets, sources)
    if divisor != 1:
        output.div_(divisor)


def pack_add(
    output: Tensor, targets: list[Tensor], sources: list[Tensor], gaps: list[Tensor], divisor: float
) -> None:
    if targets:
        torch._foreach_add_(targets, [source.to(output.dtype) for source in sources])


def cast_divide(output: Tensor, input: Tensor, divisor: float) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
    if divisor != 1:
        output.div_(divisor)


def accumulate(accumulator: Tensor, input: Tensor, divisor: float) -> None:
    quotient = input if divisor == 1 else input.div(divisor)
    accumulator.add_(quotient.to(accumulator.dtype))


def checksums(sums: Tensor, ranges: list[Tensor]) -> None:
    for index, data in enumerate(ranges):
        total = torch.full((), data.numel(), dtype=torch.int64, device=sums.device)
        for first in range(0, data.numel(), 8 * _WORDS):
            total += _sum_of_words(data[first : first + 8 * _WORDS].view(torch.uint8), first // 8)
        sums[index] = _mixed(total)


def _sum_of_words(data: Tensor, first: int) -> Tensor:
    words = torch.zeros((data.numel() + 7) // 8 * 8, dtype=torch.uint8, device=data.device)
    words[: data.numel()] = data
    x = words.view(torch.int64)
    x = x ^ (torch.arange(first + 1, first + 1 + x.numel(), device=x.device) * _STEP)
    return (x + (x & 0xFFFFFFFF) * _shifted(x, 32)).sum()


def _mixed(total: Tensor) -> Tensor:
    for factor in _MIX:
        total = (total ^ _shifted(total, 33)) * factor
    return total ^ _shifted(total, 33)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, filled up with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


Operands = tuple[Any, ...]  # as adam_operands() in operator_kernels.c puts them together


def adamw(
    tensors: list[Operands],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """The formula of adam.c, to rounding: what it fuses is rounded on the way here."""
    for *operands, master_low, scale1, scale2, scale3, step, stream, first_index in tensors:
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq = operands
        scales = (None, None, scale1, scale2, scale3)
        store = functools.partial(
            _store, scales=scales, step=step.to(torch.int64), stream=stream, first_index=first_index
        )
        step += 1
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        loaded: list[Any] = [
            decoded(operand, scale, first_index, operand is exp_avg)
            if scale is not None
            else operand
            if operand is None
            else operand.to(dtype)
            for operand, scale in zip(operands, scales, strict=True)
        ]
        p, g, m, v, largest = loaded
        if master_low is not None:
            p = joined_masters(param, master_low)
        if maximize:
            g = -g
        m = m + (1 - beta1) * (g - m)
        v = v * beta2 + (1 - beta2) * g * g
        store(exp_avg, m, operand=2)
        store(exp_avg_sq, v, operand=3)
        if max_exp_avg_sq is not None:
            v = torch.maximum(largest, v)
            store(max_exp_avg_sq, v, operand=4)
        steps = step.to(torch.float64)
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        denominator = v.sqrt() / correction2.sqrt().to(dtype) + eps
        p = p * (1 - lr * weight_decay) - (lr / correction1).to(dtype) * m / denominator
        if master_low is None:
            store(param, p, operand=0)
        else:
            _split(p, param, master_low)


def _store(
    output: Tensor,
    values: Tensor,
    operand: int,
    scales: Sequence[Tensor | None],
    step: Tensor,
    stream: int | None,
    first_index: int,
) -> None:
    scale = scales[operand]
    if scale is not None:
        for into, result in zip((output, scale), encoded(values, first_index, operand == 2), strict=True):
            into.copy_(result)
        return
    if stream is None or output.dtype != torch.bfloat16:
        output.copy_(values)
        return
    key = _mixed(_mixed(torch.full_like(step, stream + 1)) + step * _STEP)
    bits = values.view(torch.int32).masked_fill(values.isnan(), 0x7FC00000)
    cut_off = _drawn_bits(torch.arange(values.numel(), device=values.device) + first_index, key, operand)
    bits = bits + torch.where(values.isfinite(), cut_off, 0).to(torch.int32)
    output.view(torch.int16).copy_(bits >> 16)


def _drawn_bits(index: Tensor, key: Tensor, operand: int) -> Tensor:
    """16 bits for each element, by [Note: stochastic rounding] in adam.h."""
    word = _permuted((index ^ key) & _LOW)
    word = _permuted((word + (_shifted(key, 32) ^ _shifted(index, 32))) & _LOW)
    factor = {0: 1 << 16, 2: 1, 3: 0xB5297A4D, 4: 0xED5AD4BB}[operand]
    return ((word * factor) & _LOW) >> 16


def _permuted(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def joined_masters(param: Tensor, master_low: Tensor | int) -> Tensor:
    """In fp32, by [Note: masters] in adam.h."""
    return ((param.view(torch.int16).int() << 16) + master_low).view(torch.float32)


def _split(master: Tensor, param: Tensor, master_low: Tensor) -> None:
    kept = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
    master_low.copy_(kept)  # the low half
    param.view(torch.int16).copy_((kept - master_low) >> 16)


# ----------------------------------------------------------------- by [Note: states in 8 bits] in adam.h

_BLOCK_NUMEL = 256
_BLOCKS = 1024  # at once, as what is computed takes many times their memory
_DECADES = ((2, 1e-6), (4, 1e-5), (8, 1e-4), (16, 1e-3), (32, 1e-2), (64, 1e-1), (128, 1.0))
_BEFORE = [first * (8 / 9) for first, _ in _DECADES]


def num_blocks(first_index: int, numel: int) -> int:
    return -(-(first_index % _BLOCK_NUMEL + numel) // _BLOCK_NUMEL) if numel else 0


def encoded(values: Tensor, first_index: int, has_sign: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a flat average in fp32."""
    parts = _in_blocks(values, first_index).split(_BLOCKS)
    codes, scales = zip(*(_encoded_blocks(part, has_sign) for part in parts), strict=True)
    return _out_of_blocks(torch.cat(codes), first_index, values.numel()), torch.cat(scales)


def decoded(codes: Tensor, scales: Tensor, first_index: int, has_sign: bool) -> Tensor:
    """The flat average in fp32."""
    code = torch.arange(256, device=codes.device)
    cell = (2 * (code & 127) + 1 if has_sign else code + 1.5).float()
    width = cell.new_tensor([0.9 * end / first for first, end in _DECADES])
    values = ((cell[:, None] - cell.new_tensor(_BEFORE)) * width).amax(1)
    values[0] = 0
    values[128 if has_sign else 255] = 1
    if has_sign:
        values[129:] *= -1
    parts = zip(_in_blocks(codes, first_index).split(_BLOCKS), scales.split(_BLOCKS), strict=True)
    blocks = [values[part.int()] * scale[:, None] for part, scale in parts]
    return _out_of_blocks(torch.cat(blocks), first_index, codes.numel())


def _encoded_blocks(blocks: Tensor, has_sign: bool) -> tuple[Tensor, Tensor]:
    highest, lowest = blocks.amax(1), blocks.amin(1)
    scale = torch.where(highest >= -lowest, highest, lowest)
    scale = scale.masked_fill(~scale.isfinite(), math.nan)
    scale = scale.masked_fill(scale.abs() < torch.finfo(torch.float32).tiny, 0.0)
    quotient = blocks * torch.where(scale.abs() > 0, 1 / scale, 0.0)[:, None]
    magnitude = torch.where(quotient.abs() <= 1, quotient.abs(), 1.0)
    cells = blocks.new_tensor([first / (0.9 * end) for first, end in _DECADES])
    cell = (magnitude[..., None] * cells + blocks.new_tensor(_BEFORE)).amin(2).int()
    cell = cell.masked_fill(magnitude > blocks.new_tensor(0.998), 256)
    if has_sign:
        is_negative = quotient < 0
        half = torch.minimum(cell // 2, 128 - is_negative.int())
        code = torch.where(is_negative & (half > 0), 128 + half, half)
    else:
        code = torch.where(cell > 1, cell - 1, (blocks > 0).int())
    return code.to(torch.uint8), scale


def _in_blocks(values: Tensor, first_index: int) -> Tensor:
    before = first_index % _BLOCK_NUMEL if values.numel() else 0
    after = -(before + values.numel()) % _BLOCK_NUMEL
    return torch.nn.functional.pad(values, (before, after)).view(-1, _BLOCK_NUMEL)


def _out_of_blocks(blocks: Tensor, first_index: int, numel: int) -> Tensor:
    return blocks.reshape(-1)[first_index % _BLOCK_NUMEL :][:numel]


_C.bind_operator_kernels(sys.modules[__name__])
