"""``fsdp_c.layout``: what ``.metadata`` says, in a form of which a load reads only what it needs.

[Note: The layout of a checkpoint]
``.metadata`` has an object for each box of each tensor, and DCP's readers make them all. The layout has a
header (JSON) with the keys and, for tensors that are divided in the same way, shape, dtype and boxes; an
index with the starts of the ranges in which each box was written, and how many pieces came before; and one
record of 24 bytes for each piece, by range first: so what a rank reads of all layers lies together. It is not
mapped, as a file that is cut while it is read would end the process.

A random token stands in its header and at the beginning of ``.metadata``: who replaces one of them makes the
other stale. checksums.json has a checksum of the whole file, and of ``.metadata``: before a load one rank
compares both, so that a load without ``.metadata`` does not pass over its damage; a layout that does not fit
is not used. What each rank reads shows by itself: the header and the index have a checksum, the records lead
to data that have one. As all of it may come from a stranger, each number is compared with the sizes of the
files, or computed anew, before anything is made of it.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import warnings
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_c.checkpoint import metadata as of_dcp
from fsdp_c.checkpoint import pieces
from fsdp_c.checkpoint.folder import (
    CHECKSUMS,
    LAYOUT,
    LAYOUT_MAGIC,
    METADATA,
    CheckpointError,
    lies_in,
    locate,
    refusing,
    require,
)
from fsdp_c.checkpoint.metadata import (
    BytesEntry,
    Checkpoint,
    Chunk,
    Entry,
    PathInDict,
    TensorEntry,
    check_shape,
    do_tile,
    ints,
)
from fsdp_c.checkpoint.pickles import dtype_named
from fsdp_c.checkpoint.pieces import TAIL_NBYTES, Place, crc32_of
from fsdp_c.checkpoint.planning import Held, HeldBox, boxes_of_pieces, key_of
from fsdp_c.checkpoint.table import RECORD, TOKEN, Stored

_HEAD = struct.Struct("<16sQQI4x")  # behind it are the header, the index and the records
_MAX_HEADER_NBYTES = 2**30
_BLOCK = 1024  # records that are read at once
_FOUND = re.compile(rb"\x80\x03X.{4}%s ([0-9a-f]{32}) (\.|fsdp_c-data-[0-9a-f]{12})0" % TOKEN, re.DOTALL)


def layout_content(table: list[Stored], order: list[str], token: str) -> Iterator[bytes]:
    """The file, part by part. ``order``: of keys."""
    found = {key_of(path): path for each in table for path in each.group.paths}
    paths: list[PathInDict] = [found[key] for key in dict.fromkeys([*order, *found]) if key in found]
    numbers = {path: number for number, path in enumerate(paths)}
    groups, index, records = [], [], []
    for each in table:
        group: dict[str, Any] = {"keys": [numbers[path] for path in each.group.paths], "boxes": None}
        if each.group.boxes:
            held = each.group.boxes[0].held
            group |= {"dtype": str(held.dtype).removeprefix("torch."), "shape": held.shape, "boxes": []}
        else:
            records.append(each.objects)
        for box, content in zip(each.group.boxes, each.boxes, strict=True):
            firsts = [0]
            for held in box.ranges():
                firsts.append(firsts[-1] + len(held.boxes()))
            index.append(struct.pack(f"<{2 * len(box.starts)}Q", *box.starts, *firsts[:-1]))
            about = {"order": box.held.order, "offsets": box.held.offsets, "sizes": box.held.sizes}
            counts = {"ranges": len(box.starts), "pieces": firsts[-1], "is_one_piece": box.held.is_one_piece}
            group["boxes"].append(about | counts)
            records.append(content)
        groups.append(group)
    header = {"token": token, "piece_nbytes": pieces.MAX_NBYTES, "paths": paths, "groups": groups}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    packed = b"".join(index)
    yield _HEAD.pack(LAYOUT_MAGIC, len(text), len(packed), zlib.crc32(packed, zlib.crc32(text)))
    yield text
    yield packed
    yield from records


# ----------------------------------------------------------------- reading


def checked_layout(folder: Path) -> tuple[int, int] | None:
    """Size and CRC-32 of ``.metadata`` if a load may read the layout in its place; None if it must read that.

    One rank compares both files with their checksums, without parsing them. Warns of a layout that does not
    fit; raises CheckpointError for a ``.metadata`` that does not.
    """
    with (folder / METADATA).open("rb") as file:
        found = _find(folder, file)
        if found is None:
            return None
        path, inner, _ = found
        identity = _identity(file)
    checksums = of_dcp.read_checksums(folder, inner, identity)
    with path.open("rb") as file:
        is_known = file.read(len(LAYOUT_MAGIC)) == LAYOUT_MAGIC
        listed = checksums.get(str(path.relative_to(folder)))
        fits = listed is not None and _identity(file) == (listed["size"], listed["framing_crc32"])
    if not fits:
        warnings.warn(
            f"{path}: damaged, or of another checkpoint: its checksum is not the one in {CHECKSUMS}. All "
            f"ranks read {METADATA} in its place, which takes longer: copy the file again, or remove it",
            stacklevel=2,
        )
    return identity if fits and is_known else None


def read_layout(path: Path) -> Checkpoint:
    """As ``read_checkpoint(path, whole=False)``, from the layout where there is one."""
    folder = locate(path)
    with (folder / METADATA).open("rb") as file:
        found = _find(folder, file)
    if found is None:
        return of_dcp.read_checkpoint(path, whole=False)
    with _refusing(found[0]):
        return _Layout(folder, *found).checkpoint()


def _find(folder: Path, metadata: BinaryIO) -> tuple[Path, str, str] | None:
    """The layout that belongs to a ``.metadata``, the folder of data in which it lies, and the token."""
    found = _FOUND.match(metadata.read(256))
    if found is None:
        return None
    token, inner = (each.decode() for each in found.groups())
    path = folder / inner / LAYOUT
    return (path, inner, token) if lies_in(folder, path) else None


def _identity(file: BinaryIO) -> tuple[int, int]:
    size = os.fstat(file.fileno()).st_size
    return size, crc32_of(file, 0, size)


def _refusing(path: Path) -> AbstractContextManager[None]:
    return refusing(lambda error: f"{path}: damaged, or not of this checkpoint ({error})")


class _Layout:
    def __init__(self, folder: Path, path: Path, inner: str, token: str) -> None:
        self.folder, self.path, self.token = folder, path, token
        self.prefix = "" if inner == "." else f"{inner}/"
        self.checksums = of_dcp.read_checksums(folder, inner)
        self.sizes = of_dcp.checked_sizes(folder, inner, self.checksums)
        self.files_nbytes = sum(self.sizes.values())
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.nbytes = os.fstat(self.descriptor).st_size
        self.blocks: dict[int, bytes] = {}

    def checkpoint(self) -> Checkpoint:
        magic, text_nbytes, index_nbytes, crc32 = _HEAD.unpack(self._read(0, _HEAD.size))
        require(magic == LAYOUT_MAGIC, "it begins with something else")
        start, end = _HEAD.size + text_nbytes, _HEAD.size + text_nbytes + index_nbytes
        require(text_nbytes <= _MAX_HEADER_NBYTES and end <= self.nbytes, "it is torn")
        text, index = self._read(_HEAD.size, text_nbytes), self._read(start, index_nbytes)
        require(zlib.crc32(index, zlib.crc32(text)) == crc32, "its checksum is another")
        require(index_nbytes % 8 == 0, "its index is torn")
        self.index, self.index_at = memoryview(index).cast("Q"), 0
        self.begin, self.records, self.records_at = end, (self.nbytes - end) // RECORD.size, 0
        header = json.loads(text)
        require(header["token"] == self.token, "it is of another checkpoint")
        (self.piece_nbytes,) = ints([header["piece_nbytes"]], "the size of pieces")
        require(self.piece_nbytes >= 16, "the size of pieces is too small")
        paths = [tuple(each) for each in header["paths"]]
        keys = [key_of(each) for each in paths]
        require(len({*keys}) == len(keys), "a key stands there twice")
        made: dict[str, Entry] = {}
        count = 0
        for group in header["groups"]:
            own_keys = [keys[number] for number in ints(group["keys"], "the keys of a group")]
            count += len(own_keys)
            require(own_keys and count <= len(keys), "a key is in several groups")
            made.update(self._entries(group, own_keys))
        require(len(made) == len(keys), "keys are in no group")
        entries = {key: made[key] for key in keys}
        require(self.index_at == len(self.index), "its index is longer")
        require(self.begin + self.records_at * RECORD.size == self.nbytes, "its records are longer")
        own = self.checksums[METADATA]
        framing = {name: info["framing_crc32"] for name, info in self.checksums.items() if name != METADATA}
        found = of_dcp.checked_paths(dict(zip(keys, paths, strict=True)), entries)
        return Checkpoint(self.folder, entries, found, self.sizes, (own["size"], own["crc32"]), framing)

    def _entries(self, group: Any, keys: list[str]) -> Iterator[tuple[str, Entry]]:
        if group["boxes"] is None:
            at = self._take(len(keys))
            for slot, key in enumerate(keys):
                start, nbytes, crc32, rank = self.record(at + slot)
                file = self.file(key, rank, start + nbytes)
                yield key, BytesEntry(file, start, nbytes, Place(start, nbytes, crc32, None))
            return
        shape, dtype = check_shape(group["shape"], keys[0]), dtype_named("torch", group["dtype"])
        require(dtype is not None, f"{keys[0]} has no dtype")
        assert dtype is not None
        boxes = [self._box(box, dtype, shape, keys) for box in group["boxes"]]
        numel = sum(box.held.numel for box in boxes)
        require(
            numel == math.prod(shape), f"the boxes of {keys[0]} have {numel} elements, its shape is {shape}"
        )
        require(numel * dtype.itemsize <= self.files_nbytes, f"{keys[0]} is larger than all files")
        require(
            do_tile([(b.held.offsets, b.held.sizes) for b in boxes], shape), f"boxes of {keys[0]} overlap"
        )
        for slot, key in enumerate(keys):
            chunks = _Chunks(self, key, slot, len(keys), boxes)
            yield key, TensorEntry(shape, dtype, chunks.all, chunks.within)

    def _box(self, box: Any, dtype: torch.dtype, shape: tuple[int, ...], keys: list[str]) -> _StoredBox:
        key = keys[0]
        offsets, sizes = ints(box["offsets"], key), check_shape(box["sizes"], key)
        fits = len(offsets) == len(sizes) == len(shape)
        require(
            fits and all(map(lambda o, s, w: o + s <= w, offsets, sizes, shape)), f"a box of {key} is outside"
        )
        order = None if box["order"] is None else ints(box["order"], key)
        require(
            order is None or sorted(order) == list(range(len(shape))),
            f"the dimensions of {key} are in no order",
        )
        ranges, count = ints([box["ranges"], box["pieces"]], key)
        require(0 < ranges <= count, f"{key} has {ranges} ranges in {count} pieces")
        require(ranges == 1 or not box["is_one_piece"], f"{key} is one piece in {ranges} ranges")
        require(type(box["is_one_piece"]) is bool, f"{key} is damaged")
        held = Held(dtype, shape, order, offsets, sizes, 0, math.prod(sizes), box["is_one_piece"])
        require(self.index_at + 2 * ranges <= len(self.index), f"the index of {key} is torn")
        starts = self.index[self.index_at : self.index_at + ranges]
        firsts = self.index[self.index_at + ranges : self.index_at + 2 * ranges]
        self.index_at += 2 * ranges
        require(starts[0] == firsts[0] == 0, f"{key} begins elsewhere")
        return _StoredBox(held, starts, firsts, count, self._take(count * len(keys)), self.piece_nbytes)

    def _take(self, count: int) -> int:
        """The number of the next record, of ``count``."""
        at = self.records_at
        self.records_at += count
        require(self.records_at <= self.records, "its records are torn")
        return at

    def record(self, number: int) -> tuple[int, int, int, int]:
        block, at = divmod(number, _BLOCK)
        if block not in self.blocks:
            count = min(_BLOCK, self.records - block * _BLOCK)
            self.blocks[block] = self._read(self.begin + block * _BLOCK * RECORD.size, count * RECORD.size)
        start, before, crc32, rank = RECORD.unpack_from(self.blocks[block], at * RECORD.size)
        return start, before, crc32, rank

    def _read(self, start: int, nbytes: int) -> bytes:
        content = os.pread(self.descriptor, nbytes, start)
        require(len(content) == nbytes, "it is torn")
        return content

    def file(self, key: str, rank: int, end: int) -> str:
        """The file of a rank, in which something of ``key`` ends there."""
        name = f"{self.prefix}__{rank}_0.distcp"
        require(name in self.sizes, f"{key} is nowhere")
        if end > self.sizes[name]:
            raise CheckpointError(
                f"{self.folder / name}: {self.sizes[name]} bytes, but {key} ends at {end}: torn"
            )
        return name


class _StoredBox:
    """A box of the tensors of a group, and the ranges in which it lies in files."""

    def __init__(self, held: Held, starts: Any, firsts: Any, count: int, at: int, piece_nbytes: int) -> None:
        self.held, self.starts, self.firsts, self.count, self.at = held, starts, firsts, count, at
        self.piece_nbytes = piece_nbytes

    def range(self, number: int) -> tuple[int, Sequence[HeldBox]]:
        """How many pieces are before it, and the boxes of its own."""
        start, first, following = self.starts[number], self.firsts[number], number + 1
        end = self.starts[following] if following < len(self.starts) else self.held.numel
        count = (self.firsts[following] if following < len(self.firsts) else self.count) - first
        numel = end - start
        require(0 <= start <= end <= self.held.numel and (numel or not self.held.numel), "its ranges overlap")
        # no more boxes are computed than there are records
        fits = self.held.is_one_piece or numel * self.held.dtype.itemsize <= 2 * count * self.piece_nbytes
        require(count > 0 and fits, "pieces are missing")
        boxes = boxes_of_pieces(self.held._replace(start=start, numel=numel), self.piece_nbytes)
        require(len(boxes) == count, f"{count} pieces where there are {len(boxes)} boxes")
        return first, boxes

    def numbers(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
        """Of the ranges that may have elements of a box of the tensor."""
        first = last = 0
        step = 1
        for dim in reversed(range(len(self.held.sizes)) if self.held.order is None else self.held.order):
            begin = max(offsets[dim] - self.held.offsets[dim], 0)
            end = min(offsets[dim] + sizes[dim] - self.held.offsets[dim], self.held.sizes[dim])
            if begin >= end:
                return
            first, last = first + begin * step, last + (end - 1) * step
            step *= self.held.sizes[dim]
        number = bisect_right(self.starts, first) - 1
        while number < len(self.starts) and self.starts[number] <= last:
            yield number
            number += 1


class _Chunks(Sequence[Chunk]):
    """The chunks of one tensor: each is made where it is asked for, and looked at then."""

    def __init__(self, layout: _Layout, key: str, slot: int, keys: int, boxes: list[_StoredBox]) -> None:
        self.layout, self.key, self.slot, self.keys, self.boxes = layout, key, slot, keys, boxes

    def all(self) -> Sequence[Chunk]:
        return self

    def __len__(self) -> int:
        return sum(box.count for box in self.boxes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = index
        for box in self.boxes:
            if 0 <= at < box.count:
                with _refusing(self.layout.path):
                    first, boxes = box.range(bisect_right(box.firsts, at) - 1)
                    return self._chunk(box, first, boxes, at - first)
            at -= box.count
        raise IndexError(index)

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        for box in self.boxes:
            for number in box.numbers(offsets, sizes):
                with _refusing(self.layout.path):
                    first, boxes = box.range(number)
                    for nth, own in enumerate(boxes):
                        each = zip(own.offsets, own.sizes, offsets, sizes, strict=True)
                        if all(a < c + d and c < a + b for a, b, c, d in each):
                            yield self._chunk(box, first, boxes, nth)

    def _chunk(self, box: _StoredBox, first: int, boxes: Sequence[HeldBox], nth: int) -> Chunk:
        own = boxes[nth]
        number = box.at + first * self.keys + self.slot * len(boxes) + nth
        start, before, crc32, rank = self.layout.record(number)
        nbytes = own.numel * box.held.dtype.itemsize
        file = self.layout.file(self.key, rank, start + before + nbytes + TAIL_NBYTES)
        place = Place(start + before, nbytes, crc32, own.strides)
        return Chunk(own.offsets, own.sizes, file, start, before + nbytes + TAIL_NBYTES, place)
