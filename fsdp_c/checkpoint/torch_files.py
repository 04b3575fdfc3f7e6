"""Files of ``torch.save``: full state dicts, and those of which each rank saved its part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_c.checkpoint import objects
from fsdp_c.checkpoint.archives import (
    Archive,
    LegacyFile,
    StoredByAddress,
    is_archive,
    is_within,
    read_stored,
)
from fsdp_c.checkpoint.folder import CheckpointError, refusing
from fsdp_c.checkpoint.metadata import PathInDict
from fsdp_c.checkpoint.rank_files import (
    Parted,
    Shape,
    Sharded,
    flat_places,
    is_flat,
    load_rank_file,
    put_together,
)
from fsdp_c.checkpoint.storage import Info, joined
from fsdp_c.sharding.flat_param import are_dense


def holds_parts(path: Path) -> bool:
    """Whether a file holds one rank's part of a sharded state dict."""
    if not is_archive(path):
        return False
    described = _opened(path).pickled
    return b"torch.distributed._shard" in described or b"torch.distributed.tensor" in described


def _opened(path: Path, kind: type[Archive] = Archive) -> Archive:
    with refusing(lambda error: f"{path}: {_reason(error)}"):
        return kind(path)


def in_order(files: Sequence[Path]) -> list[Path]:
    """The files sorted by the last number in their names, which is the rank."""
    return sorted(
        files, key=lambda path: ([int(each) for each in re.findall(r"[0-9]+", path.stem)[-1:]], path.name)
    )


class TorchSource:
    """A file of ``torch.save``: a full state dict, or nested dicts of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = is_archive(path)
        self.archive = _opened(path, Archive if is_new else LegacyFile)
        self.kind = "torch.save" if is_new else "torch.save of before 1.6"
        loaded = self._load()
        if isinstance(loaded, Tensor) or not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not a state dict")
        self.stored: StoredByAddress = self.archive.stored
        self.values, paths = _flattened(loaded, path)
        for key, value in self.values.items():
            if isinstance(value, Tensor) and not is_within(value, self.stored):
                raise CheckpointError(
                    f"{path}: {key} is sparse or quantized, or has more elements than the file"
                )
        self.entries = {key: Info.of(paths[key], value) for key, value in self.values.items()}

    def _load(self) -> Any:
        try:
            with refusing(lambda error: f"{self.path}: {_reason(error)}"), objects.names_known():
                return objects.plain_arrays(self.archive.unpickle(_weights_only_unpickler.Unpickler))
        finally:
            torch._utils._sparse_tensors_to_validate.clear()  # which the next torch.load would look at

    def read(self, key: str) -> Any:
        return read_stored(self.values[key], self.stored)

    def problems(self) -> Iterator[str]:
        return self.archive.problems()

    def same_memory(self) -> dict[str, str]:
        """The tensors that share memory with another one, by name."""
        first: dict[tuple[int, int, torch.Size, tuple[int, ...]], str] = {}
        shared: dict[str, str] = {}
        for key, value in self.values.items():
            storage = value.untyped_storage()._cdata if isinstance(value, Tensor) and value.nbytes else None
            if storage is not None and (not value.is_meta or storage in self.stored):
                other = first.setdefault((storage, value.storage_offset(), value.shape, value.stride()), key)
                shared |= {key: other} if other != key else {}
        return shared


def _flattened(loaded: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, PathInDict]]:
    with refusing(lambda error: f"{path}: {_reason(error)}"):
        return flatten_state_dict(loaded)


def _reason(error: Exception) -> str:
    text = str(error)
    if "weights_only" in text or "nsupported" in text:
        first = next((line for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        return f"holds objects that may run code when loaded, and was not loaded ({first.strip()})"
    return f"cannot be read ({text.splitlines()[0] if text else type(error).__name__})"


class RankFilesSource:
    """Files of ``torch.save``, one of each rank: SHARDED_STATE_DICT, or LOCAL_STATE_DICT, whose flat
    parameters are entries; or files that have different entries of a full state dict."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.files = path, in_order(files)
        for file in self.files:
            if not is_archive(file):
                raise CheckpointError(f"{file}: not a file of torch.save")
        self.kind = f"torch.save, {len(files)} file{'s' if len(files) > 1 else ''}"
        self.archives: list[Archive] = []
        self.stored: StoredByAddress = {}
        flattened = []
        for file in self.files:
            values, archive = load_rank_file(file)
            self.archives.append(archive)
            self.stored |= archive.stored
            flattened.append(_flattened(values, file))
        self.contents = [values for values, _ in flattened]
        self.places = {
            key: [file for file, values in zip(self.files, self.contents, strict=True) if key in values]
            for values in self.contents
            for key in values
        }
        self.values: dict[str, Any] = {}
        self.entries: dict[str, Info] = {}
        paths = {key: path for _, each in flattened for key, path in each.items()}
        sharded = any(isinstance(value, Sharded) for values in self.contents for value in values.values())
        if not sharded and len(paths) != sum(map(len, self.contents)):
            raise CheckpointError(
                f"{path}: {len(files)} files with state dicts that are not sharded; name one of them"
            )
        with refusing(lambda error: f"{path}: {error or repr(error)}"):
            self.flat_storages = self._flat_storages()
            for key in paths:
                self._add(key, paths[key])

    def _add(self, key: str, path: PathInDict) -> None:
        values = [content.get(key) for content in self.contents]
        value = next(content[key] for content in self.contents if key in content)
        if isinstance(value, Sharded):
            value = put_together(key, values, self.stored)
            if Info.of(path, value).nbytes > sum(file.stat().st_size for file in self.files):
                raise ValueError(f"{key} is larger than all files")
        elif isinstance(value, Tensor) and self._is_view(values):
            return
        self.values[key], self.entries[key] = value, Info.of(path, value)

    def _is_view(self, values: Sequence[Any]) -> bool:
        """Whether tensors are the ranks' own parts of parameters in a flat one (use_orig_params=True)."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        in_flat = any(each.untyped_storage()._cdata in self.flat_storages for each in tensors)
        return bool(self.flat_storages) and (in_flat or len({each.shape for each in tensors}) > 1)

    def _flat_storages(self) -> set[int]:
        values = [value for each in self.contents for key, value in each.items() if is_flat(key)]
        flats = [value for value in values if isinstance(value, Sharded)]
        return {shard.tensor.untyped_storage()._cdata for value in flats for shard in value.shards}

    def read(self, key: str) -> Any:
        value = self.values[key]
        if not isinstance(value, Parted):
            return read_stored(value, self.stored)
        parts = ((part.offsets, read_stored(part.tensor, self.stored)) for part in value.parts)
        return joined(self.entries[key], parts)

    def read_range(self, key: str, start: int, numel: int) -> Tensor:
        """Read elements of a flat parameter."""
        whole = torch.zeros(numel, dtype=self.entries[key].dtype, device="cpu")
        for (offset,), tensor in self.values[key].parts:
            low, high = max(start, offset), min(start + numel, offset + tensor.numel())
            if low < high:
                part = tensor[low - offset : high - offset]
                whole[low - start : high - start] = read_stored(part, self.stored)
        return whole

    def problems(self) -> Iterator[str]:
        for archive in self.archives:
            yield from archive.problems()


class NamedSource:
    """A ``RankFilesSource`` with the original parameters in place of the flat ones."""

    def __init__(self, source: RankFilesSource, like: TorchSource, prefix: str) -> None:
        """``like``: a state dict of the model, whose names stand below ``prefix`` in ``source``."""
        self.source, self.kind = source, source.kind
        flats = {
            key: info for key, info in source.entries.items() if is_flat(key) and info.shape and info.dtype
        }
        sizes = {key: (math.prod(info.shape or ()), 16 // info.dtype.itemsize) for key, info in flats.items()}  # type: ignore[union-attr]  # flat parameters have a dtype
        shared = like.same_memory()
        shapes = {
            prefix + name: Shape(info.shape, like.values[name].stride())
            for name, info in like.entries.items()
            if info.shape is not None and name not in shared and not self._is_apart(prefix + name, info)
        }
        with refusing(lambda error: f"{source.path}: {error}"):
            self.places = flat_places(sizes, shapes, len(source.files))
        for name, other in shared.items():
            if prefix + other in self.places:
                self.places[prefix + name] = self.places[prefix + other]
        self.entries = {key: info for key, info in source.entries.items() if key not in flats}
        for name, place in self.places.items():
            above = flats[place.key].path[:-1]
            path = (*above, name.removeprefix("".join(f"{each}." for each in above)))
            self.entries[name] = Info(path, place.shape.sizes, flats[place.key].dtype)

    def _is_apart(self, name: str, info: Info) -> bool:
        """Whether the tensor lies in no flat parameter: a buffer, or an ignored parameter."""
        return name in self.source.entries and self.source.entries[name].shape == info.shape

    def read(self, key: str) -> Any:
        place = self.places.get(key)
        if place is None:
            return self.source.read(key)
        elements = self.source.read_range(place.key, place.start, math.prod(place.shape.sizes))
        return (
            elements.as_strided(*place.shape) if are_dense(*place.shape) else elements.view(place.shape.sizes)
        )

    def problems(self) -> Iterator[str]:
        return self.source.problems()
