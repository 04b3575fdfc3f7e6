"""Readers of a checkpoint: contents, objects, full tensors, and parts of tensors directly into place."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element

from fsdp_c.checkpoint import objects
from fsdp_c.checkpoint.contents import BytesEntry, Checkpoint, Chunk, PathInDict, TensorEntry
from fsdp_c.checkpoint.folder import CheckpointError, check_is_checkpoint, read_footer
from fsdp_c.checkpoint.layout_file import read_layout
from fsdp_c.checkpoint.metadata import checkpoint_of_torch
from fsdp_c.checkpoint.pieces import MAX_NBYTES, memory, narrow_box, read_data
from fsdp_c.checkpoint.planning import path_below
from fsdp_c.compat.aliases import StateDict

_MAX_THREADS = 8
_JOB_NBYTES = 4 * 2**20  # minimum size of a thread's job
_UNDERWAY_NBYTES = 4 * MAX_NBYTES  # maximum size of running and queued jobs; also a limit of memory


def read_checkpoint(path: Path, *, compare: bool = True) -> Checkpoint:
    """Return the contents of the folder ``path`` without tensors' data, from its layout or torch's ``.metadata``.

    ``compare``: verify both files by their checksums. Raises FileNotFoundError if there is no checkpoint,
    CheckpointError for one that is damaged or not DCP's.
    """
    check_is_checkpoint(path)
    footer = read_footer(path, compare=compare)
    return checkpoint_of_torch(path) if footer is None else read_layout(path, footer, compare)


def read_chunk(checkpoint: Checkpoint, key: str, chunk: Chunk) -> Tensor:
    """Return one verified part of a tensor. Raise CheckpointError naming file and key."""
    dtype = checkpoint.tensor(key).dtype
    if chunk.crc32 is not None:
        tensor = _empty(chunk.sizes, chunk.strides, dtype)
        with checkpoint.open(chunk.file) as file:
            _read_into(checkpoint, key, chunk, tensor, file)
        return tensor
    loaded = read_object(checkpoint, key, chunk)
    if not isinstance(loaded, Tensor) or tuple(loaded.shape) != chunk.sizes or loaded.dtype != dtype:
        raise CheckpointError(
            f"{checkpoint.folder / chunk.file}: {key} is not a tensor of shape {chunk.sizes} and {dtype}, as the "
            "metadata say"
        )
    return loaded


def _empty(sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    if strides is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


def _read_into(checkpoint: Checkpoint, key: str, chunk: Chunk, tensor: Tensor, file: BinaryIO) -> None:
    assert chunk.crc32 is not None
    if not read_data(file, chunk.start, chunk.crc32, memory(tensor)):
        raise _damaged(checkpoint, chunk.file, key)


def _damaged(checkpoint: Checkpoint, file: str, key: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder / file}: the data of {key} are damaged: their checksum does not match"
    )


def read_object(checkpoint: Checkpoint, key: str, part: BytesEntry | Chunk) -> Any:
    """Read what torch.save wrote, without code execution: see [Note: Names in a pickle]."""
    with checkpoint.open(part.file) as file:
        file.seek(part.start)
        content = file.read(part.nbytes)
    if part.crc32 is not None and zlib.crc32(content) != part.crc32:
        raise _damaged(checkpoint, part.file, key)
    try:
        return objects.load(content)
    except Exception as error:
        path = checkpoint.folder / part.file
        raise CheckpointError(f"{path}: {key} cannot be read ({objects.reason(error)})") from error


def read_entries(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, Any]:
    """Read full tensors, and objects, by key."""
    found: dict[str, Any] = {}
    items: list[Item] = []
    for key in keys:
        entry = checkpoint.entries[key]
        if isinstance(entry, BytesEntry):
            found[key] = read_object(checkpoint, key, entry)
        else:
            chunks = entry.chunks
            strides = chunks[0].strides if len(chunks) == 1 else None
            found[key] = _empty(entry.shape, strides, entry.dtype)
            items += items_of(key, entry, (0,) * len(entry.shape), found[key])
    read_items(checkpoint, items)
    return found


def set_nested(checkpoint: Checkpoint, key: str, nested: StateDict, path: PathInDict, value: Any) -> None:
    """Store ``value`` in nested dicts and lists. Raise CheckpointError if paths conflict."""
    try:
        set_element(nested, path, value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: {key} is below a value that is no dict or list ({error})"
        ) from error


def read_nested(checkpoint: Checkpoint, root: str) -> Any:
    """Read the value saved as ``root``: one object or tensor, or a nested dict of them; None if missing."""
    result: StateDict = {}
    keys = [key for key in checkpoint.entries if key == root or key.startswith(f"{root}.")]
    for key, value in read_entries(checkpoint, keys).items():
        below = path_below(checkpoint.paths[key], root) or key.removeprefix(root).split(".")[1:]
        set_nested(checkpoint, key, result, ("", *below), value)
    return result.get("")


class Item(NamedTuple):
    """Elements to read: their offsets in a part of a tensor, and the target memory."""

    key: str
    chunk: Chunk
    offsets: list[int]
    target: Tensor


def items_of(key: str, entry: TensorEntry, offsets: Sequence[int], box: Tensor) -> Iterator[Item]:
    """Yield the items of all chunks that fill ``box``, at ``offsets`` of a tensor."""
    for chunk in entry.find((tuple(offsets), tuple(box.shape))):
        boxes = list(zip(chunk.offsets, chunk.sizes, offsets, box.shape, strict=True))
        starts = [max(theirs, own) for theirs, _, own, _ in boxes]
        ends = [min(theirs + size, own + length) for theirs, size, own, length in boxes]
        own = map(int.__sub__, starts, offsets)
        target = narrow_box(box, own, map(int.__sub__, ends, starts))
        yield Item(key, chunk, list(map(int.__sub__, starts, chunk.offsets)), target)


class _Part(NamedTuple):
    """Part of a file, and the items in it."""

    key: str
    chunk: Chunk
    wanted: list[Item]
    data: Tensor | None  # memory to read into: a target, or separate memory; None for torch's files


def read_items(checkpoint: Checkpoint, items: Iterable[Item]) -> None:
    """Fill the memory of each item. Every part of a file is read once, in file order.

    Raises CheckpointError; elements read before are kept.

    [Note: Threads of a load]
    Threads read bytes and compute checksums; the caller's thread creates tensors and copies from them. A job
    has some MiB, so that small tensors do not wait for each other. Jobs are finished in order: the first of
    several errors is raised, and tensors that share memory have the values of the last.
    """
    by_chunk: dict[tuple[str, Chunk], list[Item]] = {}
    for item in items:
        by_chunk.setdefault((item.key, item.chunk), []).append(item)
    in_order = sorted(by_chunk.values(), key=lambda wanted: (wanted[0].chunk.file, wanted[0].chunk.start))
    seen: set[int] = set()  # addresses of targets
    underway: deque[tuple[int, list[_Part], Future[None]]] = deque()  # (size, parts, future) of each job
    with ThreadPoolExecutor(reading_threads()) as pool:
        for nbytes, job in _group_jobs(_part(checkpoint, wanted, seen) for wanted in in_order):
            underway.append((nbytes, job, pool.submit(_read_job, checkpoint, job)))
            while sum(each[0] for each in underway) > _UNDERWAY_NBYTES:
                _finish(checkpoint, *underway.popleft()[1:])
        while underway:
            _finish(checkpoint, *underway.popleft()[1:])


def _part(checkpoint: Checkpoint, wanted: list[Item], seen: set[int]) -> _Part:
    key, chunk, _, target = wanted[0]
    dtype = checkpoint.tensor(key).dtype
    is_shared = len(wanted) > 1 or target.data_ptr() in seen
    seen.update(item.target.data_ptr() for item in wanted)
    if chunk.crc32 is None:
        data = None
    elif not is_shared and _can_read_into(chunk, dtype, target):
        data = target
    else:
        data = _empty(chunk.sizes, chunk.strides, dtype)
    return _Part(key, chunk, wanted, data)


def _read_job(checkpoint: Checkpoint, job: list[_Part]) -> None:
    with checkpoint.open(job[0].chunk.file) as file:
        for part in job:
            if part.data is not None:
                _read_into(checkpoint, part.key, part.chunk, part.data, file)


def _finish(checkpoint: Checkpoint, job: list[_Part], filled: Future[None]) -> None:
    filled.result()
    for key, chunk, wanted, data in job:
        if data is None:
            data = read_chunk(checkpoint, key, chunk)
        if data is not wanted[0].target:
            for item in wanted:
                item.target.copy_(narrow_box(data, item.offsets, item.target.shape))


def reading_threads() -> int:
    """Return this rank's share of the processors available to its process, at most 8."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


def _group_jobs(parts: Iterable[_Part]) -> Iterator[tuple[int, list[_Part]]]:
    """Yield (size, parts of one file) for one thread."""
    for _, of_file in itertools.groupby(parts, lambda part: part.chunk.file):
        job: list[_Part] = []
        nbytes = 0
        for part in of_file:
            job.append(part)
            nbytes += part.chunk.nbytes
            if nbytes >= _JOB_NBYTES:
                yield nbytes, job
                job, nbytes = [], 0
        if job:
            yield nbytes, job


def _can_read_into(chunk: Chunk, dtype: torch.dtype, target: Tensor) -> bool:
    """Return True if a target is all of a chunk, with the memory layout of the file."""
    if tuple(target.shape) != chunk.sizes or not target.data_ptr():
        return False
    if target.device.type != "cpu" or target.dtype != dtype or target.is_conj() or target.is_neg():
        return False
    return target.is_contiguous() if chunk.strides is None else target.stride() == chunk.strides
