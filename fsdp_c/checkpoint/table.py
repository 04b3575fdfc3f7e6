"""Content of ``.metadata``, computed from the places of all written data."""

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
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from fsdp_c.checkpoint.pieces import TAIL_NBYTES
from fsdp_c.checkpoint.planning import RECORD, Group, key_of


def metadata_content(
    groups: list[Group], order: list[str], path: Path, files: dict[int, str]
) -> Iterator[bytes]:
    """Yield the parts of the pickle of DCP's ``Metadata``. ``order``: of keys. ``files``: names by rank.

    ``Metadata`` has an object per box and per place. Boxes are objects shared by all tensors of a group;
    places are written directly as pickle opcodes, without creating objects.
    """
    where = {key_of(path): (group, slot) for group in groups for slot, path in enumerate(group.paths)}
    keys = [key for key in dict.fromkeys([*order, *where]) if key in where]
    pickled = _Pickled()
    yield b"\x80\x03" + pickled(dcp.Metadata) + b")\x81}(" + pickled("state_dict_metadata") + b"}("
    chunks = {id(group): _chunks(group) for group in groups}
    for key in keys:
        group, _ = where[key]
        yield pickled(key) + pickled(_entry(group, chunks[id(group)]))
    yield (
        b"u" + pickled("planner_data") + pickled({key: where[key][0].paths[where[key][1]] for key in keys})
    )
    yield pickled("storage_data") + b"}("
    places = {id(group): _Places(group, chunks[id(group)], files, pickled) for group in groups}
    for key in keys:
        group, slot = where[key]
        yield places[id(group)].of(key, slot)
    yield b"u" + pickled("storage_meta") + pickled(dcp.StorageMeta(checkpoint_id=str(path)))
    yield pickled("version") + pickled(CURRENT_DCP_VERSION) + b"ub."


class _Pickled:
    """Pickle opcodes of successive values, with references to earlier ones. Compatible with torch 2.10 and later."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.pickler = pickle.Pickler(self.buffer, protocol=3)  # last protocol without frames
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
        """Return the five bytes that refer to a value written before."""
        content = self(value)
        return content if content[:1] == b"j" else b"j" + struct.pack("<I", content[1])


def _reduced(properties: dcp.TensorProperties) -> tuple[Any, ...]:
    """Return the state without the field added in torch 2.15, which older versions reject."""
    state = properties.__getstate__()
    return copyreg.__newobj__, (dcp.TensorProperties,), state[:5]  # type: ignore[attr-defined]  # typeshed lacks __newobj__


def _by_value(member: enum.Enum) -> tuple[Any, ...]:
    """Reduce to a call of the class. CPython 3.11.0 to 3.11.3 would pickle a call of ``getattr``, unsafe to load."""
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


_LONG = b"\x8a\x08"  # opcode and length of an eight-byte integer
_PLACE = struct.Struct("<2sq7sq")


class _Row(NamedTuple):
    """Part of a box's place that is equal for all tensors of a group."""

    record: int  # record of the group's first tensor
    step: int  # number of records to the next tensor's
    nbytes: int
    at: bytes  # opcodes of its number and offsets


class _Places:
    """Places of the boxes of each tensor of a group."""

    def __init__(
        self, group: Group, chunks: list[dcp.ChunkStorageMetadata], files: dict[int, str], pickled: _Pickled
    ) -> None:
        self.group, self.chunks = group, chunks
        self.pickled, self.files = pickled, files
        self.rows: list[_Row] = []

    def of(self, key: str, slot: int) -> bytes:
        if not self.group.boxes:
            start, length, _, rank = RECORD.unpack_from(self.group.records, slot * RECORD.size)
            info = _StorageInfo(self.files[rank], start, length)
            return self.pickled(dcp.MetadataIndex(key)) + self.pickled(info)
        parts = [] if self.rows else [self._prepare()]
        name = self.pickled.again(key)
        for row in self.rows:
            number = row.record + slot * row.step
            start, head, _, rank = RECORD.unpack_from(self.group.records, number * RECORD.size)
            packed = _PLACE.pack(_LONG, start, self.length, head + row.nbytes + TAIL_NBYTES)
            parts += (self.head, name, row.at, self.file_gets[rank], self.offset, packed, b"ub")
        return b"".join(parts)

    def _prepare(self) -> bytes:
        """Compute the opcodes common to all tensors of the group. Return the bytes to write before the first tensor."""
        again = self.pickled.again
        texts = ("fqn", "index", "offset", "relative_path", "length")
        # pushed and popped once, so that the memo has them
        named = (dcp.MetadataIndex, _StorageInfo, *texts, *self.files.values())
        first = b"".join(self.pickled(one) + b"0" for one in named)
        fqn, index, self.offset, path, length = map(again, texts)
        self.length = length + _LONG
        self.head = again(dcp.MetadataIndex) + b")\x81}(" + fqn
        self.file_gets = {rank: again(name) for rank, name in self.files.items()}
        before = 0
        for held in (held for each in self.group.boxes for held in each.ranges()):
            boxes = held.boxes()
            for nth, box in enumerate(boxes):
                number = len(self.rows)
                at = index + b"J" + struct.pack("<i", number) + self.offset
                at += again(self.chunks[number].offsets) + b"ub" + again(_StorageInfo) + b")\x81}(" + path
                nbytes = box.numel * held.dtype.itemsize
                self.rows.append(_Row(before + nth, len(boxes), nbytes, at))
            before += len(boxes) * len(self.group.paths)
        return first
