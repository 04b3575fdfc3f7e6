"""Export of a checkpoint's model to sharded safetensors, in the memory of its largest tensor.

The safetensors library writes a file from all of its tensors at once. torch's writer keeps one box of a
tensor per rank, whereas a flat shard may hold several. Here the header is computed from the metadata, and
tensors are read one by one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
Tensors = dict[str, TensorEntry]  # tensors to write, with their dtypes in the file, by name in the model


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
    prefix = f"{model_key}." if model_key else ""
    files = _files(_tensors(checkpoint, dtype, prefix), max_nbytes)
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
        for file, tensors in files.items():
            write_file(temporary / file, _content(checkpoint, prefix, tensors))
        if len(files) > 1:
            where = {name: file for file, tensors in files.items() for name in tensors}
            total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_file(temporary / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
        sync_folder(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)
    return sum(map(len, files.values())), len(files)


def _tensors(checkpoint: Checkpoint, dtype: torch.dtype | None, prefix: str) -> Tensors:
    found: Tensors = {}
    for key, entry in checkpoint.entries.items():
        if not key.startswith(prefix) or not isinstance(entry, TensorEntry):
            continue
        name = key.removeprefix(prefix)
        if is_flat_param_name(name.rpartition(".")[2]):
            raise CheckpointError(
                f"{checkpoint.folder}: {key} is a flat parameter of LOCAL_STATE_DICT, without the names of its "
                "parameters: load it into the model, and save that with fsdp_c.checkpoint.save"
            )
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            entry = replace(entry, dtype=dtype or entry.dtype)
        if entry.dtype not in _NAMES or name == "__metadata__":
            raise CheckpointError(
                f"{checkpoint.folder}: {key} of {entry.dtype} cannot be written: safetensors have no such dtype or name"
            )
        found[name] = entry
    if not found:
        tops = sorted({key.partition(".")[0] for key in checkpoint.entries})[:10]
        raise CheckpointError(
            f"{checkpoint.folder}: has no tensors below {prefix[:-1]!r}, but {', '.join(tops)}. Pass another "
            "--model-key"
        )
    return found


def _files(tensors: Tensors, max_nbytes: int) -> dict[str, Tensors]:
    """Return tensors by file name, those with the largest elements first: then each is aligned to its elements."""
    parts: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(each.nbytes for each in parts[-1].values()) + tensor.nbytes > max_nbytes:
            parts.append({})
        parts[-1][name] = tensor
    parts = [dict(sorted(part.items(), key=lambda each: -each[1].dtype.itemsize)) for part in parts]
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{at:05}-of-{len(parts):05}.safetensors": part for at, part in enumerate(parts, 1)}


def _content(checkpoint: Checkpoint, prefix: str, tensors: Tensors) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the length of its header, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        where = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": where}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    yield len(content).to_bytes(8, "little") + content
    for name, tensor in tensors.items():
        yield from _data(checkpoint, prefix + name, tensor.dtype)


def _data(checkpoint: Checkpoint, key: str, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the data of a tensor. A separate generator, so that no tensor is held while the next is read."""
    flat = read_entries(checkpoint, [key])[key].contiguous().view(-1)
    for part in flat.split(_CAST_NUMEL):
        cast = part.to(dtype)
        if cast.dtype != part.dtype and not torch.equal(cast.isinf(), part.isinf()):
            raise CheckpointError(
                f"{checkpoint.folder}: {key} has values beyond the range of {dtype}: export it with another --dtype"
            )
        yield memory(cast)
