"""Files of ``torch.save``: full state dicts, and those of which each rank saved its part."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.checkpoint.metadata import PathInDict, strides_fit
from fsdp_c.checkpoint.rank_files import Parted, Shape, Sharded, flat_places, is_flat, load_rank_file, put_together
from fsdp_c.checkpoint.sources import Info
from fsdp_c.checkpoint.storage import check_archive, is_archive, narrowed


def is_held(value: Tensor) -> bool:
    """Whether a tensor's storage has room for all of its elements; it has none for expanded ones."""
    return value.layout == torch.strided and (value.is_meta or value.nbytes <= value.untyped_storage().nbytes())


def holds_parts(path: Path) -> bool:
    """Whether a file holds one rank's part of a sharded state dict."""
    if not is_archive(path):
        return False
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            described = b"".join(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    except Exception as error:
        raise CheckpointError(f"{path}: {_reason(error)}") from error
    return b"torch.distributed._shard" in described or b"torch.distributed.tensor" in described


def in_order(files: Sequence[Path]) -> list[Path]:
    """The files sorted by the last number in their names, which is the rank."""
    return sorted(files, key=lambda path: ([int(each) for each in re.findall(r"[0-9]+", path.stem)[-1:]], path.name))


def archive_problems(path: Path) -> Iterator[str]:
    if not is_archive(path):
        return
    with zipfile.ZipFile(path) as archive:  # opening the source has checked this already
        for name in archive.namelist():
            try:
                with archive.open(name) as member:
                    while member.read(2**20):
                        pass
            except Exception:  # each kind of damage raises an exception of its own
                yield f"{path}: {name.split('/', 1)[-1]} is damaged: its checksum does not match"


class TorchSource:
    """A file of ``torch.save``: a full state dict, or nested dicts of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = "torch.save"
        loaded = self._load()
        if isinstance(loaded, Tensor) or not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not a state dict")
        self.values, paths = flatten_state_dict(loaded)
        for key, value in self.values.items():
            if isinstance(value, Tensor) and not is_held(value):
                raise CheckpointError(f"{path}: {key} is sparse, or has more elements than the file")
        self.entries = {
            key: Info(paths[key], tuple(value.shape), value.dtype) if isinstance(value, Tensor) else Info(paths[key])
            for key, value in self.values.items()
        }

    def _load(self) -> Any:
        archive = is_archive(self.path)
        if not archive:
            self.kind += " of before 1.6, which is read into memory as a whole"
        try:
            if archive:
                check_archive(self.path)
            # memory-mapped, so that tensors take memory only while in use
            return torch.load(self.path, map_location="cpu", weights_only=True, mmap=archive or None)
        except Exception as error:
            raise CheckpointError(f"{self.path}: {_reason(error)}") from error

    def read(self, key: str) -> Any:
        return self.values[key]

    def problems(self) -> Iterator[str]:
        return archive_problems(self.path)

    def same_memory(self) -> dict[str, str]:
        """The tensors that share memory with another one, by name."""
        first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
        shared: dict[str, str] = {}
        for key, value in self.values.items():
            if isinstance(value, Tensor) and value.nbytes and not value.is_meta:
                other = first.setdefault((value.data_ptr(), value.shape, value.stride()), key)
                shared |= {key: other} if other != key else {}
        return shared


def _reason(error: Exception) -> str:
    text = str(error)
    if "weights_only" in text or "Unsupported" in text:
        first = next((line for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        return f"holds objects that may run code when loaded, and was not loaded ({first.strip()})"
    return f"cannot be read ({text.splitlines()[0] if text else type(error).__name__})"


class RankFilesSource:
    """Files of ``torch.save``, one of each rank: SHARDED_STATE_DICT, or LOCAL_STATE_DICT, whose flat parameters are
    entries; or files that have different entries of a full state dict."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.files = path, in_order(files)
        for file in self.files:
            if not is_archive(file):
                raise CheckpointError(f"{file}: not a file of torch.save")
        self.kind = f"torch.save, {len(files)} file{'s' if len(files) > 1 else ''}"
        flattened = [flatten_state_dict(load_rank_file(file)) for file in self.files]
        self.contents = [values for values, _ in flattened]
        self.values: dict[str, Any] = {}
        self.entries: dict[str, Info] = {}
        paths = {key: path for _, each in flattened for key, path in each.items()}
        sharded = any(isinstance(value, Sharded) for values in self.contents for value in values.values())
        if not sharded and len(paths) != sum(map(len, self.contents)):
            raise CheckpointError(f"{path}: {len(files)} files with state dicts that are not sharded; name one of them")
        try:
            self.flat_memory = self._flat_memory()
            for key in paths:
                self._add(key, paths[key])
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path}: {error or repr(error)}") from error

    def _add(self, key: str, path: PathInDict) -> None:
        values = [content.get(key) for content in self.contents]
        first = next(content[key] for content in self.contents if key in content)
        if isinstance(first, Sharded):
            self.values[key] = value = put_together(key, values)
            if math.prod(value.shape) * value.dtype.itemsize > sum(file.stat().st_size for file in self.files):
                raise ValueError(f"{key} is larger than all files")
            self.entries[key] = Info(path, value.shape, value.dtype)
        elif isinstance(first, Tensor):
            if not self._is_view(values):
                self.values[key] = first
                self.entries[key] = Info(path, tuple(first.shape), first.dtype)
        else:
            self.values[key] = first
            self.entries[key] = Info(path)

    def _is_view(self, values: Sequence[Any]) -> bool:
        """Whether tensors are the ranks' own parts of a parameter that is in a flat one (use_orig_params=True)."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        in_flat = any(start <= each.data_ptr() < end for each in tensors for start, end in self.flat_memory)
        return bool(self.flat_memory) and (in_flat or len({each.shape for each in tensors}) > 1)

    def _flat_memory(self) -> list[tuple[int, int]]:
        values = [value for each in self.contents for key, value in each.items() if is_flat(key)]
        flats = [value for value in values if isinstance(value, Sharded)]
        storages = [shard.tensor.untyped_storage() for value in flats for shard in value.shards]
        return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def read(self, key: str) -> Any:
        value = self.values[key]
        if not isinstance(value, Parted):
            return value
        if len(value.parts) == 1:
            return value.parts[0].tensor
        whole = torch.zeros(value.shape, dtype=value.dtype)
        for part in value.parts:
            narrowed(whole, part.offsets, part.tensor.shape).copy_(part.tensor)
        return whole

    def read_range(self, key: str, start: int, numel: int) -> Tensor:
        """Read elements of a flat parameter."""
        whole = torch.zeros(numel, dtype=self.entries[key].dtype)
        for (offset,), tensor in self.values[key].parts:
            low, high = max(start, offset), min(start + numel, offset + tensor.numel())
            if low < high:
                whole[low - start : high - start] = tensor[low - offset : high - offset]
        return whole

    def problems(self) -> Iterator[str]:
        for file in self.files:
            yield from archive_problems(file)


class NamedSource:
    """A ``RankFilesSource`` with the original parameters in place of the flat ones."""

    def __init__(self, source: RankFilesSource, like: TorchSource, prefix: str) -> None:
        """``like``: a state dict of the model, whose names stand below ``prefix`` in ``source``."""
        self.source, self.kind = source, source.kind
        flats = {key: info for key, info in source.entries.items() if is_flat(key) and info.shape and info.dtype}
        sizes = {key: (math.prod(info.shape or ()), 16 // info.dtype.itemsize) for key, info in flats.items()}  # type: ignore[union-attr]  # flat parameters have a dtype
        shared = like.same_memory()
        shapes = {
            prefix + name: Shape(info.shape, like.values[name].stride())
            for name, info in like.entries.items()
            if info.shape is not None and name not in shared and not self._is_apart(prefix + name, info)
        }
        try:
            self.places = flat_places(sizes, shapes, len(source.files))
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {error}") from error
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
        return elements.as_strided(*place.shape) if strides_fit(*place.shape) else elements.view(place.shape.sizes)

    def problems(self) -> Iterator[str]:
        return self.source.problems()
