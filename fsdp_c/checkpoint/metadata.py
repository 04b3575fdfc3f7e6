"""Contents of a checkpoint, and the reader of torch's ``.metadata``, which is not trusted.

Every value is validated: types, sizes against those of files, names of files. The result is a ``Checkpoint``,
used by all readers.

[Note: A pickle from a stranger]
A pickle can call every function that it names, and set attributes of every class that it names. Therefore
classes of DCP are replaced by empty classes created for one read, and other names are refused. A few bytes
can also request all memory, by the size of a string or of the memo: such a pickle is refused before it is
loaded.
"""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import pathlib
import pickle
import pickletools
import re
import reprlib
import resource
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fsdp_c.checkpoint.folder import DATA, METADATA, CheckpointError, Footer, refusing, require
from fsdp_c.sharding.common import collector_paused

_MAX_METADATA_NBYTES = 8 * 2**30
MAX_DIMS = 64  # torch's limit in most operations
_MAX_GAPS = 1000  # maximum number of unused indices in nested lists, whose elements are entries
_MAX_CORNERS = 2**24  # limit of boxes' corners in total: checked within seconds


def _kind(value: object) -> str:
    return type(value).__name__


# ----------------------------------------------------------------- validated values

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


class Chunk(NamedTuple):
    """Part of a tensor, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # start of the data; for torch's files, start of the file that torch.save wrote
    nbytes: int
    crc32: int | None = None  # checksum of the data; None for torch's files
    strides: tuple[int, ...] | None = None  # None for contiguous data


def overlap(one: Box, other: Box) -> bool:
    each = zip(*one, *other, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in each)


@dataclass(eq=False)
class TensorEntry:
    """A tensor. Its chunks are created and validated on access, which may raise CheckpointError."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # returns the chunks with elements of a box, or all for None
    find: Callable[[Box | None], Iterable[Chunk]]

    @property
    def chunks(self) -> list[Chunk]:
        return [*self.find(None)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class BytesEntry:
    """An object pickled by torch.save."""

    file: str
    start: int
    nbytes: int
    crc32: int | None = None  # None for torch's files


Entry = TensorEntry | BytesEntry
PathInDict = tuple[str | int, ...]


class Checkpoint:
    """The folder of a checkpoint, its files, and their contents."""

    def __init__(self, folder: Path, footer: Footer | None, identity: tuple[int, int]) -> None:
        """Set the sizes of files. ``identity``: size and CRC-32 of ``.metadata``.

        Raises CheckpointError for a file in ``footer`` that is missing or truncated.
        """
        self.folder, self.footer, self.identity = folder, footer, identity
        self.entries: dict[str, Entry] = {}
        self.paths: dict[str, PathInDict] = {}  # path of each key in the saved nested dict
        self.sizes: dict[str, int] = {}  # sizes of files, by path in the folder
        self.held: dict[str, BinaryIO] = {}  # files kept open
        weakref.finalize(self, _close_all, self.held)
        if footer is None:
            return
        data = folder / footer.data
        if data.is_dir() and not data.is_symlink():
            with os.scandir(data) as found:  # one scan for all sizes; links are checked one by one
                self.sizes = {
                    f"{footer.data}/{each.name}": each.stat().st_size
                    for each in found
                    if each.name in footer.files and each.is_file(follow_symlinks=False)
                }
        for name, (size, _) in footer.files.items():
            if (written := self.size(f"{footer.data}/{name}")) != size:
                raise CheckpointError(
                    f"{data / name}: {written} bytes where {size} were written: torn or replaced"
                )

    def size(self, name: Any) -> int:
        """Return the size of a file. Raise for a name that leads out of the folder."""
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
        """Raise CheckpointError if a file ends before the end of ``key`` in it."""
        if end > (size := self.size(name)):
            raise CheckpointError(f"{self.folder / name}: {size} bytes, but {key} ends at {end}: torn")

    @functools.cached_property
    def nbytes(self) -> int:
        """Total size of the files of all entries."""
        return sum(self.sizes.values())

    def tensor(self, key: str) -> TensorEntry:
        """Return the entry of a key known to be a tensor."""
        entry = self.entries[key]
        assert isinstance(entry, TensorEntry)
        return entry

    def hold(self, names: Iterable[str]) -> None:
        """Open files now, so that reads do not depend on a later replacement of the checkpoint.

        Limited to half of the files that the process may open.
        """
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for name in sorted({*names} - {*self.held})[: max(0, room - len(self.held))]:
            self.held[name] = (self.folder / name).open("rb")

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reads at any offset. Raise CheckpointError if it no longer exists."""
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
        """Close all files."""
        _close_all(self.held)
        self.entries = {}  # their readers hold the layout's file


def _close_all(files: dict[str, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Context for the creation of ``.metadata``'s entries, up to hundreds of thousands."""
    say = f"{folder / METADATA}: damaged, or not written by DCP"
    with collector_paused(), refusing(lambda error: f"{say} ({error})"):
        yield


def checkpoint_of_torch(folder: Path, file: BinaryIO) -> Checkpoint:
    """Return the checkpoint described by ``.metadata``, opened as ``file``. Chunks are validated on access."""
    with reading(folder):
        size = os.fstat(file.fileno()).st_size
        require(size <= _MAX_METADATA_NBYTES, f"it has {size} bytes")
        file.seek(0)
        content = file.read()
        checkpoint = Checkpoint(folder, None, (len(content), zlib.crc32(content)))
        _MetadataReader(checkpoint).read(content)
    return checkpoint


class _MetadataReader:
    """Converter of an unpickled ``Metadata`` into entries."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def read(self, content: bytes) -> None:
        metadata = read_metadata(content)
        require(_kind(metadata) == "Metadata", "it does not hold the metadata of a checkpoint")
        require(type(metadata.state_dict_metadata) is dict, "it has no entries")
        require(type(metadata.storage_data) is dict, "it does not say where entries are")
        stored = self._stored(metadata.storage_data)
        entries = self.checkpoint.entries
        for key, value in metadata.state_dict_metadata.items():
            require(type(key) is str, f"a key is {type(key).__name__}")
            entries[key] = self._entry(key, value, stored.get(key, []))
        self.checkpoint.paths = checked_paths(metadata.planner_data, entries)

    def _stored(self, storage_data: dict[Any, Any]) -> dict[str, list[tuple[Any, Any]]]:
        """Return (index, place) of all entries by key. Only file names are validated here."""
        stored: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in storage_data.items():
            require(_kind(index) == "MetadataIndex" and type(index.fqn) is str, "an index is something else")
            require(_kind(info) == "_StorageInfo", f"the place of {index.fqn} is {_kind(info)}")
            self.checkpoint.size(info.relative_path)
            if DATA.match(info.relative_path):
                raise CheckpointError(
                    f"{self.checkpoint.folder / METADATA}: its last line, which has its checksum, is missing or "
                    "damaged (an interrupted copy?)"
                )
            stored.setdefault(index.fqn, []).append((index.offset, info))
        return stored

    def _places(self, key: str, stored: list[tuple[Any, Any]]) -> dict[Any, tuple[str, int, int]]:
        """Return (file, start, length) by offsets, for one key."""
        places, what = {}, f"the place of {key}"
        for index, info in stored:
            require(not info.transform_descriptors, f"{key} is compressed or encrypted")
            offset = None if index is None else ints(index, what)
            start, length = ints((info.offset, info.length), what)
            self.checkpoint.check_end(info.relative_path, start + length, key)
            places[offset] = info.relative_path, start, length
        return places

    def _entry(self, key: str, value: Any, stored: list[tuple[Any, Any]]) -> Entry:
        if _kind(value) == "BytesStorageMetadata":
            places = self._places(key, stored)
            require(None in places, f"{key} is nowhere")
            return BytesEntry(*places[None])
        require(_kind(value) == "TensorStorageMetadata", f"{key} is {_kind(value)}")
        shape = check_shape(value.size, key)
        state = value.properties.state
        dtype = state[0] if isinstance(state, tuple) and state else value.properties.dtype
        require(
            isinstance(dtype, torch.dtype) and type(value.chunks) is list, f"{key} has no dtype or chunks"
        )

        @functools.cache
        def chunks() -> list[Chunk]:
            with reading(self.checkpoint.folder):
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
        check_boxes(key, shape, dtype, boxes, self.checkpoint)
        return [self._chunk(key, dtype, box, places.get(box[0]) or places.get(None)) for box in boxes]

    def _chunk(self, key: str, dtype: torch.dtype, box: Box, place: tuple[str, int, int] | None) -> Chunk:
        if place is None:
            raise ValueError(f"the chunk {box[0]} of {key} is nowhere")
        (file, start, length), nbytes = place, math.prod(box[1]) * dtype.itemsize
        require(nbytes <= length, f"{key} has {nbytes} bytes in {length} bytes of a file")
        return Chunk(*box, file, start, length)


def ints(values: object, what: str) -> tuple[int, ...]:
    """Return ``values`` as sizes or offsets. Raise ValueError, with ``what`` as its first words, for invalid ones."""
    if not isinstance(values, (tuple, list)) or not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise ValueError(f"{what}: {reprlib.repr(values)} where sizes are expected")
    return tuple(values)


def check_shape(values: object, what: str) -> tuple[int, ...]:
    sizes = ints(values, what)
    if len(sizes) > MAX_DIMS or math.prod(sizes) >= 2**62:
        raise ValueError(f"{what}: sizes {reprlib.repr(sizes)}")
    return sizes


def check_boxes(
    key: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box], checkpoint: Checkpoint
) -> None:
    """Raise ValueError unless the boxes cover the tensor, each element once, and fit into the files."""
    for offsets, sizes in boxes:
        fits = len(offsets) == len(sizes) == len(shape)
        fits = fits and all(o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True))
        require(fits, f"{key} has a chunk {offsets} {sizes} outside its shape {shape}")
    total = sum(math.prod(sizes) for _, sizes in boxes)
    require(total == math.prod(shape), f"the chunks of {key} have {total} elements, its shape is {shape}")
    require(total * dtype.itemsize <= checkpoint.nbytes, f"{key} is larger than all files")
    require(do_tile(boxes, shape), f"chunks of {key} overlap")


def do_tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return True if boxes within a tensor of ``shape`` cover all of its elements without overlap.

    Time is less than quadratic in the number of boxes. Raises ValueError for many boxes divided in many
    dimensions.
    """
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    boxes = [box for box in boxes if math.prod(box[1])]
    divided = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]
    if len(boxes) << len(divided) > _MAX_CORNERS:
        raise ValueError(f"{len(boxes)} parts that are divided in {len(divided)} dimensions")
    # Corners of an odd number of boxes determine which elements are in an odd number of boxes. If they are
    # the tensor's own corners, every element is in an odd number of boxes, and therefore in at least one. The
    # total number of elements in boxes equals the tensor's, so each is in exactly one.
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
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = (state[0] or {}) | state[1]  # state of a class with slots
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


def dtype_named(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


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
    return re.compile(b"(?:%s){0,4096}" % b"|".join(each), re.DOTALL)


_FIXED = _fixed_opcodes()


def _check_sizes(content: bytes) -> None:
    """Raise ValueError for a pickle that announces more bytes than it has, or a memo larger than itself."""
    file, at = io.BytesIO(content), 0
    while at < len(content):
        found = _FIXED.match(content, at)
        if found is not None and found.end() > at:
            at = found.end()
            continue
        op = _OPCODES.get(content[at])
        if op is None or op.arg is None:
            return  # the end, or damage
        file.seek(at + 1)
        argument = op.arg.reader(file)  # raises ValueError for missing bytes
        require(op.name not in _PUTS or argument <= at, f"its memo would have {argument} places")
        at = file.tell()
