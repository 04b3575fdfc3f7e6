"""Reading what DCP's ``.metadata`` says, without trusting it.

``.metadata`` is read as [Note: A pickle from a stranger] says. Then every value is checked: types, sizes
against the files that are there, names of files. A ``Checkpoint`` remains, from which all readers work.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import reprlib
import resource
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fsdp_c.checkpoint.folder import (
    CHECKSUMS,
    FORMAT,
    LAYOUT,
    METADATA,
    CheckpointError,
    data_folders,
    lies_in,
    locate,
    refusing,
    require,
)
from fsdp_c.checkpoint.pickles import read_metadata
from fsdp_c.checkpoint.pieces import Place
from fsdp_c.sharding.common import collector_paused
from fsdp_c.sharding.flat_param import are_dense

VERSION = 1
_MAX_METADATA_NBYTES = 8 * 2**30
MAX_DIMS = 64  # as torch has it for most operations
_MAX_GAPS = 1000  # in nested lists, whose elements are entries
_MAX_CORNERS = 2**24  # of boxes, in all: looked at in seconds
# with another attribute it may be ours with a damaged name, and must not pass for torch's, which has no
# checksums
_STORAGE_INFO = {"args", "relative_path", "offset", "length", "transform_descriptors", "piece"}


def _kind(value: object) -> str:
    return type(value).__name__


# ----------------------------------------------------------------- checked values


class Chunk(NamedTuple):
    """A part of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # of the whole entry: what torch.load reads
    length: int
    place: Place | None  # of the data, where fsdp_c wrote them

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class TensorEntry:
    """A tensor. Its chunks are made, and looked at, when they are first asked for: CheckpointError then."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make_chunks: Callable[[], Sequence[Chunk]],
        find: Callable[[Sequence[int], Sequence[int]], Iterator[Chunk]] | None = None,
    ) -> None:
        """``find``: does what ``within`` does, without a look at every chunk."""
        self.shape, self.dtype, self._find = shape, dtype, find
        self._make_chunks: Callable[[], Sequence[Chunk]] | None = make_chunks
        self._chunks: Sequence[Chunk] | None = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        if self._chunks is None:
            assert self._make_chunks is not None, "chunks of an entry that was let go"
            self._chunks = self._make_chunks()
            self._make_chunks = None
        return self._chunks

    def let_go(self) -> None:
        """Give back what chunks are made of; those that have been made stay."""
        if self._find is None:
            self._make_chunks = None

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        """The chunks that have elements of a box."""
        if self._find is not None:
            yield from self._find(offsets, sizes)
            return
        ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
        dim = max(range(len(ends)), key=lambda dim: self.shape[dim] / max(sizes[dim], 1), default=None)
        for chunk in self.chunks:
            if dim is not None:
                start = chunk.offsets[dim]
                if start >= ends[dim] or start + chunk.sizes[dim] <= offsets[dim]:
                    continue
            each = zip(chunk.offsets, chunk.sizes, offsets, ends, strict=True)
            if all(start < last and first < start + size for start, size, first, last in each):
                yield chunk

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class BytesEntry:
    """Something pickled by torch.save."""

    file: str
    start: int
    length: int
    place: Place | None


Entry = TensorEntry | BytesEntry
PathInDict = tuple[str | int, ...]


@dataclass
class Checkpoint:
    """What a checkpoint folder contains."""

    folder: Path
    entries: dict[str, Entry]
    paths: dict[str, PathInDict]  # of each key in the nested dict that was saved
    file_sizes: dict[str, int]
    identity: tuple[int, int]  # size and CRC-32 of its metadata
    # CRC-32 by file; empty where torch wrote the checkpoint
    framing: dict[str, int] = field(default_factory=dict)
    held: dict[str, BinaryIO] = field(default_factory=dict)  # files that stay open

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self.held)

    def tensor(self, key: str) -> TensorEntry:
        """The entry of what is known to be a tensor."""
        entry = self.entries[key]
        assert isinstance(entry, TensorEntry)
        return entry

    def hold(self, names: Iterable[str]) -> None:
        """Open files now, to read them whatever takes the checkpoint's place: as many as leave half of those
        that the process may have open."""
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for name in sorted({*names} - {*self.held})[: max(0, room - len(self.held))]:
            self.held[name] = (self.folder / name).open("rb")

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file, to read at any place. Raises CheckpointError where it is gone."""
        try:
            if name in self.held:
                yield self.held[name]
            else:
                with (self.folder / name).open("rb") as file:
                    yield file
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            raise CheckpointError(
                f"{self.folder / name}: gone while the checkpoint was read: if another took its place, read "
                "that"
            ) from error

    def close(self) -> None:
        """Give back the files that are held."""
        _close_all(self.held)

    def let_go(self) -> None:
        """Give back what was read of entries whose chunks nobody has asked for."""
        for entry in self.entries.values():
            if isinstance(entry, TensorEntry):
                entry.let_go()


def _close_all(files: dict[str, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()


def read_checkpoint(path: Path, *, whole: bool = True) -> Checkpoint:
    """What is in the folder ``path``; tensors' data are not read.

    Not ``whole``: where the parts of a tensor lie is looked at when it is asked for, and what is wrong raises
    then. FileNotFoundError for no checkpoint, CheckpointError for one that is damaged or not of DCP.
    """
    folder = locate(path)
    with _reading(folder):
        checkpoint = _Reader(folder).read()
        if whole:
            _make_all(checkpoint.entries)
        return checkpoint


def _make_all(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        if isinstance(entry, TensorEntry):
            _ = entry.chunks


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Around making entries by the hundred thousand."""
    say = f"{folder / METADATA}: damaged, or not written by DCP"
    with collector_paused(), refusing(lambda error: f"{say} ({error})"):
        yield


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}

    def read(self) -> Checkpoint:
        content = self._content()
        identity = len(content), zlib.crc32(content)
        checksums, problem = _checksums(self.folder, identity, data_folders(content))
        metadata = read_metadata(content)
        require(_kind(metadata) == "Metadata", "it does not hold the metadata of a checkpoint")
        require(type(metadata.state_dict_metadata) is dict, "it has no entries")
        require(type(metadata.storage_data) is dict, "it does not say where entries are")
        stored, has_pieces = self._stored(metadata.storage_data)
        entries = {}
        for key, value in metadata.state_dict_metadata.items():
            require(type(key) is str, f"a key is {type(key).__name__}")
            entries[key] = self._entry(key, value, stored.get(key, []))
        # a file of checksums that does not fit is of a checkpoint of ours that torch replaced with its own
        if has_pieces and problem is not None:
            _make_all(entries)  # what is wrong with an entry says more
            raise problem
        # without a layout that is not there: whoever copied the checkpoint may not have known it
        listed = {
            name: info
            for name, info in (checksums or {}).items()
            if not _is_layout(name) or (self.folder / name).is_file()
        }
        self.check_files(listed)
        framing = {name: info["framing_crc32"] for name, info in listed.items() if name != METADATA}
        paths = checked_paths(metadata.planner_data, entries)
        return Checkpoint(self.folder, entries, paths, self.sizes, identity, framing)

    def _content(self) -> bytes:
        size = (self.folder / METADATA).stat().st_size
        require(size <= _MAX_METADATA_NBYTES, f"it has {size} bytes")
        return (self.folder / METADATA).read_bytes()

    def check_files(self, checksums: dict[str, Any]) -> None:
        for name, info in checksums.items():
            size = self._size(name)
            if size != info["size"] and not _is_layout(name):
                raise CheckpointError(
                    f"{self.folder / name}: {size} bytes where {info['size']} were written: torn or replaced"
                )

    def find_files(self, inner: str) -> None:
        """Note the sizes of ranks' files in a folder, all at once; links are looked at one by one later."""
        prefix = "" if inner == "." else f"{inner}/"
        with os.scandir(self.folder / inner) as found:
            for each in found:
                if each.name.endswith(".distcp") and each.is_file(follow_symlinks=False):
                    self.sizes[prefix + each.name] = each.stat(follow_symlinks=False).st_size

    # ------------------------------------------------------------- where entries are

    def _size(self, name: Any) -> int:
        """The size of a file of this folder. A name that leads elsewhere is refused."""
        require(type(name) is str, "the name of a file is no text")
        if name not in self.sizes:
            parts = pathlib.PurePosixPath(name).parts
            safe = parts and ".." not in parts and not name.startswith("/") and "\0" not in name
            require(safe, f"the file name {name!r} leads out of the folder")
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing")
            require(
                path.resolve().is_relative_to(self.folder.resolve()), f"{name!r} is a link out of the folder"
            )
            self.sizes[name] = path.stat().st_size
        return self.sizes[name]

    def _stored(self, storage_data: dict[Any, Any]) -> tuple[dict[str, list[tuple[Any, Any]]], bool]:
        """The places by key, of which no more is looked at than the file; and whether any is of fsdp_c."""
        stored: dict[str, list[tuple[Any, Any]]] = {}
        has_pieces = False
        for index, info in storage_data.items():
            require(_kind(index) == "MetadataIndex" and type(index.fqn) is str, "an index is something else")
            require(_kind(info) == "_StorageInfo", f"the place of {index.fqn} is {_kind(info)}")
            self._size(info.relative_path)
            has_pieces = has_pieces or info.piece is not None
            stored.setdefault(index.fqn, []).append((index.offset, info))
        return stored, has_pieces

    def _places(
        self, key: str, stored: list[tuple[Any, Any]]
    ) -> dict[Any, tuple[str, int, int, Place | None]]:
        """The places of one key, by offsets."""
        places, what = {}, f"the place of {key}"
        for index, info in stored:
            unknown = set(vars(info)) - _STORAGE_INFO
            require(not unknown, f"{what} has {reprlib.repr(unknown)}")
            require(not info.transform_descriptors, f"{key} is compressed or encrypted")
            offset = None if index is None else ints(index, what)
            start, length = ints((info.offset, info.length), what)
            size = self._size(info.relative_path)
            if start + length > size:
                raise CheckpointError(
                    f"{self.folder / info.relative_path}: {size} bytes, but {key} ends at {start + length}: "
                    "torn"
                )
            places[offset] = (info.relative_path, start, length, _place(info.piece, start, length, what))
        return places

    def _entry(self, key: str, value: Any, stored: list[tuple[Any, Any]]) -> Entry:
        if _kind(value) == "BytesStorageMetadata":
            places = self._places(key, stored)
            require(None in places, f"{key} is nowhere")
            return BytesEntry(*places[None])
        require(_kind(value) == "TensorStorageMetadata", f"{key} is {_kind(value)}")
        shape = check_shape(value.size, key)
        dtype = _dtype(value.properties)
        require(
            isinstance(dtype, torch.dtype) and type(value.chunks) is list, f"{key} has no dtype or chunks"
        )

        def make_chunks() -> list[Chunk]:
            with _reading(self.folder):
                return self._chunks(key, shape, dtype, value.chunks, self._places(key, stored))

        return TensorEntry(shape, dtype, make_chunks)

    def _chunks(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, raw: list[Any], places: Any
    ) -> list[Chunk]:
        chunks = [self._chunk(key, shape, dtype, chunk, places) for chunk in raw]
        total = sum(chunk.numel for chunk in chunks)
        require(total == math.prod(shape), f"the chunks of {key} have {total} elements, its shape is {shape}")
        require(total * dtype.itemsize <= sum(self.sizes.values()), f"{key} is larger than all files")
        require(do_tile([(c.offsets, c.sizes) for c in chunks], shape), f"chunks of {key} overlap")
        return chunks

    def _chunk(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, chunk: Any, places: Any) -> Chunk:
        require(_kind(chunk) == "ChunkStorageMetadata", f"{key} has a chunk that is {_kind(chunk)}")
        offsets, sizes = ints(chunk.offsets, key), check_shape(chunk.sizes, key)
        fits = len(offsets) == len(sizes) == len(shape)
        fits = fits and all(o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True))
        require(fits, f"{key} has a chunk {offsets} {sizes} outside its shape {shape}")
        place = places.get(offsets) or places.get(None)
        require(place is not None, f"the chunk {offsets} of {key} is nowhere")
        found = Chunk(offsets, sizes, *place)
        nbytes = found.numel * dtype.itemsize
        require(nbytes <= found.length, f"{key} has {nbytes} bytes in {found.length} bytes of a file")
        require(
            found.place is None or found.place.nbytes == nbytes, f"the size of {key} is not that of its data"
        )
        strides = found.place and found.place.strides
        require(
            strides is None or (len(strides) == len(sizes) and are_dense(sizes, strides)),
            f"the strides of {key} do not fit",
        )
        return found


def _dtype(properties: Any) -> Any:
    state = properties.state
    return state[0] if isinstance(state, tuple) and state else properties.dtype


def _is_layout(name: str) -> bool:
    return pathlib.PurePosixPath(name).name == LAYOUT


def ints(values: object, what: str) -> tuple[int, ...]:
    """``values`` as sizes or offsets. ValueError, which begins with ``what``, for what cannot be any."""
    if not isinstance(values, (tuple, list)) or not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise ValueError(f"{what}: {reprlib.repr(values)} where sizes are expected")
    return tuple(values)


def check_shape(values: object, what: str) -> tuple[int, ...]:
    sizes = ints(values, what)
    if len(sizes) > MAX_DIMS or math.prod(sizes) >= 2**62:
        raise ValueError(f"{what}: sizes {reprlib.repr(sizes)}")
    return sizes


def _place(piece: Any, start: int, length: int, what: str) -> Place | None:
    if piece is None:
        return None
    require(isinstance(piece, tuple) and len(piece) == 4, f"{what} is damaged")
    offset, nbytes, crc32, strides = piece
    ints((offset, nbytes, crc32), what)
    require(start <= offset and offset + nbytes <= start + length, f"{what} is outside its entry")
    return Place(offset, nbytes, crc32, None if strides is None else ints(strides, what))


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def do_tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes within a tensor of ``shape`` have all of its elements, and none in common.

    In a time that does not grow with their square. ValueError for many boxes in many dimensions.
    """
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    boxes = [box for box in boxes if math.prod(box[1])]
    divided = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]
    if len(boxes) << len(divided) > _MAX_CORNERS:
        raise ValueError(f"{len(boxes)} parts that are divided in {len(divided)} dimensions")
    # Which corners belong to an odd number of boxes says which elements do. If they are the tensor's own,
    # every element is in an odd number of boxes, so in one at least; and there are as many elements in boxes
    # as elements.
    odd: set[tuple[int, ...]] = set()
    for offsets, sizes in boxes:
        odd.symmetric_difference_update(
            product(*((offsets[dim], offsets[dim] + sizes[dim]) for dim in divided))
        )
    return not boxes or odd == set(product(*((0, shape[dim]) for dim in divided)))


def checked_paths(planner_data: Any, entries: dict[str, Entry]) -> dict[str, PathInDict]:
    given = planner_data if type(planner_data) is dict else {}
    paths: dict[str, PathInDict] = {}
    for key in entries:
        path = given.get(key, (key,))
        sound = isinstance(path, tuple) and path and type(path[0]) is str
        sound = sound and all(
            type(p) is str or (type(p) is int and 0 <= p < len(entries) + _MAX_GAPS) for p in path
        )
        if not sound:
            raise ValueError(f"the path of {key} in the dict is {reprlib.repr(path)}")
        paths[key] = tuple(path)
    return paths


# ----------------------------------------------------------------- checksums


def checksums_content(metadata: tuple[int, int], files: dict[str, tuple[int, int]]) -> bytes:
    """The file of checksums, of (size, CRC-32) of ``.metadata`` and of (size, framing CRC-32) by file."""
    listed: dict[str, Any] = {METADATA: dict(zip(("size", "crc32"), metadata, strict=True))}
    for name, (size, crc32) in sorted(files.items()):
        listed[name] = {"size": size, "framing_crc32": crc32}
    text = {"format": FORMAT, "version": VERSION, "algorithm": "crc32", "files": listed}
    return json.dumps(text, indent=1).encode()


def _checksums(
    folder: Path, metadata: tuple[int, int], inner: list[str]
) -> tuple[dict[str, Any] | None, CheckpointError | None]:
    """What the file says that fits ``.metadata``, or what is wrong: in ``folder``, or where its data are."""
    problem = _without_checksums(folder)
    for name in (*inner, "."):
        path = folder / name / CHECKSUMS
        if lies_in(folder, path):
            try:
                return _read_checksums(folder, path, metadata), None
            except CheckpointError as error:
                problem = error
    return None, problem


def read_checksums(folder: Path, inner: str, metadata: tuple[int, int] | None = None) -> dict[str, Any]:
    """What the file beside the data in ``inner`` says. CheckpointError if ``metadata`` are of another."""
    if not lies_in(folder, folder / inner / CHECKSUMS):
        raise _without_checksums(folder)
    return _read_checksums(folder, folder / inner / CHECKSUMS, metadata)


def _without_checksums(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder}: {CHECKSUMS} is missing (an interrupted copy?)")


def checked_sizes(folder: Path, inner: str, checksums: dict[str, Any]) -> dict[str, int]:
    """The sizes of the files listed, most in ``inner``. CheckpointError for one that is missing or torn."""
    reader = _Reader(folder)
    if inner == "." or not (folder / inner).is_symlink():
        reader.find_files(inner)
    # .metadata may be another's by now, and whoever calls has looked at the one that was opened
    reader.check_files({name: info for name, info in checksums.items() if name != METADATA})
    return reader.sizes | {METADATA: checksums[METADATA]["size"]}


def _read_checksums(folder: Path, path: Path, metadata: tuple[int, int] | None) -> dict[str, Any]:
    with refusing(lambda error: f"{path}: damaged ({error})"):
        require(path.stat().st_size <= 2**30, "too large")
        content = json.loads(path.read_bytes())
        header = {name: content.pop(name) for name in ("format", "version", "algorithm")}
        require(
            header == {"format": FORMAT, "version": VERSION, "algorithm": "crc32"}, f"unknown format {header}"
        )
        require(set(content) == {"files"}, "unknown fields")
        files: dict[str, Any] = content["files"]
        for name, info in files.items():
            kind = "crc32" if name == METADATA else "framing_crc32"
            require(set(info) == {"size", kind}, f"what it says of {name}")
            ints(tuple(info.values()), name)
        own = files[METADATA]
    if metadata is not None and (own["size"], own["crc32"]) != metadata:
        raise CheckpointError(f"{folder / METADATA}: damaged: its checksum is not the one in {path}")
    return files
