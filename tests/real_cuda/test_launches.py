"""Each launcher as nvcc made it: arguments, grids, blocks and shared memory, past 2^31 elements as well.

Memory is reserved and hardly touched: launches do not run, but for the blocks whose elements are looked at.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.real_cuda import launches
from tests.real_cuda.launches import (
    I64,
    KERNELS,
    Launch,
    array,
    at,
    dtype,
    launchers,
    source,
    watched,
)

PAST = 2**31
BIG = PAST + 4099
MOST_32 = 2**31 - 1
MOST_BLOCKS = 132 * 32
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NONE = ctypes.c_double(1.0)  # the divisor of what is not divided


@pytest.fixture(autouse=True)
def reserved() -> Iterator[None]:
    """What a test has reserved, some twenty GiB, is given back."""
    torch.cuda.set_device(0)
    yield
    launches.kept.clear()
    torch.cuda.empty_cache()


def reserve(dtype: torch.dtype, numel: int = BIG) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="cuda")


def put(tensor: Tensor, *at: int) -> None:
    """Numbers that every dtype has, at these places."""
    for value, index in enumerate(at):
        tensor[index] = value + 3


def values(tensor: Tensor, *at: int) -> list[float]:
    return [tensor[index].item() for index in at]


def expect(launch: Launch, kernel: str, chunks: int, operation: bytes = b"") -> None:
    """A block per chunk, up to 32 on each of 132 processors; the bytes the second argument begins with."""
    assert launch.kernel == kernel
    assert launch.grid == (min(chunks, MOST_BLOCKS), 1, 1)
    assert launch.block == (256, 1, 1)
    assert launch.shared == 0
    assert launch.stream == torch.cuda.current_stream().cuda_stream
    assert launch.device == 0
    assert b"".join(launch.rest).startswith(operation)


def items(launch: Launch, *fields: str) -> list[tuple[int, ...]]:
    """Of its table, as far as it is filled."""
    table = launch.table
    return [tuple(getattr(item, name) or 0 for name in fields) for item in table.items[: table.count]]


Segment = tuple[int, int, int, int]


def expect_segments(launch: Launch, chunk: int, *expected: Segment, operation: bytes = b"") -> None:
    """Of an elementwise launch: output, input, elements and zeros of each, all at vectors of the output."""
    firsts, chunks = [], 0
    for *_, numel, zeros in expected:
        firsts.append(chunks)
        chunks += -(-(numel + zeros) // chunk)
    found = items(launch, "output", "input", "numel", "zeros", "first_chunk")
    assert found == [(*each, first) for each, first in zip(expected, firsts, strict=True)]
    assert launch.table.num_chunks == chunks
    expect(launch, "elementwise", chunks, operation)


def run_chunks(launch: Launch, *chunks: int) -> None:
    for block in sorted({chunk % launch.grid[0] for chunk in chunks}):
        launch.run_block(block)


def quotient(divisor: float, form: str = "<f?") -> bytes:
    """The operation of a division: its reciprocal, and whether there is one."""
    return struct.pack(form, 1 / divisor, divisor != 1.0)


# ---- one test per launcher


def test_cast_divide_launches_a_block_per_chunk() -> None:
    output, input = reserve(BF16), reserve(F32)
    places = 0, PAST - 1, PAST, BIG - 1
    put(input, *places)
    of_both = at(output), dtype(output), at(input), dtype(input)
    with watched() as seen:
        launchers()["cast_divide"](*of_both, I64(BIG), ctypes.c_double(2.0))
    (launch,) = seen
    segment = output.data_ptr(), input.data_ptr(), BIG, 0
    expect_segments(launch, 4096, segment, operation=quotient(2.0))
    run_chunks(launch, *(place // 4096 for place in places))
    assert values(output, *places) == [1.5, 2.0, 2.5, 3.0]


def test_accumulate_launches_a_block_per_chunk() -> None:
    total, input = reserve(F64), reserve(BF16)
    places = 0, PAST - 1, PAST, BIG - 1
    put(input, *places)
    put(total, *places)
    of_both = at(total), dtype(total), at(input), dtype(input)
    with watched() as seen:
        launchers()["accumulate"](*of_both, I64(BIG), ctypes.c_double(4.0))
    (launch,) = seen
    expect_segments(launch, 2048, (total.data_ptr(), input.data_ptr(), BIG, 0), operation=quotient(4.0))
    run_chunks(launch, *(place // 2048 for place in places))
    assert values(total, *places) == [3.75, 5.0, 6.25, 7.5]


def test_pack_launches_flat_sources_together_with_all_zeros() -> None:
    behind = BIG + 2**20 + 13  # at a vector's begin
    first, second, small = reserve(F32), reserve(BF16, 8000), reserve(F32, 24)
    output = reserve(F32, behind + 8000 + 24 + 100)
    put(first, 0, BIG - 1)
    places = (first, 16), (second, behind), (small, behind + 8000)
    with watched() as seen:
        packed = array(launches.PackSource, *(source(*place) for place in places))
        numel, divisor = I64(output.numel()), ctypes.c_double(8.0)
        launchers()["pack"](at(output), dtype(output), numel, packed, I64(3), divisor)
    of_floats, of_halves = seen
    begin = output.data_ptr()
    expect_segments(
        of_floats,
        4096,
        (begin, 0, 0, 16),
        (begin + 4 * 16, first.data_ptr(), BIG, behind - BIG - 16),
        (begin + 4 * (behind + 8000), small.data_ptr(), 24, 100),
        operation=quotient(8.0),
    )
    of_second = begin + 4 * behind, second.data_ptr(), 8000, 0
    expect_segments(of_halves, 4096, of_second, operation=quotient(8.0))
    output[16 + BIG] = 5.0  # becomes zero
    run_chunks(of_floats, 1, 1 + (BIG - 1) // 4096)
    assert values(output, 16, 16 + BIG - 1, 16 + BIG) == [0.375, 0.5, 0.0]


def test_pack_launches_a_transposed_source_by_tiles() -> None:
    """As many rows at a time as have places of 32 bits, each tile 32 by 32."""
    rows, columns = 32_768, 70_000
    input, output = reserve(BF16, rows * columns).view(columns, rows).t(), reserve(F32, rows * columns)
    input[30_678, 0], input[-1, -1] = 3.0, 4.0
    at_once = MOST_32 // columns
    with watched() as seen:
        packed = array(launches.PackSource, source(input, 0))
        launchers()["pack"](at(output), dtype(output), I64(output.numel()), packed, I64(1), NONE)
    assert [launch.kernel for launch in seen] == ["transposed"] * 2
    for launch, before, taken in ((seen[0], 0, at_once), (seen[1], at_once, rows - at_once)):
        tiles, table = -(-taken // 32) * -(-columns // 32), launch.table
        expect(launch, "transposed", tiles, quotient(1.0))
        assert (table.num_tiles, table.numel, table.ndim, table.rows) == (tiles, taken * columns, 2, 0)
        assert (table.sizes[:2], table.strides[:2]) == ([taken, columns], [1, rows])
        assert table.input == input.data_ptr() + 2 * before
        assert table.output == output.data_ptr() + 4 * before * columns
    run_chunks(seen[1], 0, seen[1].table.num_tiles - 1)
    assert values(output, at_once * columns, rows * columns - 1) == [3.0, 4.0]


def test_pack_add_launches_a_strided_source_in_parts_of_32_bits() -> None:
    """Rows that are longer than that go one by one; whatever is flat goes as with a pack, without zeros."""
    step = 2 * BIG + 16
    memory, flat = reserve(BF16, 2 * step), reserve(BF16, 24)
    input, output = memory.as_strided((2, BIG), (step, 2)), reserve(BF16, 2 * BIG + 2 + 24)
    memory[step + 2 * (BIG - 1)], output[2 * BIG - 1] = 3.0, 4.0
    with watched() as seen:
        packed = array(launches.PackSource, source(input, 0), source(flat, 2 * BIG + 2))
        launchers()["pack_add"](at(output), dtype(output), packed, I64(2))
    expect_segments(seen[0], 8192, (output.data_ptr() + 2 * (2 * BIG + 2), flat.data_ptr(), 24, 0))
    assert len(seen) == 5
    of_a_row = (0, MOST_32), (MOST_32, BIG - MOST_32)
    parts = [(row, begin, numel) for row in (0, 1) for begin, numel in of_a_row]
    for launch, (row, begin, numel) in zip(seen[1:], parts, strict=True):
        expect(launch, "strided", -(-numel // 256))
        table = launch.table
        assert (table.numel, table.rows, table.ndim) == (numel, -1, 1)
        assert (table.sizes[0], table.strides[0]) == (numel, 2)
        assert table.input == memory.data_ptr() + 2 * (row * step + 2 * begin)
        assert table.output == output.data_ptr() + 2 * (row * BIG + begin)
    run_chunks(seen[4], (BIG - MOST_32 - 1) // 256)
    assert values(output, 2 * BIG - 1) == [7.0]


# ---- whether all are met, and a violation is found


def test_no_launcher_and_no_kernel_is_left_out() -> None:
    for name in launches.names():
        assert any(test.startswith(f"test_{name}_launch") for test in globals()), name
    text = "".join(path.read_text() for pattern in ("*.cu", "cuda_*.h") for path in KERNELS.glob(pattern))
    launched = set(re.findall(r"\bENQUEUE(?:_WITH_BARRIERS)?\(\(?(\w+)[,<]", text)) - {"kernel"}
    assert launched == set(launches.TABLES)


class Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


@pytest.mark.parametrize(
    ("grid", "block", "shared"), [(0, 256, 0), (2**31, 256, 0), (1, 0, 0), (1, 2048, 0), (1, 256, 49_153)]
)
def test_a_launch_that_no_device_takes_is_refused(grid: int, block: int, shared: int) -> None:
    launch = launches.runtime().cudaLaunchKernel
    launch.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    said = launch(None, Dim3(grid, 1, 1), Dim3(block, 1, 1), None, shared, None)
    assert said == launches.runtime().cudaGetLastError() == 9  # an invalid configuration
