"""Reading of a checkpoint: objects, whole tensors, and parts of tensors into place."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element

from fsdp_c.checkpoint import objects
from fsdp_c.checkpoint.folder import CheckpointError, refusing
from fsdp_c.checkpoint.metadata import (
    BytesEntry,
    Checkpoint,
    Chunk,
    PathInDict,
    TensorEntry,
)
from fsdp_c.checkpoint.pieces import MAX_NBYTES, memory, narrowed, read_data
from fsdp_c.checkpoint.planning import path_below
from fsdp_c.compat.aliases import StateDict

_MAX_THREADS = 8
_JOB_NBYTES = 4 * 2**20  # that are worth a thread's turn
_UNDERWAY_NBYTES = 4 * MAX_NBYTES  # of what threads have read or will: also a bound of memory

Report = Callable[[int], object]  # takes the number of bytes that were just done


def read_chunk(checkpoint: Checkpoint, key: str, chunk: Chunk, file: BinaryIO) -> Tensor:
    """One part of a tensor, verified. Raises CheckpointError naming the file and the key."""
    if chunk.place is None:
        return _torch_load_chunk(checkpoint, key, chunk, file)
    tensor = _empty(chunk, checkpoint.tensor(key).dtype)
    _read_into(checkpoint, key, chunk, tensor, file)
    return tensor


def _empty(chunk: Chunk, dtype: torch.dtype) -> Tensor:
    assert chunk.place is not None
    if chunk.place.strides is None:
        return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
    return torch.empty_strided(chunk.sizes, chunk.place.strides, dtype=dtype, device="cpu")


def _read_into(checkpoint: Checkpoint, key: str, chunk: Chunk, tensor: Tensor, file: BinaryIO) -> None:
    assert chunk.place is not None
    if not read_data(file, chunk.place, memory(tensor)):
        raise damaged(checkpoint, chunk.file, key)


def damaged(checkpoint: Checkpoint, file: str, key: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder / file}: the data of {key} are damaged: their checksum does not match"
    )


def _torch_load_chunk(checkpoint: Checkpoint, key: str, chunk: Chunk, file: BinaryIO) -> Tensor:
    what, dtype = f"{checkpoint.folder / chunk.file}: {key}", checkpoint.tensor(key).dtype
    loaded = _torch_load(what, _content(file, chunk))
    if not isinstance(loaded, Tensor) or tuple(loaded.shape) != chunk.sizes or loaded.dtype != dtype:
        raise CheckpointError(
            f"{what} is not a tensor of shape {chunk.sizes} and {dtype}, as the metadata say"
        )
    return loaded


def _content(file: BinaryIO, part: Chunk | BytesEntry) -> bytes:
    file.seek(part.start)
    return file.read(part.length)


def _torch_load(what: str, content: bytes) -> Any:
    with refusing(lambda error: f"{what} cannot be read ({objects.reason(error)})"):
        return objects.load(content)


def read_object(checkpoint: Checkpoint, key: str) -> Any:
    """Read an object, without running code: see [Note: Names in a pickle]."""
    entry = checkpoint.entries[key]
    assert isinstance(entry, BytesEntry)
    with checkpoint.open(entry.file) as file:
        content = _content(file, entry)
    if entry.place is not None and zlib.crc32(content) != entry.place.crc32:
        raise damaged(checkpoint, entry.file, key)
    return _torch_load(f"{checkpoint.folder / entry.file}: {key}", content)


def read_tensor(checkpoint: Checkpoint, key: str) -> Tensor:
    """Read a whole tensor: the chunk that is all of it, or a copy of each."""
    entry = checkpoint.tensor(key)
    whole: Tensor | None = None
    for chunk in sorted(entry.chunks, key=lambda chunk: (chunk.file, chunk.start)):
        with checkpoint.open(chunk.file) as file:
            part = read_chunk(checkpoint, key, chunk, file)
        if tuple(part.shape) == entry.shape:
            return part
        if whole is None:
            whole = torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
        narrowed(whole, chunk.offsets, part.shape).copy_(part)
    return torch.zeros(entry.shape, dtype=entry.dtype, device="cpu") if whole is None else whole


def read_entry(checkpoint: Checkpoint, key: str) -> Any:
    """Read a whole tensor, or an object."""
    is_tensor = isinstance(checkpoint.entries[key], TensorEntry)
    return read_tensor(checkpoint, key) if is_tensor else read_object(checkpoint, key)


def put_at(checkpoint: Checkpoint, key: str, nested: StateDict, path: PathInDict, value: Any) -> None:
    """Put ``value`` into nested dicts and lists. CheckpointError where others say there are none."""
    try:
        set_element(nested, path, value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: {key} lies within what is no dict or list ({error})"
        ) from error


def read_nested(checkpoint: Checkpoint, root: str) -> Any:
    """What was saved as ``root``: one value, or a nested dict of them; None for nothing."""
    result: StateDict = {}
    for key in checkpoint.entries:
        if key == root or key.startswith(f"{root}."):
            below = path_below(checkpoint.paths[key], root) or key.removeprefix(root).split(".")[1:]
            put_at(checkpoint, key, result, ("", *below), read_entry(checkpoint, key))
    return result.get("")


class Item(NamedTuple):
    """Elements to read: where they begin in a part of a tensor, and the memory of as many."""

    key: str
    chunk: Chunk
    offsets: list[int]
    target: Tensor


def read_items(key: str, entry: TensorEntry, offsets: Sequence[int], box: Tensor) -> Iterator[Item]:
    """What to read of which chunk, to fill ``box``, which lies at ``offsets`` of a tensor."""
    for chunk in entry.find((tuple(offsets), tuple(box.shape))):
        boxes = list(zip(chunk.offsets, chunk.sizes, offsets, box.shape, strict=True))
        starts = [max(theirs, own) for theirs, _, own, _ in boxes]
        ends = [min(theirs + size, own + length) for theirs, size, own, length in boxes]
        own = map(int.__sub__, starts, offsets)
        target = narrowed(box, own, map(int.__sub__, ends, starts))
        yield Item(key, chunk, list(map(int.__sub__, starts, chunk.offsets)), target)


class _Part(NamedTuple):
    """A part of a file, and what is wanted of it."""

    key: str
    chunk: Chunk
    wanted: list[Item]
    data: Tensor | None  # into which it is read: a target, or of its own; None for what torch wrote


class _Job(NamedTuple):
    """Parts of one file that one thread reads."""

    parts: list[_Part]
    nbytes: int


class Reader:
    """Reads parts of tensors into place, each part of a file once, in the order of the file.

    [Note: Threads of a load]
    Threads read and sum up bytes; tensors are made, and copied from, by the caller's. A job of one is some
    MiB, so that small tensors do not wait for each other. Jobs end in their order: of errors the first is
    raised, and tensors that share memory have the values of the last.
    """

    def __init__(self, checkpoint: Checkpoint, report: Report | None = None) -> None:
        self.checkpoint = checkpoint
        self.report = report or (lambda nbytes: None)

    def read(self, items: Iterable[Item]) -> None:
        """Fill the memory of each. Raises CheckpointError; what was read until then stays."""
        by_chunk: dict[tuple[str, Chunk], list[Item]] = {}
        for item in items:
            by_chunk.setdefault((item.key, item.chunk), []).append(item)
        of_chunks = sorted(
            by_chunk.values(), key=lambda wanted: wanted[0].chunk[2:4]
        )  # by file, and place in it
        seen: set[int] = set()  # where targets begin
        parts = (self._part(wanted, seen) for wanted in of_chunks)
        underway: deque[tuple[_Job, Future[None]]] = deque()
        with ThreadPoolExecutor(reading_threads()) as pool:
            for job in _jobs(parts):
                underway.append((job, pool.submit(self._fill, job)))
                while sum(one.nbytes for one, _ in underway) > _UNDERWAY_NBYTES:
                    self._finish(*underway.popleft())
            while underway:
                self._finish(*underway.popleft())

    def _part(self, wanted: list[Item], seen: set[int]) -> _Part:
        key, chunk, _, target = wanted[0]
        dtype = self.checkpoint.tensor(key).dtype
        known = len(seen)
        seen.update(item.target.data_ptr() for item in wanted)
        if chunk.place is None:
            data = None
        elif len(seen) - known == len(wanted) == 1 and _can_read_into(chunk, dtype, target):
            data = target
        else:
            data = _empty(chunk, dtype)
        return _Part(key, chunk, wanted, data)

    def _fill(self, job: _Job) -> None:
        with self.checkpoint.open(job.parts[0].chunk.file) as file:
            for part in job.parts:
                if part.data is not None:
                    _read_into(self.checkpoint, part.key, part.chunk, part.data, file)

    def _finish(self, job: _Job, filled: Future[None]) -> None:
        filled.result()
        for key, chunk, wanted, data in job.parts:
            if data is None:
                with self.checkpoint.open(chunk.file) as file:
                    data = _torch_load_chunk(self.checkpoint, key, chunk, file)
            if data is not wanted[0].target:
                for item in wanted:
                    item.target.copy_(narrowed(data, item.offsets, item.target.shape))
            self.report(sum(item.target.nbytes for item in wanted))


def reading_threads() -> int:
    """This rank's part of the processors that its process may use, at most 8."""
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


def _jobs(parts: Iterable[_Part]) -> Iterator[_Job]:
    for _, of_file in itertools.groupby(parts, lambda part: part.chunk.file):
        job: list[_Part] = []
        nbytes = 0
        for part in of_file:
            job.append(part)
            nbytes += part.chunk.length
            if nbytes >= _JOB_NBYTES:
                yield _Job(job, nbytes)
                job, nbytes = [], 0
        if job:
            yield _Job(job, nbytes)


def _can_read_into(chunk: Chunk, dtype: torch.dtype, target: Tensor) -> bool:
    """Whether a target is all of a chunk, and lies in memory as the chunk does in the file."""
    if chunk.place is None or tuple(target.shape) != chunk.sizes:
        return False
    if target.device.type != "cpu" or target.dtype != dtype or target.is_conj() or target.is_neg():
        return False
    if chunk.place.strides is None:
        return target.is_contiguous()
    return target.stride() == chunk.place.strides
