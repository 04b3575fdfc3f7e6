"""``.metadata``, DCP's pickle of all keys, boxes and places: written here, and read if torch wrote it.

[Note: Untrusted pickles]
A pickle can call every function that it names, and set attributes of every class that it names. Therefore
classes of DCP are replaced by empty classes created for one read, and other names are refused. A few bytes
can also request all memory, by the size of a string or of the memo: such a pickle is refused before it is
loaded.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import math
import os
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

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
from fsdp_c.checkpoint.folder import DATA, METADATA, CheckpointError, convert_errors, require
from fsdp_c.checkpoint.pieces import TAIL_NBYTES
from fsdp_c.checkpoint.planning import RECORD, Group
from fsdp_c.state.state_dict import collector_paused

_MAX_METADATA_NBYTES = 8 * 2**30


# ----------------------------------------------------------------- writing


def metadata_content(
    groups: list[Group], places: dict[str, tuple[Group, int]], path: Path, files: dict[int, str]
) -> Iterator[bytes]:
    """Yield the parts of the pickle of DCP's ``Metadata``. ``places``: see ``places_of``. ``files``: names by rank.

    ``Metadata`` has an object per box and per place. Boxes are objects shared by all tensors of a group;
    places are written directly as pickle opcodes, without creating objects.
    """
    pickled = _OpcodeWriter()
    yield b"\x80\x03" + pickled(dcp.Metadata) + b")\x81}(" + pickled("state_dict_metadata") + b"}("
    rows = {id(group): _rows(group) for group in groups}
    for key, (group, _) in places.items():
        yield pickled(key) + pickled(_entry(group, rows[id(group)]))
    paths = {key: group.paths[slot] for key, (group, slot) in places.items()}
    yield b"u" + pickled("planner_data") + pickled(paths)
    yield pickled("storage_data") + b"}("
    yield from _storage_data(places, rows, files, pickled)
    yield b"u" + pickled("storage_meta") + pickled(dcp.StorageMeta(checkpoint_id=str(path)))
    yield pickled("version") + pickled(CURRENT_DCP_VERSION) + b"ub."


class _OpcodeWriter:
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


def _reduced(properties: dcp.TensorProperties) -> tuple[Any, ...]:
    """Return the state without the field added in torch 2.15, which older versions reject."""
    state = properties.__getstate__()
    return copyreg.__newobj__, (dcp.TensorProperties,), state[:5]  # type: ignore[attr-defined]  # typeshed lacks __newobj__


def _by_value(member: enum.Enum) -> tuple[Any, ...]:
    """Reduce to a call of the class. CPython 3.11.0 to 3.11.3 would pickle a call of ``getattr``, unsafe to load."""
    return type(member), (member.value,)


class _Row(NamedTuple):
    """Box of the tensors of a group, and the places of their records."""

    chunk: dcp.ChunkStorageMetadata
    record: int  # number of the first tensor's record
    step: int  # number of records to the next tensor's
    nbytes: int  # number of bytes of its data, and after it in its piece


def _rows(group: Group) -> list[_Row]:
    rows, before = [], 0
    for held in (held for each in group.boxes for held in each.ranges()):
        boxes = held.boxes()
        for nth, box in enumerate(boxes):
            chunk = dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            nbytes = box.numel * held.dtype.itemsize + TAIL_NBYTES
            rows.append(_Row(chunk, before + nth, len(boxes), nbytes))
        before += len(boxes) * len(group.paths)
    return rows


def _entry(group: Group, rows: list[_Row]) -> Any:
    if not group.boxes:
        return dcp.BytesStorageMetadata()
    held, chunks = group.boxes[0].held, [row.chunk for row in rows]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=held.dtype), torch.Size(held.shape), chunks)


def _storage_data(
    places: dict[str, tuple[Group, int]],
    rows: dict[int, list[_Row]],
    files: dict[int, str],
    pickled: _OpcodeWriter,
) -> Iterator[bytes]:
    """Yield the items of ``Metadata.storage_data``. ``rows``: by id of group, with chunks written before."""
    texts = ("fqn", "index", "offset", "relative_path", "length")
    # pushed and popped, so that the memo has them: later opcodes refer to it
    yield b"".join(pickled(one) + b"0" for one in (dcp.MetadataIndex, _StorageInfo, *texts, *files.values()))
    fqn, index, offset, path, length = map(pickled, texts)
    head = pickled(dcp.MetadataIndex) + b")\x81}(" + fqn
    info = b"ub" + pickled(_StorageInfo) + b")\x81}(" + path
    names = {rank: pickled(name) for rank, name in files.items()}
    numbers = {
        each: [
            index + b"J" + struct.pack("<i", number) + offset + pickled(row.chunk.offsets)
            for number, row in enumerate(of_group)
        ]
        for each, of_group in rows.items()
    }
    long = b"\x8a\x08"  # opcode and length of an eight-byte integer
    before_start, before_length = offset + long, length + long
    place = struct.Struct(f"<q{len(before_length)}sq")
    for key, (group, slot) in places.items():
        if not group.boxes:
            start, nbytes, _, rank = RECORD.unpack_from(group.records, slot * RECORD.size)
            yield pickled(dcp.MetadataIndex(key)) + pickled(_StorageInfo(files[rank], start, nbytes))
            continue
        name = pickled(key)
        parts: list[bytes] = []
        for row, number in zip(rows[id(group)], numbers[id(group)], strict=True):
            at = (row.record + slot * row.step) * RECORD.size
            start, before, _, rank = RECORD.unpack_from(group.records, at)
            packed = place.pack(start, before_length, before + row.nbytes)
            parts += (head, name, number, info, names[rank], before_start, packed, b"ub")
        yield b"".join(parts)


# ----------------------------------------------------------------- reading


def _kind(value: object) -> str:
    return type(value).__name__


@contextmanager
def parse_metadata(folder: Path) -> Iterator[None]:
    """Context for the creation of ``.metadata``'s entries, up to hundreds of thousands."""
    with collector_paused(), convert_errors(f"{folder / METADATA}: damaged, or not written by DCP"):
        yield


def checkpoint_of_torch(folder: Path) -> Checkpoint:
    """Return the checkpoint described by ``.metadata``. Chunks are validated on access."""
    with parse_metadata(folder), (folder / METADATA).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= _MAX_METADATA_NBYTES, f"it has {size} bytes")
        content = file.read()
        checkpoint = Checkpoint(folder, None, (len(content), zlib.crc32(content)))
        metadata = read_metadata(content)
        require(_kind(metadata) == "Metadata", "it does not hold the metadata of a checkpoint")
        require(type(metadata.state_dict_metadata) is dict, "it has no entries")
        require(type(metadata.storage_data) is dict, "it has no places of entries")
        stored = _stored(checkpoint, metadata.storage_data)
        for key, value in metadata.state_dict_metadata.items():
            require(type(key) is str, f"a key is a {type(key).__name__}, not a string")
            checkpoint.entries[key] = _entry_of_torch(checkpoint, key, value, stored.get(key, []))
        checkpoint.paths = checked_paths(metadata.planner_data, checkpoint.entries)
    return checkpoint


def _stored(checkpoint: Checkpoint, storage_data: dict[Any, Any]) -> dict[str, list[tuple[Any, Any]]]:
    """Return (index, place) of all entries by key. Only file names are validated here."""
    stored: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in storage_data.items():
        require(_kind(index) == "MetadataIndex" and type(index.fqn) is str, "an index has an unknown type")
        require(_kind(info) == "_StorageInfo", f"the place of {index.fqn} is {_kind(info)}")
        checkpoint.size(info.relative_path)
        if DATA.match(info.relative_path):
            raise CheckpointError(
                f"{checkpoint.folder / METADATA}: its last line, which has its checksum, is missing or "
                "damaged (an interrupted copy?)"
            )
        stored.setdefault(index.fqn, []).append((index.offset, info))
    return stored


def _places(
    checkpoint: Checkpoint, key: str, stored: list[tuple[Any, Any]]
) -> dict[Any, tuple[str, int, int]]:
    """Return (file, start, length) by offsets, for one key."""
    places, what = {}, f"the place of {key}"
    for index, info in stored:
        require(not info.transform_descriptors, f"{key} is compressed or encrypted")
        offset = None if index is None else ints(index, what)
        start, length = ints((info.offset, info.length), what)
        checkpoint.check_end(info.relative_path, start + length, key)
        places[offset] = info.relative_path, start, length
    return places


def _entry_of_torch(checkpoint: Checkpoint, key: str, value: Any, stored: list[tuple[Any, Any]]) -> Entry:
    if _kind(value) == "BytesStorageMetadata":
        places = _places(checkpoint, key, stored)
        require(None in places, f"{key} is nowhere")
        return BytesEntry(*places[None])
    require(_kind(value) == "TensorStorageMetadata", f"{key} is {_kind(value)}")
    shape = check_shape(value.size, key)
    state = value.properties.state
    dtype = state[0] if isinstance(state, tuple) and state else value.properties.dtype
    require(isinstance(dtype, torch.dtype) and type(value.chunks) is list, f"{key} has no dtype or chunks")

    @functools.cache
    def chunks() -> list[Chunk]:
        with parse_metadata(checkpoint.folder):
            places = _places(checkpoint, key, stored)
            kinds = {"ChunkStorageMetadata", *map(_kind, value.chunks)}
            require(len(kinds) == 1, f"{key} has chunks of other kinds: {kinds}")
            boxes = [(ints(each.offsets, key), check_shape(each.sizes, key)) for each in value.chunks]
            check_boxes(key, shape, dtype, boxes, checkpoint)
            found = []
            for offsets, sizes in boxes:
                place, nbytes = places.get(offsets) or places.get(None), math.prod(sizes) * dtype.itemsize
                if place is None:
                    raise ValueError(f"the chunk {offsets} of {key} has no place in a file")
                file, start, length = place
                require(nbytes <= length, f"{key} has {nbytes} bytes in {length} bytes of a file")
                found.append(Chunk(offsets, sizes, file, start, length))
            return found

    def find(box: Box | None) -> Iterable[Chunk]:
        return (each for each in chunks() if box is None or overlap(box, each[:2]))

    return TensorEntry(shape, dtype, find)


# ----------------------------------------------------------------- the pickle

_PATHS = ("Path", "PosixPath", "PurePosixPath")
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # since Python 3.13
    # CPython 3.11.0 to 3.11.3 pickle enum members as getattr(class, name); here the call returns an
    # attribute-less Value
    "builtins": ("getattr",),
    "__builtin__": ("getattr",),
}


class Value:
    """Replacement for a pickled object. Missing attributes are None: readers check the ones that they need."""

    def __init__(self, *args: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.classes: dict[str, type[Value]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (dtype := dtype_named(module, name)) is not None:
            return dtype
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata has")
        return self.classes.setdefault(name, type(name, (Value,), {}))


def read_metadata(content: bytes) -> Any:
    """Return the object pickled in ``.metadata``, made of ``Value``. Raise an error of any type for invalid content."""
    _check_sizes(content)
    return _Unpickler(content).load()


_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_PUTS = ("PUT", "LONG_BINPUT")


def _fixed_opcodes() -> re.Pattern[bytes]:
    """Return a pattern of up to 4096 opcodes with arguments of fixed length, or integers of up to eight bytes."""
    each = [b"\\x8a(?:%s)" % b"|".join(b"\\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(1, 9))]
    by_nbytes: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        nbytes = 0 if op.arg is None else op.arg.n
        if nbytes >= 0 and op.name not in (*_PUTS, "STOP"):
            by_nbytes[nbytes] = by_nbytes.get(nbytes, b"") + b"\\x%02x" % code
    each += [b"[%s].{%d}" % (codes, nbytes) for nbytes, codes in by_nbytes.items()]
    return re.compile(b"(?:%s){1,4096}" % b"|".join(each), re.DOTALL)


_FIXED = _fixed_opcodes()


def _check_sizes(content: bytes) -> None:
    """Raise ValueError for a pickle that declares more bytes than it has, or a memo larger than itself."""
    file, at = io.BytesIO(content), 0
    while at < len(content):
        if found := _FIXED.match(content, at):
            at = found.end()
            continue
        op = _OPCODES.get(content[at])
        if op is None or op.arg is None:
            return  # the end, or damage
        file.seek(at + 1)
        argument = op.arg.reader(file)  # raises ValueError for missing bytes
        require(op.name not in _PUTS or argument <= at, f"its memo would have {argument} places")
        at = file.tell()
