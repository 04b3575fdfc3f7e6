"""Export of a checkpoint's model to sharded safetensors, in the memory of its largest tensor.

The safetensors library writes a file from all of its tensors at once. torch's writer keeps one box of a
tensor per rank, whereas a flat shard may hold several. Here the header is computed from the metadata, and
tensors are read one by one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_c.checkpoint.contents import Checkpoint, TensorEntry
from fsdp_c.checkpoint.folder import CheckpointError, absolute_path, check_path, sync_folder, write_file
from fsdp_c.checkpoint.pieces import memory
from fsdp_c.checkpoint.storage import read_entries
from fsdp_c.sharding.traversal import is_flat_param_name

CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_NBYTES = 5 * 10**9  # maximum size of a file; a larger tensor has a file of its own
_CAST_NUMEL = 2**20
_NAMES = {
    getattr(torch, dtype): name
    for dtype, name in (
        *(("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("int16", "I16"), ("uint16", "U16")),
        *(("int32", "I32"), ("uint32", "U32"), ("int64", "I64"), ("uint64", "U64"), ("float16", "F16")),
        *(("bfloat16", "BF16"), ("float32", "F32"), ("float64", "F64"), ("complex64", "C64")),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0")),
        *(("float8_e4m3fnuz", "F8_E4M3FNUZ"), ("float8_e5m2fnuz", "F8_E5M2FNUZ")),
    )
}


class _Tensor(NamedTuple):
    key: str  # key in the checkpoint
    name: str  # name in the model
    shape: tuple[int, ...]
    dtype: torch.dtype  # dtype in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export(
    checkpoint: Checkpoint,
    target: Path,
    dtype: torch.dtype | None = None,
    model_key: str = "model",
    max_nbytes: int = MAX_NBYTES,
) -> tuple[int, int]:
    """Write the tensors below ``model_key`` into the new folder ``target``. Return the numbers of tensors and files.

    ``dtype`` replaces floating-point dtypes of 16 bits and more. Raises CheckpointError for damage and for
    tensors that safetensors cannot hold, with nothing left at ``target``; FileExistsError if ``target``
    exists.
    """
    check_path(target)
    target = absolute_path(target)
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: exists already. Export to another path, or remove it first")
    files = _files(_tensors(checkpoint, dtype, model_key), max_nbytes)
    temporary = target.with_name(f".{target.name}.exporting")  # renamed once complete and on disk
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{temporary}: exists already: another export to {target} is running, or one was killed. "
            "In that case remove the folder"
        ) from None
    try:
        for name, tensors in files.items():
            write_file(temporary / name, _content(checkpoint, tensors))
        if len(files) > 1:
            where = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
            total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_file(temporary / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
        sync_folder(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)
    return sum(map(len, files.values())), len(files)


def _tensors(checkpoint: Checkpoint, dtype: torch.dtype | None, model_key: str) -> list[_Tensor]:
    prefix = f"{model_key}." if model_key else ""
    found = []
    for key, entry in checkpoint.entries.items():
        if not key.startswith(prefix) or not isinstance(entry, TensorEntry):
            continue
        name = key.removeprefix(prefix)
        if is_flat_param_name(name.rpartition(".")[2]):
            raise CheckpointError(
                f"{checkpoint.folder}: {key} is a flat parameter of LOCAL_STATE_DICT, without the names of its "
                "parameters: load it into the model, and save that with fsdp_c.checkpoint.save"
            )
        cast = dtype if entry.dtype.is_floating_point and entry.dtype.itemsize > 1 else None
        tensor = _Tensor(key, name, entry.shape, cast or entry.dtype)
        if tensor.dtype not in _NAMES or name == "__metadata__":
            raise CheckpointError(
                f"{checkpoint.folder}: {key} of {tensor.dtype} cannot be written: safetensors have no such dtype or "
                "name"
            )
        found.append(tensor)
    if not found:
        tops = sorted({key.partition(".")[0] for key in checkpoint.entries})[:10]
        raise CheckpointError(
            f"{checkpoint.folder}: has no tensors below {model_key!r}, but {', '.join(tops)}. Pass another --model-key"
        )
    return found


def _files(tensors: list[_Tensor], max_nbytes: int) -> dict[str, list[_Tensor]]:
    """Return tensors by file name, those with the largest elements first: then each is aligned to its elements."""
    parts: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(each.nbytes for each in parts[-1]) + tensor.nbytes > max_nbytes:
            parts.append([])
        parts[-1].append(tensor)
    for part in parts:
        part.sort(key=lambda tensor: -tensor.dtype.itemsize)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{at:05}-of-{len(parts):05}.safetensors": part for at, part in enumerate(parts, 1)}


def _content(checkpoint: Checkpoint, tensors: list[_Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the length of its header, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        where = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": where}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    yield len(content).to_bytes(8, "little") + content
    for tensor in tensors:
        yield from _data(checkpoint, tensor)


def _data(checkpoint: Checkpoint, tensor: _Tensor) -> Iterator[memoryview]:
    """Yield the data of a tensor. A separate generator, so that no tensor is held while the next is read."""
    flat = read_entries(checkpoint, [tensor.key])[tensor.key].contiguous().view(-1)
    for part in flat.split(_CAST_NUMEL):
        cast = part.to(tensor.dtype)
        if cast.dtype != part.dtype and not torch.equal(cast.isinf(), part.isinf()):
            raise CheckpointError(
                f"{checkpoint.folder}: {tensor.key} has values beyond the range of {tensor.dtype}: export it "
                "with another --dtype"
            )
        yield memory(cast)
