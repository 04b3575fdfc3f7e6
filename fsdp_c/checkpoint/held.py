"""What a rank holds of a tensor, in a few numbers: the boxes that it writes follow from them.

[Note: Parts by arithmetic]
A unit's shards cut equal layers at equal places. So neither plans nor their results name each box: what a
rank holds of a tensor is ``Held``, tensors of which a rank holds the same stand in one list of keys, and a
box is known by its number. The boxes and their sizes are computed wherever they are needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fsdp_c import _C
from fsdp_c.checkpoint import pieces
from fsdp_c.state.sharded_values import strides_in

Offsets = tuple[int, ...]
Order = tuple[int, ...] | None  # of dimensions in memory, from the outermost; None for a contiguous tensor


class HeldBox(NamedTuple):
    """A box of a tensor, and how it lies in memory."""

    offsets: Offsets
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None  # None for a contiguous one

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class Held(NamedTuple):
    """The elements [start, start + numel), in memory order, of a box of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: Order
    offsets: Offsets
    sizes: tuple[int, ...]
    start: int
    numel: int
    is_one_piece: bool  # however large it is

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def boxes(self) -> Sequence[HeldBox]:
        """In the order in which they lie in memory."""
        return boxes_of_pieces(self, pieces.MAX_NBYTES)


@functools.lru_cache(maxsize=1024)
def boxes_of_pieces(held: Held, max_nbytes: int) -> Sequence[HeldBox]:
    """The boxes where no piece is larger than ``max_nbytes``."""
    found = []
    if held.is_one_piece or not math.prod(held.sizes):
        parts: Iterator[tuple[Offsets, tuple[int, ...]]] = iter([((0,) * len(held.sizes), held.sizes)])
    else:
        parts = range_boxes(
            held.sizes, held.start, held.start + held.numel, held.order, max_nbytes // held.dtype.itemsize
        )
    for offsets, sizes in parts:
        at = tuple(map(int.__add__, offsets, held.offsets))
        found.append(HeldBox(at, sizes, _strides(sizes, held.order)))
    return found


def range_boxes(
    shape: Sequence[int], start: int, end: int, order: Order, step: int
) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
    """Offsets and sizes of the boxes of a range, in memory order; none of more than ``step`` elements."""
    outer = list(shape) if order is None else [shape[dim] for dim in order]
    for first, last in _steps(start, end, step):
        for offsets, sizes in _C.flat_range_boxes(outer, first, last):
            yield (offsets, sizes) if order is None else (_natural(offsets, order), _natural(sizes, order))


def _steps(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut at multiples of ``step``, so that all holders of the tensor cut at the same places."""
    while start < end:
        following = min(end, (start // step + 1) * step)
        yield start, following
        start = following


def _natural(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Reorder from the order in memory to the order of the dimensions."""
    return tuple(value for _, value in sorted(zip(order, values, strict=True)))


def _strides(sizes: tuple[int, ...], order: Order) -> tuple[int, ...] | None:
    strides = strides_in(sizes, order)
    each = zip(sizes, strides, strides_in(sizes, None), strict=True)
    return strides if any(size != 1 and own != natural for size, own, natural in each) else None
