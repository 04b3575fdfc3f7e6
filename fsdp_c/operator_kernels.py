"""The kernels as operators of torch, for devices that have none of ours. kernels.h says what each computes.

``csrc/torch/operator_kernels.c`` calls them with tensors over the memory that the kernels of C are given, on
the current stream. What parameters and gradients go through has the bits of those kernels, and of torch's
FSDP1.
"""

from __future__ import annotations

import functools
import logging
import sys

import torch
from torch import Tensor

from fsdp_c import _C

# checksum.c has these numbers, as unsigned ones.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_WORDS = 1 << 22
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


_C.bind_operator_kernels(sys.modules[__name__])
