"""torch's operators in place of the kernels give the same bits through the same ops, for all dtypes and
strides.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_c import _C, operator_kernels
from fsdp_c.tools import environment
from tests.unit.test_kernels import DTYPES, PAIRS, assert_same_bits, cast_divide, strided_tensors, values

OPS = torch.ops.fsdp_c
NUMELS = [0, 1, 1031]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Return a function that runs a call with torch's operators and with the kernels."""

    def call(run: Callable[[], Any]) -> tuple[Any, Any]:
        with monkeypatch.context() as patch:
            patch.setenv("FSDP_C_KERNELS", "torch")
            assert _C.why_no_kernels("cpu")
            by_operators = run()
        assert _C.why_no_kernels("cpu") is None
        return by_operators, run()

    return call


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_casts_divisions_and_sums(both: Any, source: torch.dtype, target: torch.dtype) -> None:
    for numel, divisor in itertools.product(NUMELS, [1.0, 3.3]):
        tensor, sums = values(numel, source), values(numel, target, seed=1)

        def accumulated(tensor: Tensor = tensor, sums: Tensor = sums, divisor: float = divisor) -> Tensor:
            total = sums.clone()
            OPS.accumulate_shard(total, tensor, divisor)
            return total

        assert_same_bits(*both(lambda t=tensor, d=divisor: cast_divide(t, d, target)))
        assert_same_bits(*both(accumulated))


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("name", strided_tensors(torch.float32))
def test_packing_zeroes_gaps_between_gradients(both: Any, source: torch.dtype, name: str) -> None:
    tensors = [strided_tensors(source)[name], values(0, source), values(5, source)]
    first = tensors[0].numel()

    def packed() -> Tensor:
        out = torch.full((first + 20,), math.nan)
        OPS.pack_gradients(out, tensors, [3, first + 3, first + 9], 3.3)
        return out

    assert_same_bits(*both(packed))


def test_use_of_torchs_operators_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FSDP_C_KERNELS", "torch")
    operator_kernels.warn_if_used.cache_clear()
    with caplog.at_level(logging.WARNING, "fsdp_c"):
        for _ in range(2):
            operator_kernels.warn_if_used("cpu")
    operator_kernels.warn_if_used.cache_clear()
    assert caplog.text.count("FSDP_C_KERNELS=torch is in the environment") == 1
    assert "; FSDP_C_KERNELS=torch is in the environment" in environment.report()


def test_exception_of_an_operator_becomes_the_ops_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setenv("FSDP_C_KERNELS", "torch")
    monkeypatch.setattr(operator_kernels, "pack", refuse)
    with pytest.raises(RuntimeError, match="fsdp_c::pack_gradients: the device refused: no such thing"):
        OPS.pack_gradients(torch.ones(3), [torch.ones(3)], [0], 1.0)
