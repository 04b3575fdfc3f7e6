"""Reading what DCP's ``.metadata`` says, without trusting it.

``.metadata`` is read as [Note: A pickle from a stranger] says. Then every value is checked: types, sizes
against the files that are there, names of files. A ``Checkpoint`` remains, from which all readers work.
"""

from __future__ import annotations

import errno
import functools
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
    LAYOUT,
    METADATA,
    CheckpointError,
    Footer,
    footer_of,
    locate,
    refusing,
    require,
)
from fsdp_c.checkpoint.pickles import read_metadata
from fsdp_c.checkpoint.pieces import Place
from fsdp_c.sharding.common import collector_paused
from fsdp_c.sharding.flattening import are_dense

_MAX_METADATA_NBYTES = 8 * 2**30
MAX_DIMS = 64  # as torch has it for most operations
_MAX_GAPS = 1000  # in nested lists, whose elements are entries
_MAX_CORNERS = 2**24  # of boxes, in all: looked at in seconds


def _kind(value: object) -> str:
    return type(value).__name__


# ----------------------------------------------------------------- checked values

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


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


def overlap(one: Box, other: Box) -> bool:
    each = zip(*one, *other, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in each)


@dataclass(eq=False)
class TensorEntry:
    """A tensor. Its chunks are made, and looked at, when they are asked for: CheckpointError then."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    find: Callable[[Box | None], Iterable[Chunk]]  # the chunks with elements of a box, or all of them

    @property
    def chunks(self) -> list[Chunk]:
        return [*self.find(None)]

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


class Files:
    """The files of a checkpoint, by their paths in its folder."""

    def __init__(self, folder: Path, footer: Footer | None) -> None:
        """CheckpointError for a file in ``footer`` that is missing or torn. A layout may be missing: copies of a
        checkpoint need none."""
        self.folder = folder
        self.sizes: dict[str, int] = {}
        # CRC-32 of all bytes but the data of pieces; empty for torch's checkpoints
        self.framing: dict[str, int] = {}
        if footer is None:
            return
        data = folder / footer.data
        if data.is_dir() and not data.is_symlink():
            with os.scandir(data) as found:  # many sizes at once; those of links one by one
                self.sizes = {
                    f"{footer.data}/{each.name}": each.stat().st_size
                    for each in found
                    if each.name in footer.files and each.is_file(follow_symlinks=False)
                }
        for name, (size, crc32) in footer.files.items():
            path = f"{footer.data}/{name}"
            if name == LAYOUT and not (folder / path).is_file():
                continue
            self.framing[path] = crc32
            if self.size(path) != size and name != LAYOUT:
                raise CheckpointError(
                    f"{folder / path}: {self.size(path)} bytes where {size} were written: torn or replaced"
                )

    def size(self, name: Any) -> int:
        """The size of a file. A name that leads out of the folder is refused."""
        require(type(name) is str, "the name of a file is no text")
        if name not in self.sizes:
            parts = pathlib.PurePosixPath(name).parts
            safe = parts and ".." not in parts and not name.startswith("/") and "\0" not in name
            require(safe, f"the file name {name!r} leads out of the folder")
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing")
            inside = path.resolve().is_relative_to(self.folder.resolve())
            require(inside, f"{name!r} is a link out of the folder")
            self.sizes[name] = path.stat().st_size
        return self.sizes[name]

    def check_end(self, name: str, end: int, key: str) -> None:
        """CheckpointError where a file ends before the end of ``key`` in it."""
        if end > (size := self.size(name)):
            raise CheckpointError(f"{self.folder / name}: {size} bytes, but {key} ends at {end}: torn")

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


@dataclass
class Checkpoint:
    """What a checkpoint folder contains."""

    files: Files
    entries: dict[str, Entry]
    paths: dict[str, PathInDict]  # of each key in the nested dict that was saved
    identity: tuple[int, int]  # size and CRC-32 of its metadata
    held: dict[str, BinaryIO] = field(default_factory=dict)  # files that stay open

    def __post_init__(self) -> None:
        self.folder, self.file_sizes, self.framing = self.files.folder, self.files.sizes, self.files.framing
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
        """Give back what chunks are made of, once all that are wanted have been asked for."""
        for entry in self.entries.values():
            if isinstance(entry, TensorEntry):
                del entry.find


def _close_all(files: dict[str, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()


def read_checkpoint(path: Path, *, whole: bool = True) -> Checkpoint:
    """The contents of the folder ``path``, as its ``.metadata`` tells them; tensors' data are not read.

    Not ``whole``: chunks of tensors are looked at when they are asked for, and damage raises then.
    FileNotFoundError for no checkpoint, CheckpointError for one that is damaged or not of DCP.
    """
    folder = locate(path)
    with _reading(folder):
        with (folder / METADATA).open("rb") as file:
            footer = footer_of(file, folder, compare=True)
            size = os.fstat(file.fileno()).st_size
            require(size <= _MAX_METADATA_NBYTES, f"it has {size} bytes")
            file.seek(0)
            content = file.read()
        files = Files(folder, footer)
        entries, paths = _Reader(files).read(content, is_ours=footer is not None)
        if whole:
            _make_all(entries)
        identity = footer.identity if footer else (len(content), zlib.crc32(content))
        return Checkpoint(files, entries, paths, identity)


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
    """Makes entries of what a pickle says."""

    def __init__(self, files: Files) -> None:
        self.files, self.folder = files, files.folder

    def read(self, content: bytes, is_ours: bool) -> tuple[dict[str, Entry], dict[str, PathInDict]]:
        metadata = read_metadata(content)
        require(_kind(metadata) == "Metadata", "it does not hold the metadata of a checkpoint")
        require(type(metadata.state_dict_metadata) is dict, "it has no entries")
        require(type(metadata.storage_data) is dict, "it does not say where entries are")
        stored, has_pieces = self._stored(metadata.storage_data)
        entries = {}
        for key, value in metadata.state_dict_metadata.items():
            require(type(key) is str, f"a key is {type(key).__name__}")
            entries[key] = self._entry(key, value, stored.get(key, []))
        if has_pieces and not is_ours:
            _make_all(entries)  # what is wrong with an entry says more
            raise CheckpointError(
                f"{self.folder / METADATA}: its last line, which has its checksum, is missing or damaged (an "
                "interrupted copy?)"
            )
        return entries, checked_paths(metadata.planner_data, entries)

    def _stored(self, storage_data: dict[Any, Any]) -> tuple[dict[str, list[tuple[Any, Any]]], bool]:
        """The places by key, of which no more is looked at than the file; and whether any is of fsdp_c."""
        stored: dict[str, list[tuple[Any, Any]]] = {}
        has_pieces = False
        for index, info in storage_data.items():
            require(_kind(index) == "MetadataIndex" and type(index.fqn) is str, "an index is something else")
            require(_kind(info) == "_StorageInfo", f"the place of {index.fqn} is {_kind(info)}")
            self.files.size(info.relative_path)
            has_pieces = has_pieces or info.piece is not None
            stored.setdefault(index.fqn, []).append((index.offset, info))
        return stored, has_pieces

    def _places(
        self, key: str, stored: list[tuple[Any, Any]]
    ) -> dict[Any, tuple[str, int, int, Place | None]]:
        """The places of one key, by offsets."""
        places, what = {}, f"the place of {key}"
        for index, info in stored:
            require(not info.transform_descriptors, f"{key} is compressed or encrypted")
            offset = None if index is None else ints(index, what)
            start, length = ints((info.offset, info.length), what)
            self.files.check_end(info.relative_path, start + length, key)
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

        @functools.cache
        def chunks() -> list[Chunk]:
            with _reading(self.folder):
                return self._chunks(key, shape, dtype, value.chunks, self._places(key, stored))

        def find(box: Box | None) -> Iterable[Chunk]:
            return (each for each in chunks() if box is None or overlap(box, each[:2]))

        return TensorEntry(shape, dtype, find)

    def _chunks(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, raw: list[Any], places: Any
    ) -> list[Chunk]:
        kinds = {"ChunkStorageMetadata", *map(_kind, raw)}
        require(len(kinds) == 1, f"{key} has chunks of other kinds: {kinds}")
        boxes = [(ints(each.offsets, key), check_shape(each.sizes, key)) for each in raw]
        check_boxes(key, shape, dtype, boxes, self.files)
        return [self._chunk(key, dtype, box, places.get(box[0]) or places.get(None)) for box in boxes]

    def _chunk(self, key: str, dtype: torch.dtype, box: Box, place: Any) -> Chunk:
        require(place is not None, f"the chunk {box[0]} of {key} is nowhere")
        found = Chunk(*box, *place)
        nbytes = found.numel * dtype.itemsize
        require(nbytes <= found.length, f"{key} has {nbytes} bytes in {found.length} bytes of a file")
        if found.place is not None:
            strides = found.place.strides
            fits = strides is None or (len(strides) == len(found.sizes) and are_dense(found.sizes, strides))
            require(
                found.place.nbytes == nbytes and fits, f"the size or strides of {key} do not fit its data"
            )
        return found


def _dtype(properties: Any) -> Any:
    state = properties.state
    return state[0] if isinstance(state, tuple) and state else properties.dtype


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


def check_boxes(
    key: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box], files: Files
) -> None:
    """ValueError unless the boxes are a tensor, each element once, which the files can hold."""
    for offsets, sizes in boxes:
        fits = len(offsets) == len(sizes) == len(shape)
        fits = fits and all(o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True))
        require(fits, f"{key} has a chunk {offsets} {sizes} outside its shape {shape}")
    total = sum(math.prod(sizes) for _, sizes in boxes)
    require(total == math.prod(shape), f"the chunks of {key} have {total} elements, its shape is {shape}")
    require(total * dtype.itemsize <= files.nbytes, f"{key} is larger than all files")
    require(do_tile(boxes, shape), f"chunks of {key} overlap")


def _place(piece: Any, start: int, length: int, what: str) -> Place | None:
    if piece is None:
        return None
    require(isinstance(piece, tuple) and len(piece) == 4, f"{what} is damaged")
    offset, nbytes, crc32, strides = piece
    ints((offset, nbytes, crc32), what)
    require(start <= offset and offset + nbytes <= start + length, f"{what} is outside its entry")
    return Place(offset, nbytes, crc32, None if strides is None else ints(strides, what))


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
