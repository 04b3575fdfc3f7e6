"""Every CPU kernel gives bitwise torch's result: all dtypes, special values, strides and instruction sets. So do
torch's operators in place of the kernels.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_c import _C, operator_kernels
from fsdp_c.tools import environment
from fsdp_c.training.grad_clipping import _local_norm, scale

OPS = torch.ops.fsdp_c
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
# a short tail, whole blocks, and enough for several threads
NUMELS = [0, 1, 7, 1024, 1031, 70_001]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1 / 3, 3e38, 65504.0, 65519.9, 65520.0, 65536.0),
    *(1e-45, 6.1e-5, 6.0e-8, 2.98e-8, 2.9803e-8, 8.9e-8, 1.17e-38, 9.2e-41, 1.00390625, 1.01171875),
    *(2049.0, 2051.0),
]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers over 60 binary orders of magnitude, mixed with special values."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, dtype=torch.float64, generator=generator)
    numbers *= 2.0 ** torch.randint(-40, 20, (numel,), generator=generator)
    special = torch.tensor(SPECIAL, dtype=torch.float64)[:numel]
    numbers[: len(special)] = special
    return numbers[torch.randperm(numel, generator=generator)].to(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert equal dtype, shape and bits. NaNs may have different bits."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.isnan(), expected.isnan())
    integers = BITS[actual.element_size()]
    bits = [
        tensor.masked_fill(tensor.isnan(), 0).contiguous().view(integers) for tensor in (actual, expected)
    ]
    assert torch.equal(*bits)


def cast_divide(tensor: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)
    OPS.pack_gradients(out, [tensor], [0], divisor)
    return out.view(tensor.shape)


@pytest.fixture(params=[*_C.cpu_capabilities(), "torch"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with the kernels of each instruction set, and with torch's operators in their place."""
    if request.param == "torch":
        monkeypatch.setenv("FSDP_C_KERNELS", "torch")
    else:
        _C.use_cpu_capability(request.param)
    assert bool(_C.why_no_kernels("cpu")) == (request.param == "torch")
    yield
    _C.use_cpu_capability(None)


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.3, 7.0])
def test_cast_divide_rounds_as_cast_then_divide(
    source: torch.dtype, target: torch.dtype, divisor: float
) -> None:
    for numel in NUMELS:
        tensor = values(numel, source)
        expected = tensor.to(target)
        if divisor != 1.0:
            expected = expected / divisor
        assert_same_bits(cast_divide(tensor, divisor, target), expected)


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in PAIRS if a.itemsize == 2], ids=str)
def test_cast_of_all_16_bit_numbers(source: torch.dtype, target: torch.dtype) -> None:
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    assert_same_bits(cast_divide(tensor, 1.0, target), tensor.to(target))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_cast_to_16_bits_around_every_tie(source: torch.dtype, target: torch.dtype) -> None:
    """Next to a tie float64 rounds to the tie in float32: the result shows whether the kernel rounds twice
    like torch.
    """
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(target).to(source)
    exact = exact[exact.isfinite()]
    step = (exact.to(target).view(torch.int16) + 1).view(target).to(source) - exact
    ties = exact + step / 2
    for tensor in (ties, torch.nextafter(ties, exact), torch.nextafter(ties, exact + step)):
        assert_same_bits(cast_divide(tensor, 1.0, target), tensor.to(target))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 4.0, 3.3])
def test_accumulate_rounds_quotient_cast_and_sum(
    source: torch.dtype, target: torch.dtype, divisor: float
) -> None:
    for numel in NUMELS:
        accumulator, shard = values(numel, target, seed=1), values(numel, source, seed=2)
        quotient = shard if divisor == 1.0 else shard / divisor
        expected = accumulator + quotient.to(target)
        OPS.accumulate_shard(accumulator, shard, divisor)
        assert_same_bits(accumulator, expected)


def on_threads(call: Callable[[], Any], count: int) -> None:
    """Call with a number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        call()
    finally:
        torch.set_num_threads(threads)


def strided_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Dense, transposed, permuted, sliced, expanded and empty tensors."""
    return {
        "contiguous": values(120, dtype).view(4, 5, 6),
        "transposed": values(67 * 45, dtype).view(67, 45).t(),
        "large transposed": values(300 * 257, dtype).view(300, 257).t(),
        "permuted": values(3 * 33 * 34, dtype).view(3, 33, 34).permute(2, 0, 1),
        "channels last": values(2 * 3 * 4 * 5, dtype)
        .view(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last),
        "rows of a larger one": values(40 * 50, dtype).view(40, 50)[3:17, :31],
        "every second": values(4000, dtype)[::2],
        "every second of a transposed": values(64 * 90, dtype).view(64, 90).t()[::3, ::2],
        "expanded rows": values(37, dtype).expand(41, 37),
        "expanded columns": values(41, dtype)[:, None].expand(41, 37),
        "expanded scalar": values(1, dtype)[0].expand(5, 5),
        "scalar": values(1, dtype)[0],
        "size one dimensions": values(60, dtype).view(1, 6, 1, 10).transpose(1, 3),
        "five dimensions": values(2 * 3 * 4 * 5 * 6, dtype).view(2, 3, 4, 5, 6).permute(4, 1, 3, 0, 2),
        "empty": values(0, dtype).view(0, 3),
    }


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 3.3])
def test_pack_gradients_casts_divides_and_zeroes_the_gaps(
    source: torch.dtype, target: torch.dtype, divisor: float
) -> None:
    grads = list(strided_tensors(source).values())
    gap, offsets, expected = 5, [], []
    for grad in grads:
        offsets.append(sum(part.numel() for part in expected) + gap)
        # contiguous, like the tensors that FSDP1 casts: torch's SVE kernels round others once from float64 to
        # float16
        flat = grad.reshape(-1).contiguous().to(target)
        expected += [torch.zeros(gap, dtype=target), flat if divisor == 1.0 else flat / divisor]
    expected.append(torch.zeros(3, dtype=target))
    out = torch.full((sum(part.numel() for part in expected),), math.nan, dtype=target)
    OPS.pack_gradients(out, grads, offsets, divisor)
    assert_same_bits(out, torch.cat(expected))


@pytest.mark.parametrize("seed", range(40))
def test_pack_reads_random_strides_however_threads_cut_them(seed: int) -> None:
    """The tensors' dimensions are in any memory order, some are expanded, and gaps precede, separate and
    follow elements.
    """
    draw, grads, offsets, expected = random.Random(seed), [], [], []
    for _ in range(draw.randint(1, 4)):
        ndim = draw.randint(0, 4)
        shape = [draw.randint(1, 200 if ndim < 3 else 12) for _ in range(ndim)]
        whole = values(math.prod(size + 1 for size in shape), torch.float32, seed).view(
            [size + 1 for size in shape]
        )
        grad = whole[tuple(slice(start := draw.randint(0, 1), start + size) for size in shape)]
        grad = grad.permute(draw.sample(range(grad.dim()), grad.dim()))
        grad = grad[:1].expand(draw.randint(1, 9), *grad.shape[1:]) if shape and draw.random() < 0.2 else grad
        expected.append(torch.zeros(draw.randint(0, 5)))
        offsets.append(sum(part.numel() for part in expected))
        grads.append(grad)
        expected.append(grad.reshape(-1) / 3.0)
    expected.append(torch.zeros(draw.randint(0, 5)))
    for count in (1, 2, 3):
        out = torch.full((sum(part.numel() for part in expected),), math.nan)
        on_threads(lambda out=out: OPS.pack_gradients(out, grads, offsets, 3.0), count)
        assert_same_bits(out, torch.cat(expected))


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_pack_cut_beside_the_end_of_a_tensor(behind: int, gap: int) -> None:
    first = values(60_000 + behind, torch.float32)
    second = values(60_000 - behind - gap, torch.float32, 1)
    out = torch.full((120_000,), math.nan)
    on_threads(lambda: OPS.pack_gradients(out, [first, second], [0, first.numel() + gap], 1.0), 2)
    assert_same_bits(out, torch.cat([first, torch.zeros(gap), second]))


@pytest.mark.parametrize("number", [torch.float32, torch.float64], ids=str)
# the last coefficient is next to a tie
@pytest.mark.parametrize("coefficient", [0.3, 1.0, 0.0, math.nan, 1 + 2**-11 + 2**-40])
def test_clip_multiplies_by_the_coefficient_in_the_tensors_dtype(
    coefficient: float, number: torch.dtype
) -> None:
    tensors = [values(numel, dtype, seed=numel) for numel in NUMELS for dtype in DTYPES]
    scalar = torch.tensor(coefficient, dtype=number)
    expected = [tensor * scalar.to(tensor.dtype) for tensor in tensors]
    scale(tensors, scalar)
    for actual, reference in zip(tensors, expected, strict=True):
        assert_same_bits(actual, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_norm_of_norms_equals_that_of_vector_norm(dtype: torch.dtype, p: float) -> None:
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [values(numel, dtype, numel).nan_to_num(0.0, 1.0, -1.0) for numel in (*range(35), 4097, 70_001)]
    tensors += [torch.tensor([special, 1.0, -2.0], dtype=dtype) for special in SPECIAL]
    tensors += [torch.randn(33, 35).to(dtype).t()]
    for tensor in filter(Tensor.numel, tensors):
        norm = torch.linalg.vector_norm(tensor, p, dtype=arithmetic)
        expected = torch.linalg.vector_norm(norm.reshape(1), p, dtype=arithmetic)
        assert_same_bits(_local_norm([tensor], p, arithmetic, tensor.device), expected)


def test_an_unknown_instruction_set_is_refused() -> None:
    assert _C.cpu_capabilities()[-1] == "default"
    with pytest.raises(ValueError, match='no kernels for "mmx"'):
        _C.use_cpu_capability("mmx")


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
