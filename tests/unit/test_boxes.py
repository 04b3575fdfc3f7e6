"""Splitting a flat range of an n-D tensor into boxes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fsdp_c import _C


def flat_indices(shape, box):
    index = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        index = index.narrow(dim, offset, size)
    return index.flatten().tolist()


@pytest.mark.parametrize(
    "shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (5, 1), (2, 2, 2, 3), (3, 1, 4), (1, 1, 1)]
)
def test_boxes_hold_each_element_of_every_range_in_order(shape):
    numel = math.prod(shape)
    most = max(2 * len(shape) - 1, 1)
    for start, end in itertools.combinations_with_replacement(range(numel + 1), 2):
        boxes = _C.flat_range_boxes(shape, start, end)
        assert len(boxes) <= most
        assert [index for box in boxes for index in flat_indices(shape, box)] == list(range(start, end))


def test_empty_range_has_no_boxes():
    assert _C.flat_range_boxes((3, 0, 2), 0, 0) == ()
    assert _C.flat_range_boxes((3, 2), 4, 4) == ()


@pytest.mark.parametrize("arguments", [((2, 3), -1, 2), ((2, 3), 3, 2), ((2, 3), 0, 7), ((), 0, 2)])
def test_range_outside_the_tensor_is_refused(arguments):
    with pytest.raises(ValueError, match="is not a range of"):
        _C.flat_range_boxes(*arguments)


@pytest.mark.parametrize("shape", [(-1, 2), (2**40, 2**40), (1,) * 65])
def test_impossible_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        _C.flat_range_boxes(shape, 0, 0)
