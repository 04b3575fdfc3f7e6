"""The kernels implemented with torch's operators, for devices without native kernels. See kernels.h for each.

Called by ``csrc/torch/operator_kernels.c`` on the current stream, with tensors over the kernels' memory.
Results for parameters and gradients are bitwise equal to the native kernels' and to FSDP1's.
"""

from __future__ import annotations

import functools
import logging
import sys

import torch
from torch import Tensor

from fsdp_c import _C

logger = logging.getLogger("fsdp_c")


@functools.cache
def warn_if_used(device_type: str) -> None:
    """Log once per device type that torch's operators replace fsdp_c's kernels."""
    if why := _C.why_no_kernels(device_type):
        logger.warning(
            "on %s torch's operators replace fsdp_c's kernels: the results are the same, with more "
            "host work. %s",
            device_type,
            why,
        )


def pack(
    output: Tensor, targets: list[Tensor], sources: list[Tensor], has_gaps: bool, divisor: float
) -> None:
    """Cast, flatten and divide. ``targets`` are parts of ``output``; with gaps, they do not cover it."""
    if has_gaps:
        output.zero_()
    if targets:
        torch._foreach_copy_(targets, sources)
    if divisor != 1:
        output.div_(divisor)


def pack_add(
    output: Tensor, targets: list[Tensor], sources: list[Tensor], has_gaps: bool, divisor: float
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


_C.bind_operator_kernels(sys.modules[__name__])
