"""Every CPU kernel gives bitwise torch's result: all dtypes, special values, strides and instruction sets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_c import _C  # registers the operators
from fsdp_c.training.grad_clipping import _local_norm, scale

OPS = torch.ops.fsdp_c
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
# a short tail, whole blocks, and enough for several threads
NUMELS = [0, 1, 7, 1024, 1031, 70_001]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.0,
    1 / 3,
    3e38,
    65504.0,
    65519.9,
    65520.0,
    65536.0,
    1e-45,
]
SPECIAL += [
    6.1e-5,
    6.0e-8,
    2.98e-8,
    2.9803e-8,
    8.9e-8,
    1.17e-38,
    9.2e-41,
    1.00390625,
    1.01171875,
    2049.0,
    2051.0,
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


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in PAIRS if a.itemsize == 2], ids=str)
def test_cast_of_all_16_bit_numbers(source: torch.dtype, target: torch.dtype) -> None:
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    assert_same_bits(cast_divide(tensor, 1.0, target), tensor.to(target))


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


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 3.3])
def test_accumulate_rounds_quotient_cast_and_sum(
    source: torch.dtype, target: torch.dtype, divisor: float
) -> None:
    for numel in NUMELS:
        accumulator, shard = values(numel, target, seed=1), values(numel, source, seed=2)
        quotient = shard if divisor == 1.0 else shard / divisor
        expected = accumulator + quotient.to(target)
        OPS.accumulate_shard(accumulator, shard, divisor)
        assert_same_bits(accumulator, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [torch.float32, torch.float64], ids=str)
# the last coefficient is next to a tie
@pytest.mark.parametrize("coefficient", [0.3, 1.0, 0.0, math.nan, 1 + 2**-11 + 2**-40])
def test_clip_multiplies_by_the_coefficient_in_the_tensors_dtype(
    dtype: torch.dtype, coefficient: float, number: torch.dtype
) -> None:
    tensors = [values(numel, dtype, seed=numel) for numel in NUMELS]
    scalar = torch.tensor(coefficient, dtype=number)
    expected = [tensor * scalar.to(dtype) for tensor in tensors]
    scale(tensors, scalar)
    for actual, reference in zip(tensors, expected, strict=True):
        assert_same_bits(actual, reference)


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


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", strided_tensors(torch.float32))
def test_packing_reads_any_strides(name: str, source: torch.dtype, target: torch.dtype) -> None:
    tensor = strided_tensors(source)[name]
    out = torch.empty(tensor.numel(), dtype=target)
    OPS.pack_gradients(out, [tensor], [0], 1.0)
    assert_same_bits(out, tensor.reshape(-1).to(target))


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

        def packed() -> Tensor:
            out = torch.full((sum(part.numel() for part in expected),), math.nan)
            OPS.pack_gradients(out, grads, offsets, 3.0)
            return out

        (out,) = on_threads(packed, (count,))
        assert_same_bits(out, torch.cat(expected))


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_pack_cut_beside_the_end_of_a_tensor(behind: int, gap: int) -> None:
    first = values(60_000 + behind, torch.float32)
    second = values(60_000 - behind - gap, torch.float32, 1)
    out = torch.full((120_000,), math.nan)
    on_threads(lambda: OPS.pack_gradients(out, [first, second], [0, first.numel() + gap], 1.0), (2,))
    assert_same_bits(out, torch.cat([first, torch.zeros(gap), second]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_norm_of_norms_equals_that_of_vector_norm(dtype: torch.dtype, p: float) -> None:
    """Norms are of many lengths, tails and magnitudes."""
    torch.manual_seed(0)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    numels = [*range(1, 35), 63, 64, 65, 100, 1000, 1023, 1024, 1025, 2049, 4097, 40_000, 70_001]
    tensors = [
        torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype) for numel in numels
    ]
    tensors += [torch.rand(numel, dtype=torch.float64).to(dtype) for numel in numels]
    tensors += [torch.tensor(special, dtype=dtype) for special in SPECIAL]
    tensors += [torch.tensor([special, 1.0, -2.0], dtype=dtype) for special in SPECIAL]
    tensors += [values(numel, dtype, seed=numel).nan_to_num(0.0, 1.0, -1.0) for numel in numels]
    tensors += [values(100, dtype), torch.randn(33, 35).to(dtype), torch.randn(33, 35).to(dtype).t()]
    for tensor in tensors:
        norm = torch.linalg.vector_norm(tensor, p, dtype=arithmetic)
        expected = torch.linalg.vector_norm(norm.reshape(1), p, dtype=arithmetic)
        assert_same_bits(_local_norm([tensor], p, arithmetic, tensor.device), expected)


def test_clipped_tensors_of_several_dtypes_go_in_one_call() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    tensors = [
        values(1000 + seed, dtype, seed).nan_to_num(0.0, 1.0, -1.0) for seed, dtype in enumerate(dtypes)
    ]
    scaled = [tensor * torch.tensor(0.3).to(tensor.dtype) for tensor in tensors]
    scale(tensors, torch.tensor(0.3))
    for actual, reference in zip(tensors, scaled, strict=True):
        assert_same_bits(actual, reference)


def test_norm_of_an_empty_tensor_is_zero() -> None:
    device = torch.device("cpu")
    assert _local_norm([torch.empty(0)], 2.0, torch.float32, device).item() == 0.0
    assert _local_norm([torch.empty(0), torch.ones(4)], 2.0, torch.float32, device).item() == 2.0


def on_threads(call: Callable[[], Any], counts: tuple[int, ...] = (1, 2)) -> list[Any]:
    """Return the results of ``call`` with each number of threads."""
    threads = torch.get_num_threads()
    try:
        return [(torch.set_num_threads(count), call())[1] for count in counts]
    finally:
        torch.set_num_threads(threads)


NUMBERED = [1.0, 4.0, 3.3]  # no division, a division with an exact reciprocal, and one without


def everything(dtype: torch.dtype, other: torch.dtype) -> list[Tensor]:
    """Return the results of all kernels for a pair of dtypes."""
    made = []
    for numel, divisor in itertools.product([1031, 40_003], NUMBERED):
        tensor, target = values(numel, dtype), values(numel, other, seed=1)
        made.append(cast_divide(tensor, divisor, other))
        OPS.accumulate_shard(target, tensor, divisor)
        strided = torch.zeros(2500, dtype=other)
        OPS.pack_gradients(strided, [tensor[:1000].view(40, 25).t()], [7], divisor)
        made += [target, tensor, strided]
    return made


@pytest.mark.parametrize("capability", _C.cpu_capabilities())
@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_every_instruction_set_gives_the_bits_of_the_baseline(
    capability: str, dtype: torch.dtype, other: torch.dtype
) -> None:
    try:
        _C.use_cpu_capability("default")
        expected = everything(dtype, other)
        _C.use_cpu_capability(capability)
        actual = everything(dtype, other)
    finally:
        _C.use_cpu_capability(None)
    for one, reference in zip(actual, expected, strict=True):
        assert_same_bits(one, reference)


def test_an_unknown_instruction_set_is_refused() -> None:
    assert _C.cpu_capabilities()[-1] == "default"
    with pytest.raises(ValueError, match='no kernels for "mmx"'):
        _C.use_cpu_capability("mmx")
