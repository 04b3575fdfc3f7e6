"""Where all that ranks have written lies, in a few bytes for each box; and ``.metadata``, made of that."""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from fsdp_c.checkpoint.pieces import TAIL_NBYTES, Place, memory
from fsdp_c.checkpoint.planning import Group, Planned, Source, key_of

TOKEN = b"fsdp_c layout"  # before the token by which .metadata and fsdp_c.layout belong together
# where a piece begins in its file, how much of it is before its data (of an object: its length), their
# CRC-32, whose file it is
RECORD = struct.Struct("<QQII")


class RankResult(NamedTuple):
    """What a rank has written."""

    file: str  # as named from the checkpoint's folder
    size: int
    framing_crc32: int
    records: list[bytes]  # by part of its plan, by key that it keeps of the part, by box


class Stored(NamedTuple):
    """A group, and the records of its keys: by box, range, key and box of the range; or of objects by key."""

    group: Group
    boxes: list[bytes]
    objects: bytes


def stored(planned: Planned, results: dict[int, RankResult]) -> list[Stored]:
    """``results`` by rank."""
    records, table = _Records(planned, results), []
    for group in planned.groups:
        keys = len(group.paths)
        boxes = [
            b"".join(
                records.of(sources, len(held.boxes()), keys)
                for held, sources in zip(box.ranges(), box.sources, strict=True)
            )
            for box in group.boxes
        ]
        table.append(Stored(group, boxes, records.of(group.sources, 1, keys) if group.sources else b""))
    return table


class _Records:
    def __init__(self, planned: Planned, results: dict[int, RankResult]) -> None:
        self.planned, self.results = planned, results
        self._index: dict[tuple[int, int], dict[int, int]] = {}

    def of(self, sources: list[Source], count: int, keys: int) -> bytes:
        """The records of all keys of a group, where each has ``count``."""
        nbytes = count * RECORD.size
        parts = [b""] * keys
        for source in sources:
            content = self.results[source.rank].records[source.part]
            index = self._kept(source.rank, source.part)
            if len(sources) == 1 and index is None and len(content) == keys * nbytes:
                if list(source.positions) == list(range(keys)):
                    return content
            for slot, position in zip(source.slots, source.positions, strict=True):
                at = nbytes * (position if index is None else index[position])
                parts[slot] = content[at : at + nbytes]
        return b"".join(parts)

    def _kept(self, rank: int, part: int) -> dict[int, int] | None:
        """Which of the records of a part is that of a key; None where all of them are there."""
        kept = self.planned.kept[rank].get(part)
        if kept is None:
            return None
        if (rank, part) not in self._index:
            self._index[rank, part] = {position: at for at, position in enumerate(kept)}
        return self._index[rank, part]


# ----------------------------------------------------------------- .metadata


def metadata_content(
    table: list[Stored], order: list[str], path: Path, files: dict[int, str], mark: str = ""
) -> Iterator[bytes]:
    """The pickle of DCP's ``Metadata``, part by part. ``order``: of keys. ``files``: names by rank.
    ``mark``: stands at the beginning, and readers pass over it.

    It has an object for each box and each place. The boxes are objects that all tensors of a group share; the
    places are written as bytes, as a pickler would, without an object of each.
    """
    where = {key_of(path): (each, slot) for each in table for slot, path in enumerate(each.group.paths)}
    keys = [key for key in dict.fromkeys([*order, *where]) if key in where]
    pickled = _Pickled()
    text = TOKEN + f" {mark}".encode()
    yield b"\x80\x03" + (b"X" + struct.pack("<I", len(text)) + text + b"0" if mark else b"")
    yield pickled(dcp.Metadata) + b")\x81}(" + pickled("state_dict_metadata") + b"}("
    chunks = {id(each): _chunks(each.group) for each in table}
    for key in keys:
        each, _ = where[key]
        yield pickled(key) + pickled(_entry(each.group, chunks[id(each)]))
    yield (
        b"u"
        + pickled("planner_data")
        + pickled({key: where[key][0].group.paths[where[key][1]] for key in keys})
    )
    yield pickled("storage_data") + b"}("
    places = {id(each): _Places(each, chunks[id(each)], files, pickled) for each in table}
    for key in keys:
        each, slot = where[key]
        yield from places[id(each)].of(key, slot)
    yield b"u" + pickled("storage_meta") + pickled(dcp.StorageMeta(checkpoint_id=str(path)))
    yield pickled("version") + pickled(CURRENT_DCP_VERSION) + b"ub."


class _Pickled:
    """The bytes of one value after the other, each in full where it is first; for every torch from 2.10."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.pickler = pickle.Pickler(self.buffer, protocol=3)  # the last one without frames
        self.pickler.dispatch_table = {
            **copyreg.dispatch_table,
            dcp.TensorProperties: _reduced,
            dcp._MEM_FORMAT_ENCODING: _by_value,
        }

    def __call__(self, value: object) -> bytes:
        self.buffer.seek(0)
        self.buffer.truncate()
        self.pickler.dump(value)
        return self.buffer.getvalue()[2:-1]

    def again(self, value: object) -> bytes:
        """The same in five bytes, of what was written before."""
        content = self(value)
        return content if content[:1] == b"j" else b"j" + struct.pack("<I", content[1])


def _reduced(properties: dcp.TensorProperties) -> tuple[Any, ...]:
    """Without the value that it has since 2.15, and that older ones refuse."""
    state = properties.__getstate__()
    return copyreg.__newobj__, (dcp.TensorProperties,), state[:5]  # type: ignore[attr-defined]  # typeshed leaves __newobj__ out


def _by_value(member: enum.Enum) -> tuple[Any, ...]:
    """CPython 3.11.0 to 3.11.3 pickle members of enums as calls of ``getattr``, which none should make."""
    return type(member), (member.value,)


def _chunks(group: Group) -> list[dcp.ChunkStorageMetadata]:
    boxes = (box for each in group.boxes for held in each.ranges() for box in held.boxes())
    return [dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def _entry(group: Group, chunks: list[dcp.ChunkStorageMetadata]) -> Any:
    if not group.boxes:
        return dcp.BytesStorageMetadata()
    held = group.boxes[0].held
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=held.dtype), torch.Size(held.shape), [*chunks]
    )


_LONG = b"\x8a\x08"  # an integer in eight bytes
_NONE = b"NN0N0"  # in five bytes, as many as a value takes that was written before


class _Places:
    """The places of the boxes of each tensor of a group."""

    def __init__(
        self, each: Stored, chunks: list[dcp.ChunkStorageMetadata], files: dict[int, str], pickled: _Pickled
    ) -> None:
        self.each, self.group, self.chunks = each, each.group, chunks
        self.pickled, self.files, self.prepared = pickled, files, False

    def of(self, key: str, slot: int) -> Iterator[bytes]:
        if not self.group.boxes:
            start, length, crc32, rank = RECORD.unpack_from(self.each.objects, slot * RECORD.size)
            info = _StorageInfo(self.files[rank], start, length)
            place = Place(start, length, crc32, None)
            info.piece = tuple(place)  # type: ignore[attr-defined]  # torch keeps attributes that it does not know
            yield self.pickled(dcp.MetadataIndex(key)) + self.pickled(info)
            return
        first = b"" if self.prepared else self._prepare()
        rows = self.rows
        rows[:, self.key : self.key + 4] = _bytes(self.pickled.again(key)[1:])
        found = self.records[self.index + slot * self.step]
        start, head = found[:, :8].contiguous(), found[:, 8:16].contiguous()
        rows[:, self.start : self.start + 8] = start
        data = (start.view(torch.int64) + head.view(torch.int64)).view(-1, 1)
        rows[:, self.data : self.data + 8] = data.view(torch.uint8)
        length = head.view(torch.int64) + self.nbytes.view(-1, 1) + TAIL_NBYTES
        rows[:, self.length : self.length + 8] = length.view(torch.uint8)
        rows[:, self.crc32 : self.crc32 + 4] = found[:, 16:20]
        ranks = found[:, 20:24].contiguous().view(torch.int32).view(-1)
        rows[:, self.file : self.file + 4] = self.file_gets[ranks.long()]
        yield first + bytes(memory(rows))

    def _prepare(self) -> bytes:
        """What is equal in all tensors of the group; the bytes that stand before the first of them."""
        self.prepared = True
        again, texts = self.pickled.again, {}
        # what comes first here is made and taken off the stack again, as later it is only named
        first = b"".join(self.pickled(one) + b"0" for one in (dcp.MetadataIndex, _StorageInfo))
        for text in ("fqn", "index", "offset", "relative_path", "length", "piece"):
            first += self.pickled(text) + b"0"
            texts[text] = again(text)
        file_gets = torch.zeros(max(self.files) + 1, 4, dtype=torch.uint8, device="cpu")
        for rank, name in self.files.items():
            first += self.pickled(name) + b"0"
            file_gets[rank] = _bytes(again(name)[1:])
        self.file_gets = file_gets
        rows, strides = [], {}
        boxes = [box for each in self.group.boxes for held in each.ranges() for box in held.boxes()]
        itemsize = self.group.boxes[0].held.dtype.itemsize
        for number, (chunk, box) in enumerate(zip(self.chunks, boxes, strict=True)):
            if box.strides is not None and box.strides not in strides:
                first += self.pickled(box.strides) + b"0"
                strides[box.strides] = again(box.strides)
            fields = [
                again(dcp.MetadataIndex) + b")\x81}(" + texts["fqn"] + b"j", bytes(4), texts["index"],
                b"J" + struct.pack("<i", number) + texts["offset"] + again(chunk.offsets) + b"ub",
                again(_StorageInfo) + b")\x81}(" + texts["relative_path"] + b"j", bytes(4),
                texts["offset"] + _LONG, bytes(8), texts["length"] + _LONG, bytes(8), texts["piece"] + b"(" + _LONG,
                bytes(8), _LONG + struct.pack("<q", box.numel * itemsize) + _LONG, bytes(8),
                (_NONE if box.strides is None else strides[box.strides]) + b"tub",
            ]  # fmt: skip
            rows.append(b"".join(fields))
        ends = torch.tensor([0, *map(len, fields)], device="cpu").cumsum(0).tolist()
        self.key, self.file, self.start, self.length, self.data, self.crc32 = (
            ends[n] for n in (1, 5, 7, 9, 11, 13)
        )
        self.rows = _bytes(b"".join(rows)).view(len(rows), -1).clone()
        self.nbytes = torch.tensor([box.numel * itemsize for box in boxes], device="cpu")
        self.records = _bytes(b"".join(self.each.boxes)).view(-1, RECORD.size)
        self.index, self.step = _index(self.group)
        return first


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _index(group: Group) -> tuple[Tensor, Tensor]:
    """The record of each box of a group's first tensor, and how much further on it is for the next tensor."""
    index: list[int] = []
    step: list[int] = []
    before = 0
    for each in group.boxes:
        for held in each.ranges():
            count = len(held.boxes())
            index += range(before, before + count)
            step += [count] * count
            before += count * len(group.paths)
    return torch.tensor(index, device="cpu"), torch.tensor(step, device="cpu")
