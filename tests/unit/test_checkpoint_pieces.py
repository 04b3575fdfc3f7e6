"""Boxes of ranges, and pieces as written by torch.save."""

from __future__ import annotations

import io
import itertools
import math
import random
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp_c.checkpoint import pieces
from fsdp_c.checkpoint.contents import do_tile
from fsdp_c.checkpoint.values import RangeTensor, in_box

TENSORS = [
    torch.randn(3, 4),
    torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.randn(4, 3).t(),
    torch.tensor(3.0),
    torch.zeros(0, 3),
    torch.ones(1),
    torch.ones(5, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.arange(4).to(torch.float8_e4m3fn),
    torch.arange(4).to(torch.uint16),
    torch.randn(3, dtype=torch.complex64),
    torch.arange(3),
]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype} {list(t.shape)}")
def test_a_piece_is_what_torch_load_reads_and_a_sound_zip_archive(tensor: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "pieces"
    with path.open("wb") as file:
        writer = pieces.FileWriter(file)
        for _ in range(2):  # the second pass begins at any offset
            start, before, crc32 = writer.write_tensor(tensor)
        writer.finish()
    blob = path.read_bytes()[start : writer.size]
    assert (start + before) % 64 == 0
    assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bits(loaded) == bits(tensor)
    with path.open("rb") as file:
        data = memoryview(bytearray(tensor.nbytes))
        assert pieces.read_data(file, start + before, crc32, data)
        assert bytes(data) == bits(tensor) if tensor.is_contiguous() else data
        assert not pieces.read_data(file, start + before, crc32 ^ 1, data)


@pytest.mark.parametrize("limit", [pieces.MAX_NBYTES, 8, 20])
@pytest.mark.parametrize("order", [None, (0, 2, 3, 1), (3, 1, 0, 2)])
def test_boxes_hold_each_element_of_a_range_once_and_in_its_memory(order, limit: int) -> None:
    rng = random.Random(0)
    for _ in range(60):
        shape = tuple(rng.randint(1, 4) for _ in range(4 if order else rng.randint(0, 4)))
        numel = math.prod(shape)
        start, end = sorted((rng.randint(0, numel), rng.randint(0, numel)))
        local = torch.arange(start, end, dtype=torch.float32)
        outer = order or range(len(shape))
        positions = torch.arange(numel).view([shape[dim] for dim in outer])
        positions = positions.permute([outer.index(dim) for dim in range(len(shape))])
        seen = []
        with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", limit):
            boxes = RangeTensor(local, shape, start, order).boxes.items()
        for offsets, box in boxes:
            assert box.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert pieces.is_dense(box) and box.nbytes <= max(limit, 4)
            assert torch.equal(pieces.narrow_box(positions, offsets, box.shape).float(), box)
            seen += box.flatten().tolist()
        assert sorted(seen) == list(range(start, end))
        if limit == pieces.MAX_NBYTES:
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_whole_tensor_is_divided_in_its_own_memory_order() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", 100):
        boxes = in_box(image, image.shape).boxes
    assert len(boxes) > 4
    for offsets, box in boxes.items():  # a load writes into the boxes
        box.fill_(1 + offsets[2])
    assert all((image[:, :, row] == 1 + row).all() for row in range(4))


def test_a_range_tensor_says_what_it_is_for_when_computed_with() -> None:
    value = RangeTensor(torch.ones(3), (2, 3), 1)
    assert "range=[1, 4)" in repr(value)
    with pytest.raises(NotImplementedError, match="for tensors to compute with use state_dict"):
        value + 1
    copy = value.clone()
    value.local.zero_()
    assert copy.local.tolist() == [1, 1, 1] and copy.start == 1


# ----------------------------------------------------------------- parts of one tensor


def random_boxes(shape: tuple[int, ...], rng: random.Random) -> list[Any]:
    """Return boxes inside the tensor with as many elements in all: a tiling, in part moved."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(12)):
        at, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offsets, sizes = boxes[at]
        cut = rng.randrange(sizes[dim] + 1)
        first = (*sizes[:dim], cut, *sizes[dim + 1 :])
        second = (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])
        boxes[at : at + 1] = [
            (offsets, first),
            ((*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :]), second),
        ]
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(boxes))
        sizes = boxes[at][1]
        boxes[at] = (tuple(rng.randrange(w - s + 1) for w, s in zip(shape, sizes, strict=True)), sizes)
    rng.shuffle(boxes)
    return boxes


def test_parts_tile_a_tensor_where_each_element_is_in_one() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(3000):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        boxes = random_boxes(shape, rng)
        counted = torch.zeros(shape)
        for offsets, sizes in boxes:
            counted[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert do_tile(boxes, shape) == bool((counted == 1).all()), (shape, boxes)
        seen.add((len(boxes) > 4, bool((counted == 1).all())))
    assert len(seen) == 4
    assert do_tile([], (0, 3)) and do_tile([((), ())], ()) and do_tile([((0, 0), (0, 3))], (0, 3))


@pytest.mark.timeout(300)
def test_many_parts_are_looked_at_in_a_time_in_proportion() -> None:
    columns = [((0, at), (2, 1)) for at in range(100_000)]
    assert do_tile(columns, (2, 100_000))
    assert not do_tile([*columns[1:], columns[1]], (2, 100_000))
    halves = [(at, (1,) * 17) for at in itertools.product((0, 1), repeat=17)]
    with pytest.raises(ValueError, match="131072 parts that are divided in 17 dimensions"):
        do_tile(halves, (2,) * 17)
