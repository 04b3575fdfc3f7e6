"""What a checkpoint is given for a sharded tensor: this rank's range of it, as boxes, in its own memory.

[Note: Boxes of a range]
A shard of a flat parameter holds a range of each parameter's elements, in memory order. DCP knows parts of a
tensor as n-D boxes. A range of an n-D tensor is at most 2n - 1 of them, each in one piece of memory: so a
rank saves its shard without asking any other for elements, and loads into it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_c.checkpoint import pieces
from fsdp_c.checkpoint.pieces import is_dense, narrowed
from fsdp_c.checkpoint.planning import Held, Offsets, Order
from fsdp_c.state.sharded_values import from_memory_order, memory_order


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: Offsets
    sizes: tuple[int, ...]


class PartialTensor(Tensor):
    """A tensor of which this rank holds a part, in ``local``.

    DCP saves and loads it box by box, from and to ``local``. It can be detached, cloned and moved, and
    nothing else.
    """

    local: Tensor
    is_replica = False

    def _like(self, local: Tensor) -> PartialTensor:
        """The same part of another tensor."""
        raise NotImplementedError

    @property
    def boxes(self) -> dict[Offsets, Tensor]:
        """Views of ``local`` in the shapes of the boxes, by the offsets of the boxes."""
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way to say so

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what its default is, which is no method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        moves = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten._pin_memory.default)
        if func in moves and isinstance(args[0], cls):
            return args[0]._like(func(args[0].local, *args[1:], **(kwargs or {})))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            return args[0]._like(args[0].local.new_empty(args[0].local.shape, **(kwargs or {})))
        if func is aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            args[0].local.copy_(args[1].local, **(kwargs or {}))
            return args[0]
        raise NotImplementedError(
            f"{func} of a {cls.__name__}: it holds this rank's part of a tensor for "
            "torch.distributed.checkpoint; for tensors to compute with use state_dict()"
        )

    def __deepcopy__(self, memo: object) -> PartialTensor:
        return self._like(self.local.clone())

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """DCP's protocol: what this rank writes."""
        properties = TensorProperties(dtype=self.dtype)
        boxes = {} if self.is_replica else self.boxes
        _refuse_safetensors_writer(fqn, self.shape, boxes.values())
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(offsets, box), properties, torch.Size(self.shape)),
            )
            for offsets, box in boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP's protocol: what this rank wants to read."""
        return [_chunk(offsets, box) for offsets, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP's protocol: the memory of one box."""
        offsets = tuple(index.offset or ())
        if offsets not in self.boxes:
            raise ValueError(f"{index.fqn}: this rank holds nothing at {offsets}, but at {list(self.boxes)}")
        return self.boxes[offsets]


def _refuse_safetensors_writer(fqn: str, shape: torch.Size, boxes: Collection[Tensor]) -> None:
    """Raise NotImplementedError where ``dcp.save`` is planning for a writer that would drop boxes without an error.

    torch's HuggingFaceStorageWriter writes one box of a tensor for each rank, and without ``save_distributed`` all
    ranks write the same file. DCP does not pass the writer to what it plans, so it is looked up on the stack.
    """
    if all(box.shape == shape for box in boxes):
        return
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name != "local_step":
        frame = frame.f_back
    writer = frame.f_locals.get("storage_writer")
    if isinstance(writer, HuggingFaceStorageWriter) and (len(boxes) > 1 or not writer.save_distributed):
        raise NotImplementedError(
            f"{fqn}: {len(boxes)} boxes of it on this rank cannot be saved by torch's HuggingFaceStorageWriter, which "
            "writes one box of a tensor for each rank, and without save_distributed=True those of one rank: save with "
            "fsdp_c.checkpoint.save, then run python -m fsdp_c.checkpoint export"
        )


Partial = TypeVar("Partial", bound=PartialTensor)


def _wrapper(cls: type[Partial], local: Tensor, shape: Sequence[int]) -> Partial:
    made: Partial = torch.Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), dtype=local.dtype, device=local.device
    )
    made.local = local.detach()
    return made


class RangeTensor(PartialTensor):
    """The elements [start, start + local.numel()) of a tensor, or of a box of it, in memory order."""

    start: int
    order: Order
    box: Box
    is_replica: bool

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shape: Sequence[int],
        start: int,
        order: Order = None,
        box: Box | None = None,
        is_replica: bool = False,
    ) -> RangeTensor:
        """``local``: 1-D. ``order``: the dimensions from the outermost in memory; None for a contiguous
        tensor.

        ``box``: the part of the tensor that the range is of, as tensor parallelism leaves it; by default all
        of it. ``is_replica``: others hold the same elements, perhaps in other ranges, and write them.
        """
        made = _wrapper(cls, local, shape)
        made.start, made.order = start, order
        made.box = box or Box((0,) * len(shape), tuple(shape))
        made.is_replica = is_replica
        return made

    def _like(self, local: Tensor) -> RangeTensor:
        return RangeTensor(local, self.shape, self.start, self.order, self.box, self.is_replica)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch declares it untyped
        end = self.start + self.local.numel()
        return f"RangeTensor(shape={tuple(self.shape)}, range=[{self.start}, {end}), local={self.local})"

    @property
    def is_saved(self) -> bool:
        """Whether this rank saves any of it."""
        return not self.is_replica and (self.local.numel() > 0 or not self.shape.numel())

    @property
    def held(self) -> Held | None:
        """What this rank saves of it."""
        return self._range if self.is_saved else None

    @property
    def _range(self) -> Held:
        numel = self.local.numel()
        return Held(
            self.dtype, tuple(self.shape), self.order, *self.box, self.start, numel, is_one_piece=False
        )

    @functools.cached_property
    def boxes(self) -> dict[Offsets, Tensor]:
        is_nothing = not self.local.numel() and self.shape.numel()
        return {} if is_nothing else dict(boxes_of(self.local, self._range))


def _chunk(offsets: Offsets, box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), box.shape)


def boxes_of(local: Tensor, held: Held) -> Iterator[tuple[Offsets, Tensor]]:
    """The boxes of a range, and views of ``local`` in their shapes; none larger than a piece may be."""
    at = 0
    for box in held.boxes():
        yield box.offsets, from_memory_order(local[at : at + box.numel], box.sizes, held.order)
        at += box.numel


def box_of_rank(spec: DTensorSpec) -> Box:
    """This rank's part of a DTensor of these placements. Raises NotImplementedError where it is a summand."""
    if any(placement.is_partial() for placement in spec.placements):
        raise NotImplementedError(
            f"a tensor placed {spec.placements} is a sum over ranks: redistribute it to save it"
        )
    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return Box(tuple(offsets), tuple(sizes))


def whole_value(tensor: Tensor) -> Tensor:
    """A tensor that every rank has whole: itself, or its boxes where it is too large for one piece; or this
    rank's part of a DTensor, or of a plain tensor that says which part of another it is."""
    if is_in_parts(tensor):
        return LocalParts.of(tensor, tensor)
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return in_box(tensor.to_local(), tensor.shape, box_of_rank(tensor._spec))
    if tensor.nbytes <= pieces.MAX_NBYTES or not is_dense(tensor):
        return tensor
    return in_box(tensor, tensor.shape, None)


def in_box(local: Tensor, shape: Sequence[int], box: Box | None, is_replica: bool = False) -> RangeTensor:
    """``local`` as one whole box of a tensor of ``shape``. Shares its memory."""
    if not is_dense(local):
        raise NotImplementedError(
            f"a part of shape {tuple(local.shape)}, strides {local.stride()}: make it contiguous"
        )
    order = None if local.is_contiguous() else memory_order(local.stride())
    flat = (local if order is None else local.permute(order)).reshape(-1)
    return RangeTensor(flat, shape, 0, order, box, is_replica)


TOO_DEEP = "is nested too deeply to be saved, or holds itself"


def mapped_tensors(name: str, value: Any, function: Callable[[str, Tensor], object]) -> Any:
    """``value`` with ``function``, given names and tensors, applied to those in nested dicts and lists.

    Raises NotImplementedError for a part of a tensor in a tuple, which DCP pickles as one object, and for a
    tensor that is not one array of numbers; ValueError for a dict or list that holds itself.
    """
    try:
        return _mapped(name, value, function)
    except RecursionError:
        raise ValueError(f"{name} {TOO_DEEP}") from None


def _mapped(name: str, value: Any, function: Callable[[str, Tensor], object]) -> Any:
    if isinstance(value, Tensor):
        if value.is_quantized or value.is_nested or value.layout != torch.strided:
            raise NotImplementedError(
                f"{name}: a sparse, nested or quantized tensor: save the tensors it is made of"
            )
        return function(name, value)
    if isinstance(value, dict):
        return {key: _mapped(f"{name}.{key}", one, function) for key, one in value.items()}
    if isinstance(value, list):
        return [_mapped(f"{name}.{index}", one, function) for index, one in enumerate(value)]
    if isinstance(value, tuple) and any(isinstance(one, Tensor) and is_in_parts(one) for one in value):
        raise NotImplementedError(
            f"{name}: a part of a tensor in a tuple, which is saved as one object: use a list"
        )
    return value


# ----------------------------------------------------------------- plain tensors that are parts of others


_PROTOCOL = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_in_parts(tensor: Tensor) -> bool:
    """Whether a plain tensor holds parts of a larger one, as DCP's protocol ``CheckpointableTensor`` says it.

    torch has it since 2.14, and would save such a tensor as whole before.
    """
    return not isinstance(tensor, PartialTensor) and all(hasattr(tensor, name) for name in _PROTOCOL)


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the larger tensor."""
    return tuple(getattr(tensor, _PROTOCOL[0]))


class _Part(NamedTuple):
    """A box of the larger tensor, and where it begins in the local one; () for a local one that is it."""

    offsets: Offsets
    local_offsets: Offsets
    sizes: tuple[int, ...]

    def fits(self, shape: Sequence[int], local_shape: Sequence[int]) -> bool:
        return _is_inside(self.offsets, self.sizes, shape) and (
            _is_inside(self.local_offsets or (0,) * len(local_shape), self.sizes, local_shape)
        )


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(
        0 <= o and 0 <= s and o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True)
    )


class LocalParts(PartialTensor):
    """Boxes of a tensor that lie in ``local``, each a box of that."""

    parts: tuple[_Part, ...]

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], parts: tuple[_Part, ...]) -> LocalParts:
        made = _wrapper(cls, local, shape)
        made.parts = parts
        return made

    @classmethod
    def of(cls, local: Tensor, described: Tensor) -> LocalParts:
        """``local`` as the protocol's attributes of ``described`` say. ValueError where they do not fit."""
        columns = [tuple(map(tuple, getattr(described, name))) for name in _PROTOCOL[1:]]
        shape = global_shape(described)
        if len({len(column) for column in columns}) != 1:
            raise ValueError(
                f"{', '.join(_PROTOCOL[1:])} have different lengths: {[len(each) for each in columns]}"
            )
        parts = tuple(_Part(*each) for each in zip(*columns, strict=True))
        wrong = [part for part in parts if not part.fits(shape, local.shape)]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is not inside a tensor of shape {shape} and this one of {tuple(local.shape)}"
            )
        return cls(local, shape, parts)

    def _like(self, local: Tensor) -> LocalParts:
        return LocalParts(local, self.shape, self.parts)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch declares it untyped
        return f"LocalParts(shape={tuple(self.shape)}, parts={self.parts}, local={self.local})"

    @functools.cached_property
    def boxes(self) -> dict[Offsets, Tensor]:
        found: dict[Offsets, Tensor] = {}
        for part in self.parts:
            own = self._own(self.local, part)
            dense = own.numel() and is_dense(own)
            found.update(
                in_box(own, self.shape, Box(part.offsets, part.sizes)).boxes if dense else {part.offsets: own}
            )
        return found

    @staticmethod
    def _own(local: Tensor, part: _Part) -> Tensor:
        return narrowed(local, part.local_offsets or (0,) * local.dim(), part.sizes)

    @property
    def numel_held(self) -> int:
        return sum(math.prod(part.sizes) for part in self.parts)

    @torch.no_grad()
    def taken_from(self, whole: Tensor) -> Tensor:
        """A plain tensor as this was made of, attributes included, with the elements of ``whole``."""
        if whole.shape != self.shape:
            raise ValueError(
                f"shape {tuple(whole.shape)} in the checkpoint, {tuple(self.shape)} in the model"
            )
        local = self.local.clone()
        for part in self.parts:
            self._own(local, part).copy_(narrowed(whole, part.offsets, part.sizes))
        columns = zip(*self.parts, strict=True) if self.parts else ((), (), ())
        for name, value in zip(_PROTOCOL, (tuple(self.shape), *columns), strict=True):
            setattr(local, name, value)
        return local


def value_of_state(state: Tensor, param: Tensor) -> Tensor:
    """Optimizer state of a parameter of no unit: in the parameter's parts where it has its shape."""
    if is_in_parts(param) and not is_in_parts(state) and state.shape == param.shape:
        return LocalParts.of(state, param)
    return whole_value(state)


def as_held(value: object, held: object) -> object:
    """What was read whole, in dicts and lists: parts of it where ``held``, of the same form, has parts."""
    if isinstance(held, LocalParts) and isinstance(value, Tensor):
        return held.taken_from(value)
    if isinstance(held, dict) and isinstance(value, dict):
        return {key: as_held(one, held.get(key)) for key, one in value.items()}
    if isinstance(held, list) and isinstance(value, list) and len(held) == len(value):
        return [as_held(*each) for each in zip(value, held, strict=True)]
    return value
