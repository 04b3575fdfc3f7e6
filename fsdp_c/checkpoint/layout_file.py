"""``fsdp_c.layout``: the contents of ``.metadata`` in a form from which a load reads only the required part.

[Note: The layout of a checkpoint]
``.metadata`` has an object for each box of each tensor, and DCP's readers create them all. The layout has a
header (JSON) with the keys and, per group of equally divided tensors, shape, dtype, boxes, the starts of the
ranges in which each box was written, and the number of preceding pieces. One record of 24 bytes per piece
follows, ordered by range first, so that the records that a rank reads for all layers are adjacent. The file
is not mapped, because truncation during a read would kill the process. ``.metadata`` has no checksums of
pieces: it serves torch.

The footer of ``.metadata`` has a checksum of the whole layout, and of ``.metadata``: before a load one rank
verifies both. Damage to the parts that each rank reads is detected without it: the header has a checksum, and
records point to data with one. Sizes in the file are validated, because it may be malicious.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_c.checkpoint import pieces
from fsdp_c.checkpoint.contents import (
    Box,
    BytesEntry,
    Checkpoint,
    Chunk,
    Entry,
    TensorEntry,
    check_boxes,
    check_shape,
    checked_paths,
    dtype_named,
    ints,
    overlap,
)
from fsdp_c.checkpoint.folder import (
    LAYOUT,
    METADATA,
    CheckpointError,
    Footer,
    convert_errors,
    file_of,
    require,
    size_and_crc32,
)
from fsdp_c.checkpoint.pieces import TAIL_NBYTES
from fsdp_c.checkpoint.planning import RECORD, Group, GroupBox, Held, HeldBox, boxes_of_pieces, key_of

MAGIC = b"fsdp_c.layout 1\n"
_HEAD = struct.Struct("<16sQI4x")  # length and checksum of the header, followed by the records
_BLOCK = 1024  # number of records read at once


def layout_content(groups: list[Group], places: dict[str, tuple[Group, int]]) -> Iterator[bytes]:
    """Yield the parts of the file. ``places``: see ``places_of``."""
    paths = [group.paths[slot] for group, slot in places.values()]
    numbers = {path: number for number, path in enumerate(paths)}
    described = []
    for group in groups:
        one: dict[str, Any] = {"keys": [numbers[path] for path in group.paths], "boxes": None}
        if group.boxes:
            held = group.boxes[0].held
            boxes = [*map(_box_content, group.boxes)]
            one |= {"dtype": str(held.dtype).removeprefix("torch."), "shape": held.shape, "boxes": boxes}
        described.append(one)
    text = json.dumps({"piece_nbytes": pieces.MAX_NBYTES, "paths": paths, "groups": described}).encode()
    yield _HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text
    yield from (group.records for group in groups)


def _box_content(box: GroupBox) -> dict[str, Any]:
    counts = [len(held.boxes()) for held in box.ranges()]
    held = {name: getattr(box.held, name) for name in ("order", "offsets", "sizes")}
    return held | {"starts": box.starts, "pieces": [*itertools.accumulate(counts, initial=0)]}


# ----------------------------------------------------------------- reading


def read_layout(folder: Path, footer: Footer, compare: bool) -> Checkpoint:
    """Read the layout in the data folder. ``compare``: verify its checksum."""
    checkpoint, path = Checkpoint(folder, footer, footer.identity), folder / footer.data / LAYOUT
    if compare and size_and_crc32(path) != footer.files.get(LAYOUT):
        raise CheckpointError(
            f"{path}: damaged: its checksum is not the one in {METADATA}. Copy the file again, or read the checkpoint "
            "with torch.distributed.checkpoint.load, which does not need it"
        )
    with _parse_layout(path):
        _Layout(path, checkpoint, footer.data)
    return checkpoint


def _parse_layout(path: Path) -> AbstractContextManager[None]:
    return convert_errors(f"{path}: damaged, or of another version of fsdp_c")


class _Layout:
    def __init__(self, path: Path, checkpoint: Checkpoint, data: str) -> None:
        """Create the entries and paths of ``checkpoint``, which keeps the file open. ``data``: name of its folder."""
        self.path, self.checkpoint, self.data = path, checkpoint, data
        self.file = checkpoint.held[f"{data}/{LAYOUT}"] = path.open("rb")
        size = os.fstat(self.file.fileno()).st_size
        self.blocks: dict[int, bytes] = {}
        self.records_at = 0  # number of the next record
        magic, nbytes, crc32 = _HEAD.unpack(self._read(0, _HEAD.size))
        self.begin = _HEAD.size + nbytes
        require(magic == MAGIC and self.begin <= size, "it is truncated, or not a layout")
        self.records = (size - self.begin) // RECORD.size
        text = self._read(_HEAD.size, nbytes)
        require(zlib.crc32(text) == crc32, "its checksum does not match")
        header = json.loads(text)
        self.piece_nbytes = header["piece_nbytes"]
        paths = {key_of(path): tuple(path) for path in header["paths"]}
        keys, entries = [*paths], dict[str, Entry]()
        for group in header["groups"]:
            entries.update(self._entries(group, [keys[number] for number in group["keys"]]))
        checkpoint.entries = {key: entries[key] for key in keys}
        checkpoint.paths = checked_paths(paths, checkpoint.entries)

    def _entries(self, group: Any, keys: list[str]) -> Iterator[tuple[str, Entry]]:
        if group["boxes"] is None:
            at = self._take(len(keys))
            for slot, key in enumerate(keys):
                start, nbytes, crc32, rank = self.record(at + slot)
                yield key, BytesEntry(self._file(key, rank, start + nbytes), start, nbytes, crc32)
            return
        shape, dtype = check_shape(group["shape"], keys[0]), dtype_named("torch", group["dtype"])
        if dtype is None:
            raise ValueError(f"{keys[0]} has no dtype")
        stored = [self._box(box, dtype, shape, keys) for box in group["boxes"]]
        boxes = [(each.held.offsets, each.held.sizes) for each in stored]
        check_boxes(keys[0], shape, dtype, boxes, self.checkpoint)
        for slot, key in enumerate(keys):
            yield key, TensorEntry(shape, dtype, functools.partial(self._find, key, slot, len(keys), stored))

    def _box(self, box: Any, dtype: torch.dtype, shape: tuple[int, ...], keys: list[str]) -> _StoredBox:
        offsets, sizes = ints(box["offsets"], keys[0]), check_shape(box["sizes"], keys[0])
        order = None if box["order"] is None else ints(box["order"], keys[0])
        # strides for writes to memory are computed from it
        require(
            order is None or sorted(order) == [*range(len(sizes))],
            f"the order of dimensions of {keys[0]} is invalid",
        )
        held = Held(dtype, shape, order, offsets, sizes, 0, math.prod(sizes))
        starts, before = (ints(box[name], keys[0]) for name in ("starts", "pieces"))
        require(len(before) == len(starts) + 1, f"the ranges of {keys[0]} are incomplete")
        return _StoredBox(held, starts, before, self._take(before[-1] * len(keys)), self.piece_nbytes)

    def _take(self, count: int) -> int:
        """Reserve ``count`` records. Return the number of the first one."""
        self.records_at += count
        require(self.records_at <= self.records, "its records are incomplete")
        return self.records_at - count

    def record(self, number: int) -> tuple[int, int, int, int]:
        block, at = divmod(number, _BLOCK)
        if block not in self.blocks:
            count = min(_BLOCK, self.records - block * _BLOCK)
            self.blocks[block] = self._read(self.begin + block * _BLOCK * RECORD.size, count * RECORD.size)
        return RECORD.unpack_from(self.blocks[block], at * RECORD.size)

    def _read(self, start: int, nbytes: int) -> bytes:
        content = os.pread(self.file.fileno(), nbytes, start)
        require(len(content) == nbytes, "it is torn")
        return content

    def _file(self, key: str, rank: int, end: int) -> str:
        """Return a rank's file, in which data of ``key`` ends at ``end``."""
        name = f"{self.data}/{file_of(rank)}"
        self.checkpoint.check_end(name, end, key)
        return name

    def _find(
        self, key: str, slot: int, keys: int, stored: list[_StoredBox], box: Box | None
    ) -> Iterator[Chunk]:
        """Implement ``TensorEntry.find`` for key number ``slot`` of a group of ``keys`` equally divided tensors."""
        with _parse_layout(self.path):
            for each in stored:
                for number in each.ranges(box):
                    parts = each.parts(number)
                    first = each.at + each.before[number] * keys + slot * len(parts)
                    for nth, part in enumerate(parts):
                        if box is None or overlap(box, part[:2]):
                            yield self._chunk(key, first + nth, part, each.held)

    def _chunk(self, key: str, number: int, part: HeldBox, held: Held) -> Chunk:
        start, before, crc32, rank = self.record(number)
        start, nbytes = start + before, part.numel * held.dtype.itemsize
        file = self._file(key, rank, start + nbytes + TAIL_NBYTES)
        return Chunk(part.offsets, part.sizes, file, start, nbytes, crc32, part.strides)


class _StoredBox(NamedTuple):
    """A box of the tensors of a group, and its ranges in files."""

    held: Held  # the whole box
    starts: tuple[int, ...]  # starts of the ranges, each of which ends at the next
    before: tuple[int, ...]  # number of pieces before each range, and in total
    at: int  # its first record
    piece_nbytes: int

    def ranges(self, box: Box | None) -> Iterable[int]:
        """Return the numbers of the ranges that may intersect ``box``; all for None."""
        if box is None:
            return range(len(self.starts))
        offsets, sizes = box
        first = last = 0
        step = 1
        for dim in reversed(range(len(self.held.sizes)) if self.held.order is None else self.held.order):
            begin = max(offsets[dim] - self.held.offsets[dim], 0)
            end = min(offsets[dim] + sizes[dim] - self.held.offsets[dim], self.held.sizes[dim])
            if begin >= end:
                return ()
            first, last = first + begin * step, last + (end - 1) * step
            step *= self.held.sizes[dim]
        return range(bisect_right(self.starts, first) - 1, bisect_right(self.starts, last))

    def parts(self, number: int) -> Sequence[HeldBox]:
        """Return the boxes of a range."""
        start, end = [*self.starts[number : number + 2], self.held.numel][:2]
        numel, count = end - start, self.before[number + 1] - self.before[number]
        # bounds the number of computed boxes by that of records
        fits = numel * self.held.dtype.itemsize <= 2 * count * self.piece_nbytes
        require(0 <= numel <= self.held.numel - start and fits, "its ranges overlap, or pieces are missing")
        boxes = boxes_of_pieces(self.held._replace(start=start, numel=numel), self.piece_nbytes)
        require(len(boxes) == count, f"{count} pieces, but {len(boxes)} boxes")
        return boxes
