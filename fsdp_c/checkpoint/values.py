"""Sharded tensors in a checkpoint: this rank's range of a tensor, as boxes, in its own memory.

[Note: Boxes of a range]
A shard of a flat parameter holds a range of each parameter's elements, in memory order. DCP represents parts
of a tensor as n-D boxes. A range of an n-D tensor is the union of at most 2n - 1 boxes, each contiguous in
memory, so a rank saves its shard, and loads into it, without elements from other ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_c.checkpoint.contents import Box
from fsdp_c.checkpoint.pieces import is_dense
from fsdp_c.checkpoint.planning import Held, Offsets, Order
from fsdp_c.state.sharded_values import from_memory_order, memory_order, to_memory_order


class RangeTensor(Tensor):
    """Elements [start, start + local.numel()) of a tensor or of a box of it, in memory order, stored in ``local``.

    DCP saves and loads it box by box, from and to ``local``. Supported operations are detach, clone, copies
    and moves.
    """

    local: Tensor
    start: int
    order: Order
    box: Box
    is_replica: bool
    is_copy = False  # true if ``local`` is memory outside of model and optimizer

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
        """Wrap ``local``, 1-D. ``order``: dimensions from the outermost in memory; None for a contiguous tensor.

        ``box``: the rank's box of the tensor under tensor parallelism; by default the whole tensor.
        ``is_replica``: true if other ranks hold the same elements, perhaps in other ranges, and write them.
        """
        tensor: RangeTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.start, tensor.order = local.detach(), start, order
        tensor.box = box or ((0,) * len(shape), tuple(shape))
        tensor.is_replica = is_replica
        return tensor

    def _like(self, local: Tensor) -> RangeTensor:
        """Return the same part of another tensor."""
        return RangeTensor(local, self.shape, self.start, self.order, self.box, self.is_replica)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # untyped in torch
        end = self.start + self.local.numel()
        return f"RangeTensor(shape={tuple(self.shape)}, range=[{self.start}, {end}), local={self.local})"

    @property
    def is_saved(self) -> bool:
        """True if this rank saves any of its elements."""
        return not self.is_replica and (self.local.numel() > 0 or not self.shape.numel())

    @property
    def held(self) -> Held:
        """Description of this rank's part of the tensor."""
        numel = self.local.numel()
        return Held(self.dtype, tuple(self.shape), self.order, *self.box, self.start, numel)

    @functools.cached_property
    def boxes(self) -> dict[Offsets, Tensor]:
        """Views of ``local`` in the shapes of the boxes, by the boxes' offsets. None is larger than a piece."""
        return boxes_of(self.local, self.held)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's idiom

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the default, which is not a method
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

    def __deepcopy__(self, memo: object) -> RangeTensor:
        return self._like(self.local.clone())

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """Return this rank's write items, by DCP's protocol."""
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
        """Return the chunks that this rank reads, by DCP's protocol."""
        if self.is_copy:
            raise NotImplementedError(
                "dcp.load cannot load into optim_state() of an optimizer that keeps state in 8 or 4 bits, as that is a "
                "copy in float32: load by fsdp_c.checkpoint.load, or by get_state_dict and set_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        return [_chunk(offsets, box) for offsets, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of one box, by DCP's protocol."""
        offsets = tuple(index.offset or ())
        if offsets not in self.boxes:
            raise ValueError(
                f"{index.fqn}: this rank holds no elements at {offsets}, only at {list(self.boxes)}"
            )
        return self.boxes[offsets]


def _refuse_safetensors_writer(fqn: str, shape: torch.Size, boxes: Collection[Tensor]) -> None:
    """Raise NotImplementedError if ``dcp.save`` is planning for a writer that would silently drop boxes.

    torch's HuggingFaceStorageWriter writes one box of a tensor per rank, and without ``save_distributed`` all
    ranks write the same file. DCP does not pass the writer to the planning of tensors, so it is looked up on
    the stack.
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


def _chunk(offsets: Offsets, box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), box.shape)


def boxes_of(local: Tensor, held: Held) -> dict[Offsets, Tensor]:
    """Return views of ``local`` in the shapes of the boxes of a range, by the boxes' offsets."""
    found: dict[Offsets, Tensor] = {}
    at = 0
    for box in held.boxes():
        found[box.offsets] = from_memory_order(local[at : at + box.numel], box.sizes, held.order)
        at += box.numel
    return found


def box_of_rank(spec: DTensorSpec) -> Box:
    """Return this rank's part of a DTensor with these placements. Raise NotImplementedError for a partial sum."""
    if any(placement.is_partial() for placement in spec.placements):
        raise NotImplementedError(
            f"a tensor placed {spec.placements} is a sum over ranks: redistribute it to save it"
        )
    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(offsets), tuple(sizes)


def whole_value(tensor: Tensor) -> Tensor:
    """Return a tensor that every rank has in full, or this rank's part of a DTensor.

    Raises NotImplementedError for a plain tensor marked as part of another.
    """
    tensor = unless_part(tensor).detach()
    if isinstance(tensor, DTensor):
        return in_box(tensor.to_local(), tensor.shape, box_of_rank(tensor._spec))
    return tensor


def in_box(
    local: Tensor, shape: Sequence[int], box: Box | None = None, is_replica: bool = False
) -> RangeTensor:
    """Return ``local``, as one box of a tensor of ``shape``. Memory is shared."""
    if not is_dense(local):
        raise NotImplementedError(
            f"a part of shape {tuple(local.shape)}, strides {local.stride()}: make it contiguous"
        )
    order = None if local.is_contiguous() else memory_order(local.stride())
    return RangeTensor(to_memory_order(local, order), shape, 0, order, box, is_replica)


def is_part(tensor: Tensor) -> bool:
    """Return True for a plain tensor with the attributes of DCP's ``CheckpointableTensor``: a part of a larger one."""
    return hasattr(tensor, "global_offsets") and not isinstance(tensor, DTensor | RangeTensor)


def unless_part(tensor: Tensor) -> Tensor:
    """Return ``tensor``. Raise NotImplementedError for a part of a larger one, otherwise saved as a full tensor."""
    if is_part(tensor):
        shape = tuple(getattr(tensor, "global_shape", ()))
        raise NotImplementedError(
            f"its attributes say that it is a part of a tensor of shape {shape} "
            "(CheckpointableTensor): make it a DTensor, or remove the attributes"
        )
    return tensor


TOO_DEEP = "is nested too deeply to be saved, or contains itself"


def map_tensors(name: str, value: Any, function: Callable[[Tensor], object]) -> Any:
    """Return ``value`` with ``function`` applied to tensors in nested dicts and lists. Errors name the tensor.

    Raises NotImplementedError for a tensor that is not one array of numbers; ValueError for a dict or list
    that contains itself.
    """
    try:
        return _map_tensors(name, value, function)
    except RecursionError:
        raise ValueError(f"{name} {TOO_DEEP}") from None


def _map_tensors(name: str, value: Any, function: Callable[[Tensor], object]) -> Any:
    if isinstance(value, Tensor):
        if value.is_quantized or value.is_nested or value.layout != torch.strided:
            raise NotImplementedError(
                f"{name}: a sparse, nested or quantized tensor. Save its component tensors"
            )
        try:
            return function(value)
        except (NotImplementedError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    if isinstance(value, dict):
        return {key: _map_tensors(f"{name}.{key}", one, function) for key, one in value.items()}
    if isinstance(value, list):
        return [_map_tensors(f"{name}.{index}", one, function) for index, one in enumerate(value)]
    return value
