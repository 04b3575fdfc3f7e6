"""torch's caching allocator on CUDA, for one pool and one stream: which blocks a step's gathers are given.

What is given is a whole block: the smallest free one that is large enough. What it has beyond the size asked
for becomes a block of its own, unless that would be 1 MiB or less of a large one. Free neighbours of one
segment join. This is how the allocator behaves with the settings that it has by itself
(PYTORCH_CUDA_ALLOC_CONF may change them), and without running out of memory. Of free blocks of one size any
may be taken; here it is the one in the oldest segment.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

UNIT = 512
SMALL = 2**20  # at most this much is asked from segments for small blocks
SMALL_SEGMENT = 2 * 2**20
MEDIUM = 10 * 2**20  # less than this comes from segments of one size
MEDIUM_SEGMENT = 20 * 2**20
SEGMENT_UNIT = 2 * 2**20


class Block(NamedTuple):
    """Memory, sorted as the allocator looks for it."""

    nbytes: int
    address: int
    is_small: bool


class Pool:
    """Memory that is taken from the driver in segments, and stays."""

    def __init__(self) -> None:
        self._free: tuple[list[Block], list[Block]] = ([], [])  # of large and of small segments, sorted
        self._by_start: dict[int, Block] = {}  # the free ones
        self._by_end: dict[int, Block] = {}
        self._next_address = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``."""
        nbytes = rounded(nbytes)
        is_small = nbytes <= SMALL
        place = bisect.bisect_left(self._free[is_small], Block(nbytes, -1, is_small))
        if place < len(self._free[is_small]):
            block = self._free[is_small][place]
            self._remove(block)
        else:
            block = self._new_segment(nbytes)
        rest = block.nbytes - nbytes
        if rest >= UNIT if is_small else rest > SMALL:
            self._add(Block(rest, block.address + nbytes, is_small))
            block = block._replace(nbytes=nbytes)
        return block

    def give_back(self, block: Block) -> None:
        """It joins what is free beside it."""
        if before := self._by_end.get(block.address):
            self._remove(before)
            block = block._replace(nbytes=before.nbytes + block.nbytes, address=before.address)
        if after := self._by_start.get(block.address + block.nbytes):
            self._remove(after)
            block = block._replace(nbytes=block.nbytes + after.nbytes)
        self._add(block)

    def _new_segment(self, nbytes: int) -> Block:
        is_small = nbytes <= SMALL
        size = (
            SMALL_SEGMENT
            if is_small
            else MEDIUM_SEGMENT
            if nbytes < MEDIUM
            else rounded(nbytes, SEGMENT_UNIT)
        )
        block = Block(size, self._next_address, is_small)
        self._next_address += size + UNIT  # so that segments are no neighbours
        return block

    def _add(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], block)
        self._by_start[block.address] = self._by_end[block.address + block.nbytes] = block

    def _remove(self, block: Block) -> None:
        blocks = self._free[block.is_small]
        del blocks[bisect.bisect_left(blocks, block)]
        del self._by_start[block.address], self._by_end[block.address + block.nbytes]


def rounded(nbytes: int, unit: int = UNIT) -> int:
    return (nbytes + unit - 1) // unit * unit
