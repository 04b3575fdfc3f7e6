"""Checkpoints of several formats, read tensor by tensor, without ranks and in the memory of one tensor."""

from __future__ import annotations

import json
import math
import pathlib
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_c.checkpoint.archives import crc32_of, open_file, read_into
from fsdp_c.checkpoint.folder import (
    LAYOUT,
    METADATA,
    CheckpointError,
    check_path,
    is_checkpoint,
    refusing,
    unless_replaced,
)
from fsdp_c.checkpoint.metadata import MAX_DIMS, Checkpoint, TensorEntry, do_tile, ints, read_checkpoint
from fsdp_c.checkpoint.storage import Info, Source, joined, read_chunk, read_entry, read_object
from fsdp_c.checkpoint.torch_files import RankFilesSource, TorchSource, holds_parts

FORMATS = ("dcp", "torch", "safetensors")
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_MAX_HEADER_NBYTES = 100 * 2**20  # as the safetensors library has it

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "F4": torch.float4_e2m1fn_x2,  # two of them, which the format counts one by one
}
_WITHOUT_TORCH = ("F6_E2M3", "F6_E3M2")


def open_source(path: Path) -> Source:
    """FileNotFoundError for nothing, CheckpointError for what is no checkpoint or a damaged one."""
    check_path(path)
    if path.is_dir() and not is_checkpoint(path):
        if (index := _index_of(path, "safetensors")) is not None:
            return SafetensorsSource(index.files, path, index)
        if files := sorted(path.glob("*.safetensors")):
            return SafetensorsSource(files, path)
        if (index := _index_of(path, "bin")) is not None:
            source = RankFilesSource(path, index.files)
            index.check({(key, file) for key, found in source.places.items() for file in found})
            source.kind += index.left_out
            return source
        if files := [file for file in path.iterdir() if SUFFIXES.get(file.suffix) == "torch"]:
            return RankFilesSource(path, files)
    if path.is_dir() or not path.exists():
        return unless_replaced(path, lambda: DcpSource(read_checkpoint(path)))
    with open_file(path) as file:
        start = file.read(9)
    if start[8:9] == b"{" and not start.startswith(b"PK"):
        return SafetensorsSource([path], path)
    if path.name == METADATA:
        raise CheckpointError(f"{path}: name the folder, {path.parent}")
    return RankFilesSource(path, [path]) if holds_parts(path) else TorchSource(path)


# ----------------------------------------------------------------- the index of a folder


class _Index(NamedTuple):
    """Which file of a folder has which tensor, as Hugging Face's ``model.safetensors.index.json`` says."""

    path: Path
    file_of: dict[str, Path]

    @property
    def files(self) -> list[Path]:
        return sorted({*self.file_of.values()})

    @property
    def left_out(self) -> str:
        """In words, which other files of the kind are in the folder: no reader of the index takes them."""
        others = (
            sorted({*self.path.parent.glob(f"*{self.files[0].suffix}")} - {*self.files})
            if self.file_of
            else []
        )
        return f" of {self.path.name} (left out: {', '.join(file.name for file in others)})" if others else ""

    def check(self, found: set[tuple[str, Path]]) -> None:
        """``found``: each tensor with its file. CheckpointError for one that is missing or too many."""
        listed = set(self.file_of.items())
        for key, file in sorted(listed - found)[:1]:
            raise CheckpointError(f"{file}: {key} is missing, which {self.path.name} says lies in it")
        for key, file in sorted(found - listed)[:1]:
            raise CheckpointError(f"{file}: holds {key}, which {self.path.name} does not say")


def _index_of(folder: Path, suffix: str) -> _Index | None:
    paths = sorted(folder.glob(f"*.{suffix}.index.json"))
    if not paths:
        return None
    if len(paths) > 1:
        raise CheckpointError(
            f"{folder}: {paths[0].name} and {paths[1].name} are both there: name a single file"
        )
    with refusing(lambda error: f"{paths[0]}: damaged ({error!r})"):
        with open_file(paths[0]) as opened:
            content = opened.read(_MAX_HEADER_NBYTES + 1)
        if len(content) > _MAX_HEADER_NBYTES:
            raise ValueError("too large")
        listed = json.loads(content, object_pairs_hook=_without_doubles)["weight_map"]
        for key, name in listed.items():
            parts = pathlib.PurePosixPath(name).parts
            if not parts or ".." in parts or name.startswith("/") or "\0" in name:
                raise ValueError(f"the file of {key} is {name!r}, which leads out of the folder")
    index = _Index(paths[0], {key: folder / name for key, name in listed.items()})
    for key, file in sorted(index.file_of.items()):
        if not file.exists():
            raise CheckpointError(f"{file}: missing: {index.path.name} says that {key} lies in it")
    return index


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        double = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # None
        raise ValueError(f"{double!r} stands there twice")
    return content


# ----------------------------------------------------------------- DCP


class DcpSource:
    """A folder that fsdp_c or torch.distributed.checkpoint wrote."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        checkpoint.hold(checkpoint.file_sizes)
        by = "fsdp_c, with checksums" if checkpoint.framing else "torch, without checksums"
        self.kind = f"torch.distributed.checkpoint, {len(checkpoint.file_sizes)} files (written by {by})"
        self.entries = {
            key: Info.of(checkpoint.paths[key], entry) for key, entry in checkpoint.entries.items()
        }

    def read(self, key: str) -> Any:
        return read_entry(self.checkpoint, key)

    def problems(self) -> Iterator[str]:
        return _verified(self.checkpoint)


def _verified(checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong, in words. Memory: one piece. Without checksums: what cannot be read."""
    for key, entry in checkpoint.entries.items():
        try:
            if isinstance(entry, TensorEntry):
                for chunk in entry.chunks:
                    with checkpoint.open(chunk.file) as file:
                        read_chunk(checkpoint, key, chunk, file)
            else:
                read_object(checkpoint, key)
        except (CheckpointError, OSError) as error:
            yield str(error)
    for name, gaps in _framing_gaps(checkpoint):
        crc32 = 0
        with checkpoint.open(name) as file:
            for start, end in gaps:
                crc32 = crc32_of(file, start, end, crc32)
        if crc32 != checkpoint.framing[name]:
            path = checkpoint.folder / name
            outside = "damaged outside of the tensors' data: torch may not read it"
            yield f"{path}: {f'damaged: loads read {METADATA} in its place' if path.name == LAYOUT else outside}"


def _framing_gaps(checkpoint: Checkpoint) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """For each file, the ranges of bytes that hold no piece's data."""
    data: dict[str, set[tuple[int, int]]] = {name: set() for name in checkpoint.framing}
    for entry in checkpoint.entries.values():
        for part in entry.chunks if isinstance(entry, TensorEntry) else [entry]:
            if part.place is not None and part.file in data:
                data[part.file].add((part.place.offset, part.place.nbytes))
    for name, ranges in data.items():
        gaps, end = [], 0
        for offset, nbytes in sorted(ranges):
            gaps.append((end, offset))
            end = max(end, offset + nbytes)
        yield name, [*gaps, (end, checkpoint.file_sizes[name])]


# ----------------------------------------------------------------- safetensors


class _Stored(NamedTuple):
    file: Path
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]  # where this part begins in the whole tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsSource:
    """A safetensors file, or a folder of them: Hugging Face's, or DCP's with tensors divided over files."""

    def __init__(self, files: Sequence[Path], path: Path, index: _Index | None = None) -> None:
        self.path = path
        self.kind = (
            f"safetensors, {len(files)} file{'s' if len(files) > 1 else ''}{index.left_out if index else ''}"
        )
        self.parts: dict[str, list[_Stored]] = {}
        for file in files:
            for key, part in _stored_tensors(file):
                self.parts.setdefault(key, []).append(part)
        if index is not None:
            index.check({(key, part.file) for key, parts in self.parts.items() for part in parts})
        self.entries = {
            key: Info((key,), _whole_shape(path, key, parts), parts[0].dtype)
            for key, parts in self.parts.items()
        }

    def read(self, key: str) -> Tensor:
        return joined(self.entries[key], ((part.offsets, _read_stored(part)) for part in self.parts[key]))

    def problems(self) -> Iterator[str]:
        for key, parts in self.parts.items():
            for part in parts:
                try:
                    _read_stored(part)
                except (OSError, CheckpointError) as error:
                    yield f"{key}: {error}"


def _stored_tensors(file: Path) -> list[tuple[str, _Stored]]:
    """What the header says, checked. See https://github.com/huggingface/safetensors#format"""
    with refusing(lambda error: f"{file}: not a safetensors file, or a damaged one ({error!r})"):
        with open_file(file) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_NBYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in {size}")
            header = json.loads(opened.read(length), object_pairs_hook=_without_doubles)
        about = header.pop("__metadata__", {})
        offsets = json.loads(about["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in about else {}
        found = [
            (key, _stored(file, 8 + length, key, info, offsets.get(key, {}))) for key, info in header.items()
        ]
        end = 8 + length
        for key, part in sorted(found, key=lambda each: (each[1].start, each[1].nbytes)):
            if part.start != end:
                raise ValueError(f"{key} begins at byte {part.start}, where what is before it ends at {end}")
            end += part.nbytes
        if end != size:
            raise ValueError(f"its tensors end at byte {end} of {size}")
    return found


def _stored(file: Path, data: int, key: str, info: Any, saved: Any) -> _Stored:
    """One tensor of a file whose data begin at byte ``data``."""
    if info["dtype"] in _WITHOUT_TORCH:
        raise CheckpointError(f"{file}: {key} is {info['dtype']}, which torch has no dtype for")
    if info["dtype"] not in DTYPES:
        raise ValueError(f"{key}: the dtype {reprlib.repr(info['dtype'])} is not known")
    dtype, shape = DTYPES[info["dtype"]], _halved(info["dtype"], ints(info["shape"], key))
    begin, end = ints(info["data_offsets"], key)
    if len(shape) > MAX_DIMS or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key}: bytes {begin} to {end} for shape {reprlib.repr(shape)}")
    at = _halved(info["dtype"], ints(saved.get("saved_offsets", (0,) * len(shape)), key))
    if len(at) != len(shape):
        raise ValueError(f"{key}: offsets {reprlib.repr(at)}")
    return _Stored(file, data + begin, shape, at, dtype)


def _halved(dtype: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes or offsets as torch has them, where the format's are ``sizes``."""
    if dtype != "F4":
        return sizes
    if not sizes or sizes[-1] % 2:
        raise ValueError(f"half a byte at the end of each row: F4 of {reprlib.repr(sizes)}")
    return (*sizes[:-1], sizes[-1] // 2)


def _whole_shape(path: Path, key: str, parts: list[_Stored]) -> tuple[int, ...]:
    if len({(part.dtype, len(part.shape)) for part in parts}) != 1:
        raise CheckpointError(
            f"{path}: the parts of {key} in {len(parts)} files differ in dtype or dimensions"
        )
    ends = [tuple(o + s for o, s in zip(part.offsets, part.shape, strict=True)) for part in parts]
    shape = tuple(max(each) for each in zip(*ends, strict=True))
    if not do_tile([(part.offsets, part.shape) for part in parts], shape):
        raise CheckpointError(
            f"{path}: the parts of {key} in {len(parts)} files do not make one tensor of {shape}"
        )
    return shape


def _read_stored(part: _Stored) -> Tensor:
    data = torch.empty(part.shape, dtype=part.dtype, device="cpu")
    read_into(part.file, part.start, data)
    return data
