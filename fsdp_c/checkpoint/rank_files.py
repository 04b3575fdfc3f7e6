"""State dicts that each rank saved in a file of its own with ``torch.save``: SHARDED, and LOCAL.

[Note: One rank's file]
Such a file holds ShardedTensors or DTensors, which torch loads only within a process group, and by a pickle
that may call anything. Here names of torch.distributed stand for empty classes, as they do for DCP's metadata
(see [Note: A pickle from a stranger]); what they held says which part of a tensor each file has. Tensors are
made by us, within the records of their file, and all other names are refused.
"""

from __future__ import annotations

import math
import pickle
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_c.checkpoint.archives import Archive, StoredByAddress, read_stored
from fsdp_c.checkpoint.folder import CheckpointError, refusing
from fsdp_c.checkpoint.metadata import do_tile, ints
from fsdp_c.checkpoint.pickles import Value, dtype_named, is_getattr
from fsdp_c.sharding.traversal import FLAT_PARAM, is_flat_param_name

_INERT = {
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
}


class Part(NamedTuple):
    """The part of a tensor that one file holds."""

    offsets: tuple[int, ...]
    tensor: Tensor


class Parted(NamedTuple):
    """A tensor whose parts are spread over several files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]


# ----------------------------------------------------------------- one file


class Sharded:
    """A ShardedTensor or DTensor as one file has it. ``state``: what the tensor's attributes were."""

    def __init__(self, make: Any, kind: type, args: tuple[Any, ...], state: Any) -> None:
        self.kind, self.state = kind.__name__, Value()
        self.state.__setstate__(state)
        self.dtype, self.shape = args[1], ints(args[2], "a shape")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"a {self.kind} of dtype {self.dtype!r}")

    @property
    def shards(self) -> list[Any]:
        """This rank's shards of a ShardedTensor, each with ``tensor`` and ``metadata``."""
        state = self.state.state
        found = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(found, list) or not all(isinstance(shard.tensor, Tensor) for shard in found):
            raise ValueError(f"a {self.kind} that holds {reprlib.repr(found)}")
        return found


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """A view of what the file has; its gradient's flag and hooks are left. Behind those may be another
    dtype."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise ValueError(f"a tensor made of {type(storage).__name__}")
    (offset,), size, stride = (ints(values, "a tensor") for values in ((offset,), size, stride))
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    numel, available = math.prod(size), storage._untyped_storage.nbytes() // dtype.itemsize
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if numel and not (numel <= available and last < available):
        shown = f"shape {reprlib.repr(size)} and strides {reprlib.repr(stride)}"
        raise ValueError(f"a tensor of {shown} in {available} elements")
    return torch.empty(0, dtype=dtype, device="meta").set_(storage._untyped_storage, offset, size, stride)


class _Unpickler(pickle.Unpickler):
    """See [Note: One rank's file]. Classes are made for one reading: nothing can be left on them."""

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self.classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (dtype := dtype_named(module, name)) is not None:
            return dtype
        return self.classes.setdefault((module, name), self._stand_in(module, name))

    def _stand_in(self, module: str, name: str) -> Any:
        known = {
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *args: _tensor(*args),
            ("torch._utils", "_rebuild_tensor_v3"): lambda *args: _tensor(*args),
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._tensor", "_rebuild_from_type_v2"): lambda *args: Sharded(*args),
            ("torch._utils", "_rebuild_wrapper_subclass"): lambda *_: None,
            ("torch.storage", "UntypedStorage"): SimpleNamespace(dtype=torch.uint8),
        }
        if (module, name) in known:
            return known[module, name]
        if module in ("torch", "torch.cuda") and name.endswith("Storage"):
            return SimpleNamespace(dtype=torch.serialization.StorageType(name).dtype)
        if is_getattr(module, name):
            return self._inner
        if (module, name) == ("collections", "OrderedDict"):
            return type(name, (dict,), {})
        if module.startswith("torch.distributed.") or (module, name) in _INERT:
            return type(name, (Value,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no state dict has")

    def _inner(self, cls: object = None, name: object = None, *_: object) -> type[Value]:
        """``getattr`` of a class: a class within it, or a member of an enum. Neither is ever looked at."""
        if not (isinstance(cls, type) and issubclass(cls, Value) and type(name) is str):
            raise pickle.UnpicklingError(f"it names builtins.getattr, and asks for {reprlib.repr(name)}")
        return type("Inner", (Value,), {})


def load_rank_file(path: Path) -> tuple[dict[str, Any], Archive]:
    """The state dict of one rank; its tensors stand for records of the file, see [Note: One view of an
    archive]. CheckpointError for a file that has anything else, or is damaged."""
    with refusing(lambda error: f"{path}: cannot be read ({(str(error) or repr(error)).splitlines()[0]})"):
        archive = Archive(path)
        loaded = archive.unpickle(_Unpickler)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not a state dict")
    return loaded, archive


# ----------------------------------------------------------------- all files


def put_together(key: str, values: Sequence[Sharded | None], stored: StoredByAddress) -> Parted:
    """``values``: by rank; ``stored``: what tensors stand for. ValueError where they make no whole tensor."""
    there = [value for value in values if value is not None]
    first = there[0]
    if any((each.kind, each.shape, each.dtype) != (first.kind, first.shape, first.dtype) for each in there):
        raise ValueError(f"{key} has another shape or dtype in another file")
    parts: dict[tuple[int, ...], Part] = {}
    for part in (
        _local_shards(there) if first.kind == "ShardedTensor" else _dtensor_parts(key, values, stored)
    ):
        if part.tensor.dtype != first.dtype or part.tensor.dim() != len(first.shape):
            raise ValueError(f"a part of {key} is {part.tensor.dtype} {tuple(part.tensor.shape)}")
        if part.tensor.numel():
            parts.setdefault(part.offsets, part)
    found = list(parts.values())
    numel = sum(part.tensor.numel() for part in found)
    if numel != math.prod(first.shape):
        raise ValueError(
            f"{numel} of the {math.prod(first.shape)} elements of {key} are there: name a folder with the "
            "files of all ranks and no others"
        )
    boxes = [(part.offsets, tuple(part.tensor.shape)) for part in found]
    inside = all(o + s <= whole for box in boxes for o, s, whole in zip(*box, first.shape, strict=True))
    if not inside or not do_tile(boxes, first.shape):
        raise ValueError(f"the parts of {key} do not make a tensor of shape {first.shape}")
    return Parted(first.shape, first.dtype, found)


def _local_shards(values: Sequence[Sharded]) -> Iterator[Part]:
    for value in values:
        for shard in value.shards:
            yield Part(ints(shard.metadata.shard_offsets, "a shard"), shard.tensor)


def _dtensor_parts(key: str, values: Sequence[Sharded | None], stored: StoredByAddress) -> Iterator[Part]:
    """Of DTensors with one sharded dimension, of all ranks of their mesh."""
    at = 0
    for local, dim in _in_mesh_order(key, values, stored):
        offsets = [0] * local.dim()
        if dim is not None:
            offsets[dim], at = at, at + local.shape[dim]
        yield Part(tuple(offsets), local)


def _in_mesh_order(
    key: str, values: Sequence[Sharded | None], stored: StoredByAddress
) -> Iterator[tuple[Tensor, int | None]]:
    """The local tensors of the first replica, and the dimension that is divided."""
    for rank, value in enumerate(values):
        if value is None or not isinstance(value.state._local_tensor, Tensor):
            raise ValueError(f"{key} is not in the file of rank {rank}")
        spec, local = value.state._spec, value.state._local_tensor
        axes = _mesh_sizes(spec.mesh._layout)
        kinds = [type(placement).__name__ for placement in spec.placements]
        dims = [placement.dim for placement in spec.placements if type(placement).__name__ == "Shard"]
        if math.prod(ints(axes, key)) != len(values) or len(dims) > 1 or {*kinds} - {"Shard", "Replicate"}:
            raise ValueError(
                f"{key} is a DTensor of placements {kinds} on a mesh of {axes} in {len(values)} files; what "
                "can be put together is one Shard, of the ranks of the mesh"
            )
        if read_stored(spec.mesh._rank_map, stored).tolist() != list(range(len(values))):
            raise ValueError(f"{key} is on a mesh of other ranks than the files are of")
        replica = _replica(rank, axes, kinds)
        if replica == 0:
            yield local, ints(dims, key)[0] if dims else None


def _mesh_sizes(layout: Any) -> list[Any]:
    """The size of each dimension of a mesh: until 2.12 torch saves one shape of them all, and since an axis
    of each."""
    if layout.axes is None:
        return list(layout.shape) if isinstance(layout.shape, tuple) else [layout.shape]
    return [axis.shape[0] if isinstance(axis.shape, tuple) else axis.shape for axis in layout.axes]


def _replica(rank: int, axes: Sequence[int], kinds: Sequence[str]) -> int:
    """The index of the replica that a rank belongs to."""
    replica = 0
    coordinates = []
    for size in reversed(axes):
        coordinates.append(rank % size)
        rank //= size
    for size, kind, coordinate in zip(axes, kinds, reversed(coordinates), strict=True):
        if kind == "Replicate":
            replica = replica * size + coordinate
    return replica


# ----------------------------------------------------------------- flat parameters


class Shape(NamedTuple):
    """Of a parameter. A dense one's elements are in flat parameters in the order they have in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Flat(NamedTuple):
    """Where a parameter lies in a flat parameter."""

    key: str
    start: int
    shape: Shape


def is_flat(key: str) -> bool:
    return is_flat_param_name(key.rpartition(".")[2])


def flat_places(flats: dict[str, tuple[int, int]], shapes: dict[str, Shape], ranks: int) -> dict[str, Flat]:
    """Where the parameters of ``shapes``, in the order of ``state_dict()``, are in the flat ones.

    ``flats``: by key, elements of the flat parameter, and of 16 bytes of it. ValueError for a misfit.
    """
    further = sorted(key for key in flats if not key.endswith(FLAT_PARAM))
    if further:
        raise ValueError(
            f"{further[0]} is one of several flat parameters of its unit, and these files do not say which "
            "parameters lie in it: load them into the model, and save that as FULL_STATE_DICT or "
            "SHARDED_STATE_DICT"
        )
    below: dict[str, list[str]] = {key: [] for key in flats}
    for name in shapes:
        owners = [key for key in flats if name.startswith(key.removesuffix(FLAT_PARAM))]
        if owners:
            below[max(owners, key=len)].append(name)
    places = {}
    for key, names in below.items():
        numel, unit = flats[key]
        starts = _starts([math.prod(shapes[name].sizes) for name in names], numel, unit, ranks)
        if starts is None:
            wanted = sum(math.prod(shapes[name].sizes) for name in names)
            raise ValueError(
                f"{key} has {numel} elements, the parameters in its place {wanted}: {names[:8]}; --like "
                "takes the state_dict() of the same model, unwrapped, in which parameters that are shared "
                "share memory"
            )
        places.update(
            {name: Flat(key, start, shapes[name]) for name, start in zip(names, starts, strict=True)}
        )
    return places


def _starts(numels: Sequence[int], total: int, unit: int, ranks: int) -> list[int] | None:
    """Of parameters one behind the other: without gaps, or (use_orig_params) each at a multiple of 16 bytes,
    with less than one element per rank at the end."""
    for step in (1, unit):
        starts, end = [], 0
        for numel in numels:
            starts.append(-(-end // step) * step)
            end = starts[-1] + numel
        if 0 <= total - end < (1 if step == 1 else max(ranks, 1)):
            return starts
    return None
