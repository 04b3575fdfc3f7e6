"""Checkpoints of several formats, read tensor by tensor: without ranks, and without more memory than one takes."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_c.checkpoint.folder import METADATA, CheckpointError, is_checkpoint
from fsdp_c.checkpoint.metadata import Checkpoint, TensorEntry, are_disjoint, read_checkpoint
from fsdp_c.checkpoint.sources import Info, Source
from fsdp_c.checkpoint.storage import narrowed, read_object, read_tensor
from fsdp_c.checkpoint.torch_files import RankFilesSource, TorchSource, holds_parts
from fsdp_c.checkpoint.verifying import verify_checkpoint

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
    "C64": torch.complex64,
}


def open_source(path: Path) -> Source:
    """FileNotFoundError for nothing, CheckpointError for what is no checkpoint or a damaged one."""
    if path.is_dir() and not is_checkpoint(path):
        if files := sorted(path.glob("*.safetensors")):
            return SafetensorsSource(files, path)
        if files := [file for file in path.iterdir() if SUFFIXES.get(file.suffix) == "torch"]:
            return RankFilesSource(path, files)
    if path.is_dir() or not path.exists():
        return DcpSource(read_checkpoint(path))
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{" and not start.startswith(b"PK"):
        return SafetensorsSource([path], path)
    if path.name == METADATA:
        raise CheckpointError(f"{path}: name the folder, {path.parent}")
    return RankFilesSource(path, [path]) if holds_parts(path) else TorchSource(path)


# ----------------------------------------------------------------- DCP


class DcpSource:
    """A folder that fsdp_c or torch.distributed.checkpoint wrote."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        by = "fsdp_c, with checksums" if checkpoint.has_checksums else "torch, without checksums"
        self.kind = f"torch.distributed.checkpoint, {len(checkpoint.file_sizes)} files (written by {by})"
        self.entries = {
            key: Info(checkpoint.paths[key], entry.shape, entry.dtype)
            if isinstance(entry, TensorEntry)
            else Info(checkpoint.paths[key])
            for key, entry in checkpoint.entries.items()
        }

    def read(self, key: str) -> Any:
        entry = self.checkpoint.entries[key]
        if isinstance(entry, TensorEntry):
            return read_tensor(self.checkpoint, key)
        return read_object(self.checkpoint, key, entry)

    def problems(self) -> Iterator[str]:
        return verify_checkpoint(self.checkpoint)


# ----------------------------------------------------------------- safetensors


class _Stored(NamedTuple):
    file: Path
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]  # where this part begins in the whole tensor
    dtype: torch.dtype


class SafetensorsSource:
    """A safetensors file, or a folder of them: Hugging Face's, or DCP's with tensors divided over files."""

    def __init__(self, files: list[Path], path: Path) -> None:
        self.path = path
        self.kind = f"safetensors, {len(files)} file{'s' if len(files) > 1 else ''}"
        self.parts: dict[str, list[_Stored]] = {}
        for file in files:
            for key, part in _stored_tensors(file):
                self.parts.setdefault(key, []).append(part)
        self.entries = {
            key: Info((key,), _whole_shape(path, key, parts), parts[0].dtype) for key, parts in self.parts.items()
        }

    def read(self, key: str) -> Tensor:
        shape = self.entries[key].shape
        assert shape is not None
        whole: Tensor | None = None
        for part in self.parts[key]:
            tensor = _read_stored(part)
            if part.shape == shape:
                return tensor
            if whole is None:
                whole = torch.zeros(shape, dtype=part.dtype)
            narrowed(whole, part.offsets, part.shape).copy_(tensor)
        assert whole is not None
        return whole

    def problems(self) -> Iterator[str]:
        for key, parts in self.parts.items():
            for part in parts:
                try:
                    _read_stored(part)
                except (OSError, CheckpointError) as error:
                    yield f"{part.file}: {key}: {error}"


def _stored_tensors(file: Path) -> Iterator[tuple[str, _Stored]]:
    """What the header says, checked. See https://github.com/huggingface/safetensors#format"""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_NBYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in {size}")
            header = json.loads(opened.read(length))
        about = header.pop("__metadata__", {})
        offsets = json.loads(about["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in about else {}
        for key, info in header.items():
            dtype, shape = DTYPES[info["dtype"]], tuple(info["shape"])
            begin, end = info["data_offsets"]
            sizes = [*shape, begin, end]
            if not all(type(each) is int and 0 <= each < 2**62 for each in sizes):
                raise ValueError(f"{key}: sizes {sizes}")
            if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{key}: bytes {begin} to {end} of {size} for shape {shape}")
            at = tuple(offsets.get(key, {}).get("saved_offsets", (0,) * len(shape)))
            if len(at) != len(shape) or not all(type(each) is int and 0 <= each < 2**62 for each in at):
                raise ValueError(f"{key}: offsets {at}")
            yield key, _Stored(file, 8 + length + begin, shape, at, dtype)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file}: not a safetensors file, or a damaged one ({error!r})") from error


def _whole_shape(path: Path, key: str, parts: list[_Stored]) -> tuple[int, ...]:
    ends = [tuple(o + s for o, s in zip(part.offsets, part.shape, strict=True)) for part in parts]
    shape = tuple(max(each) for each in zip(*ends, strict=True))
    alike = len({(part.dtype, len(part.shape)) for part in parts}) == 1
    alike = alike and are_disjoint([(part.offsets, part.shape) for part in parts])
    if not alike or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise CheckpointError(f"{path}: the parts of {key} in {len(parts)} files do not make one tensor of {shape}")
    return shape


def _read_stored(part: _Stored) -> Tensor:
    """Mapped rather than read: in memory while it is used."""
    numel = math.prod(part.shape)
    if not numel:
        return torch.zeros(part.shape, dtype=part.dtype)
    page = part.start - part.start % mmap.ALLOCATIONGRANULARITY
    nbytes = part.start - page + numel * part.dtype.itemsize
    with part.file.open("rb") as file:
        if os.fstat(file.fileno()).st_size < page + nbytes:
            raise CheckpointError("torn")
        mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=page)
    data = torch.frombuffer(mapped, dtype=torch.uint8, offset=part.start - page)
    if part.start % part.dtype.itemsize:
        data = data.clone()
    return data.view(part.dtype).view(part.shape)
