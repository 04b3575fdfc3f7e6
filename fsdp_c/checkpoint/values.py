"""What a checkpoint is given for a sharded tensor: this rank's range of its elements, as boxes, in its own memory.

[Note: Boxes of a range]
A shard of a flat parameter holds a range of each parameter's elements, in memory order. DCP knows parts of a tensor as
n-D boxes. A range of an n-D tensor is at most 2n - 1 of them, each in one piece of memory: so a rank saves its shard
without asking any other for elements, and loads into it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_c import _C
from fsdp_c.checkpoint.pieces import MAX_NBYTES, is_dense
from fsdp_c.sharded_values import from_memory_order, memory_order

Offsets = tuple[int, ...]
Order = tuple[int, ...] | None


class Part(NamedTuple):
    """An n-D box of a tensor."""

    shape: tuple[int, ...]
    offsets: Offsets


class RangeTensor(Tensor):
    """A tensor of which this rank holds the elements [start, start + local.numel()), in memory order, in ``local``.

    DCP saves and loads it part by part, from and to ``local``. It can be detached, cloned and moved, and nothing else.
    """

    local: Tensor
    start: int
    order: Order
    part: Part

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: Sequence[int], start: int, order: Order = None, part: Part | None = None
    ) -> RangeTensor:
        """``local``: 1-D. ``order``: the dimensions from the outermost in memory; None for a contiguous tensor.

        ``part``: where the range is one of a part of the tensor only, as under tensor parallelism, that part.
        """
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.start, made.order = local.detach(), start, order
        made.part = part or Part(tuple(shape), (0,) * len(shape))
        return made

    def _with(self, local: Tensor, shape: Sequence[int]) -> RangeTensor:
        return RangeTensor(local, shape, self.start, self.order, self.part)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        moves = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten._pin_memory.default)
        if func in moves and isinstance(args[0], cls):
            value = args[0]
            return value._with(func(value.local, *args[1:], **(kwargs or {})), value.shape)
        if func is aten.new_empty.default:
            empty = args[0].local.new_empty(args[0].local.shape, **(kwargs or {}))
            return args[0]._with(empty, args[1])
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
        return self._with(self.local.clone(), self.shape)

    @functools.cached_property
    def boxes(self) -> dict[Offsets, Tensor]:
        """By their offsets, views of ``local`` in the shapes of the boxes."""
        numel = self.local.numel()
        if not numel and math.prod(self.shape):
            return {}
        boxes = boxes_of(self.local, self.part.shape, self.start, self.order)
        return {tuple(map(operator.add, offsets, self.part.offsets)): box for offsets, box in boxes}

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        """DCP's protocol: what this rank writes."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(offsets, box), properties, torch.Size(self.shape)),
            )
            for offsets, box in self.boxes.items()
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


def whole_value(tensor: Tensor) -> Tensor:
    """A tensor that every rank has whole: itself, or its boxes where it is too large for one piece."""
    tensor = tensor.detach()
    if tensor.nbytes <= MAX_NBYTES or not is_dense(tensor):
        return tensor
    order = None if tensor.is_contiguous() else memory_order(tensor.stride())
    flat = (tensor if order is None else tensor.permute(order)).reshape(-1)
    return RangeTensor(flat, tensor.shape, 0, order)


def mapped_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``function`` applied to the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped_tensors(one, function) for key, one in value.items()}
    if isinstance(value, list):
        return [mapped_tensors(one, function) for one in value]
    return value
