"""What a checkpoint is given for a sharded tensor: this rank's range of its elements, as boxes, in its own memory.

[Note: Boxes of a range]
A shard of a flat parameter holds a range of each parameter's elements, in memory order. DCP knows parts of a tensor as
n-D boxes. A range of an n-D tensor is at most 2n - 1 of them, each in one piece of memory: so a rank saves its shard
without asking any other for elements, and loads into it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_c import _C
from fsdp_c.checkpoint.pieces import MAX_NBYTES, is_dense
from fsdp_c.sharded_values import from_memory_order, memory_order

Offsets = tuple[int, ...]
Order = tuple[int, ...] | None


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: Offsets
    sizes: tuple[int, ...]


class RangeTensor(Tensor):
    """A tensor of which this rank holds the elements [start, start + local.numel()), in memory order, in ``local``.

    DCP saves and loads it part by part, from and to ``local``. It can be detached, cloned and moved, and nothing else.
    """

    local: Tensor
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
        """``local``: 1-D. ``order``: the dimensions from the outermost in memory; None for a contiguous tensor.

        ``box``: the part of the tensor that the range is of, as tensor parallelism leaves it; by default all of it.
        ``is_replica``: others hold the same elements, perhaps in other ranges, and write them.
        """
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.start, made.order = local.detach(), start, order
        made.box = box or Box((0,) * len(shape), tuple(shape))
        made.is_replica = is_replica
        return made

    def _like(self, local: Tensor) -> RangeTensor:
        return RangeTensor(local, self.shape, self.start, self.order, self.box, self.is_replica)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        moves = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten._pin_memory.default)
        if func in moves and isinstance(args[0], cls):
            return args[0]._like(func(args[0].local, *args[1:], **(kwargs or {})))
        if func is aten.new_empty.default:
            empty = args[0].local.new_empty(args[0].local.shape, **(kwargs or {}))
            return cls(empty, args[1], args[0].start, args[0].order, args[0].box, args[0].is_replica)
        if func is aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]):
            args[0].local.copy_(args[1].local, **(kwargs or {}))
            return args[0]
        raise NotImplementedError(
            f"{func} of a RangeTensor: it holds this rank's part of a tensor for torch.distributed.checkpoint; "
            "for tensors to compute with use state_dict()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        end = self.start + self.local.numel()
        return f"RangeTensor(shape={tuple(self.shape)}, range=[{self.start}, {end}), local={self.local})"

    def __deepcopy__(self, memo: Any) -> RangeTensor:
        return self._like(self.local.clone())

    @functools.cached_property
    def boxes(self) -> dict[Offsets, Tensor]:
        """By their offsets, views of ``local`` in the shapes of the boxes."""
        numel = self.local.numel()
        if not numel and math.prod(self.shape):
            return {}
        return {
            tuple(map(int.__add__, offsets, self.box.offsets)): part
            for offsets, part in boxes_of(self.local, self.box.sizes, self.start, self.order)
        }

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        """DCP's protocol: what this rank writes."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(offsets, box), properties, torch.Size(self.shape)),
            )
            for offsets, box in ({} if self.is_replica else self.boxes).items()
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


def _chunk(offsets: Offsets, box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), box.shape)


def boxes_of(local: Tensor, shape: Sequence[int], start: int, order: Order) -> Iterator[tuple[Offsets, Tensor]]:
    """The boxes of a range, and views of ``local`` in their shapes; none larger than a piece may be."""
    if not math.prod(shape):
        yield (0,) * len(shape), local.view(tuple(shape))
        return
    outer = list(shape) if order is None else [shape[dim] for dim in order]
    at = 0
    for first, last in _steps(start, start + local.numel(), MAX_NBYTES // local.element_size()):
        for offsets, sizes in _C.flat_range_boxes(outer, first, last):
            numel = math.prod(sizes)
            box_shape = tuple(sizes) if order is None else _natural(sizes, order)
            yield (
                tuple(offsets) if order is None else _natural(offsets, order),
                from_memory_order(local[at : at + numel], box_shape, order),
            )
            at += numel


def _steps(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut at multiples of ``step``, which are the same for every holder of the tensor."""
    while start < end:
        following = min(end, (start // step + 1) * step)
        yield start, following
        start = following


def _natural(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """From the order in memory to that of the dimensions."""
    result = [0] * len(order)
    for value, dim in zip(values, order, strict=True):
        result[dim] = value
    return tuple(result)


def box_of_rank(spec: Any) -> Box:
    """This rank's part of a DTensor of these placements. Raises NotImplementedError where it is a summand."""
    if any(placement.is_partial() for placement in spec.placements):
        raise NotImplementedError(f"a tensor placed {spec.placements} is a sum over ranks: redistribute it to save it")
    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return Box(tuple(offsets), tuple(sizes))


def whole_value(tensor: Tensor) -> Tensor:
    """A tensor that every rank has whole: itself, or its boxes where it is too large for one piece; or a DTensor's
    part on this rank."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return in_box(tensor.to_local(), tensor.shape, box_of_rank(tensor._spec))
    if tensor.nbytes <= MAX_NBYTES or not is_dense(tensor):
        return tensor
    return in_box(tensor, tensor.shape, None)


def in_box(local: Tensor, shape: Sequence[int], box: Box | None, is_replica: bool = False) -> RangeTensor:
    """All of a box of a tensor of ``shape``, which is ``local``, in the same memory."""
    if not is_dense(local):
        raise NotImplementedError(f"a part of shape {tuple(local.shape)}, strides {local.stride()}: make it contiguous")
    order = None if local.is_contiguous() else memory_order(local.stride())
    flat = (local if order is None else local.permute(order)).reshape(-1)
    return RangeTensor(flat, shape, 0, order, box, is_replica)


def mapped_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``function`` applied to the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped_tensors(one, function) for key, one in value.items()}
    if isinstance(value, list):
        return [mapped_tensors(one, function) for one in value]
    return value
