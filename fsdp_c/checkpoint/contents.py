"""Contents of a checkpoint: its entries, the places of their data, and its files.

A checkpoint is not trusted: every value is validated when it is read, by types, names of files, and sizes
against those of files.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fsdp_c.checkpoint.folder import CheckpointError, Footer, require

MAX_DIMS = 64  # torch's limit in most operations
_MAX_GAPS = 1000  # maximum number of unused indices in nested lists, whose elements are entries
_MAX_CORNERS = 2**24  # limit of boxes' corners in total: checked within seconds

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
                    f"{data / name}: {written} bytes, but {size} were written: truncated or replaced"
                )

    def size(self, name: Any) -> int:
        """Return the size of a file. Raise for a name that leads out of the folder."""
        require(type(name) is str, "a file name is not a string")
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
            raise CheckpointError(f"{self.folder / name}: {size} bytes, but {key} ends at {end}: truncated")

    @functools.cached_property
    def nbytes(self) -> int:
        """Total size of the files of all entries."""
        return sum(self.sizes.values())

    def tensor(self, key: str) -> TensorEntry:
        """Return the entry of a key known to be a tensor."""
        entry = self.entries[key]
        assert isinstance(entry, TensorEntry)
        return entry

    def keep_open(self, names: Iterable[str]) -> None:
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
                f"{self.folder / name}: disappeared while the checkpoint was read. If another "
                "checkpoint has replaced it, read again"
            ) from error

    def close(self) -> None:
        """Close all files."""
        _close_all(self.held)
        self.entries = {}  # their readers refer to this object


def _close_all(files: dict[str, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()


# ----------------------------------------------------------------- checks of values


def dtype_named(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def ints(values: object, what: str) -> tuple[int, ...]:
    """Return ``values`` as sizes or offsets. Raise ValueError, with ``what`` as its first words, for invalid ones."""
    if not isinstance(values, (tuple, list)) or not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise ValueError(f"{what}: {reprlib.repr(values)} is not a list of sizes or offsets")
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
    require(total == math.prod(shape), f"the chunks of {key} have {total} elements, but its shape is {shape}")
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
