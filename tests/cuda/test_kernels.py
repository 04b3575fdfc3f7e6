"""fsdp_c's operators on a GPU, compared bit for bit with torch's own operations there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fsdp_c.training.grad_clipping import _local_norm, scale

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 7, 8, 1023, 65_537, 1 << 20]
ops = torch.ops.fsdp_c

both_dtypes = pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(numel, device="cuda", generator=generator).to(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(
        actual.view(torch.uint8), expected.view(torch.uint8)
    )


def cast_divide(tensor: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)
    ops.pack_gradients(out, [tensor], [0], divisor)
    return out


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Turn every wait of the host for the device into an error in the body."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_dtypes
@each_dtype
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 2.3])
def test_cast_divide_is_torchs_to_and_div(
    dtype: torch.dtype, input_dtype: torch.dtype, divisor: float
) -> None:
    for numel in NUMELS:
        source = numbers(numel + 1, input_dtype)[1:]  # unaligned to 16 bytes
        expected = source.to(dtype)
        expected = expected.clone().div_(divisor) if divisor != 1.0 else expected
        assert same(cast_divide(source, divisor, dtype), expected.contiguous()), numel


@both_dtypes
@each_dtype
def test_accumulate_is_torchs_div_and_add(dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    for numel in NUMELS:
        accumulator, shard = numbers(numel, dtype), numbers(numel, input_dtype, 1)
        expected = accumulator + (shard / 2.3).to(dtype)
        ops.accumulate_shard(accumulator, shard, 2.3)
        assert same(accumulator, expected), numel


@both_dtypes
@each_dtype
def test_pack_gradients_writes_every_gradient_and_zeros_between(
    dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    grads = [
        numbers(35, input_dtype).view(5, 7),
        numbers(1000, input_dtype).view(50, 20).t(),
        numbers(3, input_dtype),
    ]
    grads += [
        numbers(60, input_dtype).view(3, 4, 5).permute(1, 0, 2),
        numbers(150_000, input_dtype).view(500, 300).t(),
    ]
    offsets = [8, 48, 1100, 1105, 1200]
    out = numbers(160_000, dtype, 3)
    ops.pack_gradients(out, grads, offsets, 2.0)
    expected = torch.zeros(160_000, dtype=dtype, device="cuda")
    for grad, offset in zip(grads, offsets, strict=True):
        expected[offset : offset + grad.numel()] = grad.reshape(-1).to(dtype).div_(2.0)
    assert same(out, expected)


def test_packing_of_hundreds_of_tensors_is_torchs_cat() -> None:
    tensors = [numbers(numel % 97, torch.bfloat16, numel) for numel in range(500)]
    *offsets, total = itertools.accumulate((tensor.numel() for tensor in tensors), initial=0)
    flat = torch.empty(total, device="cuda")
    ops.pack_gradients(flat, tensors, offsets, 1.0)
    assert same(flat, torch.cat([tensor.float() for tensor in tensors]))


@each_dtype
def test_clip_is_torchs_mul_and_does_not_wait_for_the_coefficient(dtype: torch.dtype) -> None:
    tensors = [numbers(numel, dtype, numel) for numel in NUMELS]
    coefficient = torch.tensor(0.3183, device="cuda")
    expected = [tensor * coefficient.to(dtype) for tensor in tensors]
    with without_waiting():
        scale(tensors, coefficient)
    assert all(map(same, tensors, expected))


@each_dtype
def test_norm_of_norms_is_that_of_vector_norm(dtype: torch.dtype) -> None:
    tensors = [numbers(numel, dtype, numel) for numel in NUMELS[1:]]
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    for p in (1.0, 2.0, 3.0, float("inf")):
        norms = torch.stack([torch.linalg.vector_norm(tensor, p, dtype=arithmetic) for tensor in tensors])
        expected = torch.linalg.vector_norm(norms, p, dtype=arithmetic)
        norm = _local_norm(tensors, p, arithmetic, tensors[0].device)
        assert same(norm.reshape(1), expected.reshape(1))


def test_a_launch_goes_to_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    source, event = numbers(1 << 24, torch.float32), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # the first call loads the kernel and allocates memory, and both may wait
        cast_divide(source, 1.0, torch.bfloat16)
        torch.cuda._sleep(100_000_000)
        cast = cast_divide(source, 1.0, torch.bfloat16)
        event.record()
    assert not event.query()
    stream.synchronize()
    assert same(cast, source.to(torch.bfloat16))


def test_a_tensor_on_the_cpu_among_others_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must be on the device"):
        ops.accumulate_shard(numbers(3, torch.float32), torch.ones(3), 1.0)


PAST = 2**31
needs_memory = pytest.mark.skipif(
    "SIMULATED_GPU" in os.environ or "FAKE_CUDA" in os.environ or not torch.cuda.is_available(),
    reason="has elements of a real device alone",
)


@pytest.mark.parametrize("numel", [4099 * 3, pytest.param(PAST + 4099, marks=needs_memory)])
def test_places_past_32_bits_are_reached(numel: int) -> None:
    """Check elements at both ends, and around the largest 32-bit number if the tensor is that large, for each
    launcher.
    """
    places = sorted({0, numel - 1, *(place for place in (PAST - 1, PAST) if place < numel)})
    values = torch.arange(3.0, 3.0 + len(places), device="cuda")
    source = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    source[places] = values.bfloat16()
    assert torch.equal(cast_divide(source, 2.0, torch.float32)[places], values / 2)
    total = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    ops.accumulate_shard(total, source, 4.0)
    assert torch.equal(total[places].float(), values / 4)
    ops.pack_gradients(
        packed := torch.ones(numel + 24, dtype=torch.bfloat16, device="cuda"), [source], [16], 2.0
    )
    assert torch.equal(packed[[16 + place for place in places]].float(), values / 2)
    assert not packed[:16].any() and not packed[16 + numel :].any()
    del total, packed
    rows = source[: numel // 3 * 3].view(3, -1).t()
    ops.pack_gradients(
        packed := torch.ones(rows.numel(), dtype=torch.bfloat16, device="cuda"), [rows], [0], 1.0
    )
    assert torch.equal(packed[:: len(packed) - 1], rows.reshape(-1)[:: len(packed) - 1])
    assert packed.count_nonzero() == rows.count_nonzero()
