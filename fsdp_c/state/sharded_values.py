"""Parameters under SHARDED_STATE_DICT: this rank's rows, as a ShardedTensor or a DTensor.

[Note: Rows of parameters that lie otherwise in memory]
Rows are ranges of a parameter's elements, and are exchanged as such, if the first dimension is the outermost
in memory, as in contiguous and channels_last parameters. Other parameters are gathered, and each rank keeps
its own rows. A 0-d parameter has no rows: every rank has all of it, as a plain tensor, or as a DTensor under
a device mesh.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
    custom_sharded_op_impl,
)
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.holders import ranks_of
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.sharding.tensor_parallel import ParamExtension, divide_over_mesh, full_shape
from fsdp_c.state.redistribution import (
    DEVICE_BATCH_NBYTES,
    Partition,
    ReceiveBuffer,
    are_large,
    chunk_partition,
    gather,
    gather_flat,
    redistribute,
    shard_partition,
)
from fsdp_c.tools import collective_errors

FULL_BATCH_NBYTES = 8 * 2**20


OfUnit = TypeVar("OfUnit", bound=tuple[Any, ...])  # tuple that begins with the unit


class ParamLayout(NamedTuple):
    """Division of one parameter of a unit in its flat parameter, and into rows."""

    shape: torch.Size
    # dimensions from the outermost in memory to the innermost; None if contiguous
    order: tuple[int, ...] | None
    shard: Partition
    rows: Partition | None  # None: see [Note: Rows of parameters that lie otherwise in memory]
    memory_shape: tuple[int, ...]  # shape with the dimensions in memory order
    own_rows: tuple[int, ...]  # memory_shape of this rank's rows
    # extension's description of a parameter that is a local part under tensor parallelism; else None
    parallel: ParamExtension

    @property
    def full_shape(self) -> torch.Size:
        """Shape over the ranks of tensor parallelism too."""
        return full_shape(self.parallel, self.shape)

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view of all elements, in memory order, with the parameter's shape and strides."""
        return dims_from_memory(flat.view(self.memory_shape), self.order)


# unit, layout of a parameter, and this rank's part of a tensor divided like it
Part = tuple[ShardedModule, ParamLayout, Tensor]

_layouts: weakref.WeakKeyDictionary[FlatParamHandle, list[ParamLayout]] = weakref.WeakKeyDictionary()


def param_layouts(module: ShardedModule) -> list[ParamLayout]:
    """Return the layouts of a unit's parameters, in the order of its flat parameter."""
    handle = handle_of(module)
    known = _layouts.get(handle)
    if known is not None:
        return known
    flat_param, layout = handle.flat_param, handle.layout
    layouts = []
    for index, shape in enumerate(flat_param._shapes):
        order = None if flat_param._contiguities[index] else memory_order(flat_param._strides[index])
        memory_shape = tuple(shape if order is None else (shape[dim] for dim in order))
        by_rows = shape and (order is None or order[0] == 0)
        rows = chunk_partition(shape, module.world_size) if by_rows else None
        own_rows = tuple(rows_shape(torch.Size(memory_shape), rows.numel_on(module.rank) if rows else 0))
        parallel = flat_param._param_extensions[index]
        shard = shard_partition(layout, index)
        layouts.append(ParamLayout(shape, order, shard, rows, memory_shape, own_rows, parallel))
    _layouts[handle] = layouts
    return layouts


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from the outermost in memory to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def to_memory_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return the elements of a tensor, 1-D, with its dimensions in this order: a view if they are so in memory."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def from_memory_order(tensor: Tensor, shape: Sequence[int], order: tuple[int, ...] | None) -> Tensor:
    """Return a view of ``shape``, with the strides of ``order``, of a result of ``to_memory_order``, of any shape."""
    memory_shape = shape if order is None else [shape[dim] for dim in order]
    return dims_from_memory(tensor.view(memory_shape), order)


def dims_from_memory(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return a view of a tensor of a ``memory_shape`` with the dimensions in their own order."""
    return tensor if order is None else tensor.permute(sorted(range(len(order)), key=lambda dim: order[dim]))


def rows_shape(shape: torch.Size, numel: int) -> list[int]:
    """Return the shape of ``numel`` elements that are complete rows of a tensor of ``shape``."""
    row = shape[1:].numel()
    return [numel // row if row else 0, *shape[1:]]


def split_shard(module: ShardedModule, shard: Tensor) -> Iterator[tuple[ParamLayout, Tensor]]:
    """Return (layout, view) of each parameter's part of a tensor that is sharded like the unit's flat parameter."""
    sizes, end = [], 0  # one split costs less than a view per parameter
    for _, offset, numel, _ in handle_of(module).layout.shard_ranges():
        start = max(offset, end) if numel else end
        sizes += [start - end, numel]
        end = start + numel
    parts = shard.split_with_sizes([*sizes, shard.numel() - end])
    return zip(param_layouts(module), parts[1::2], strict=True)


# ----------------------------------------------------------------- conversion between shards and rows


def saved_parts(
    parts: Sequence[Part],
    as_rows: bool,
    rank0_only: bool,
    offloads: Callable[[ShardedModule], bool],
    is_receiver: bool | None = None,
) -> list[Any]:
    """Return the state dict value of each part: this rank's rows if ``as_rows``, else the full tensor. Collective.

    Values are new, in CPU memory for units that ``offloads``, and None on ranks without a result. Tensor
    parallelism makes them DTensors. ``is_receiver``: True on the one rank that keeps values, as plain
    tensors, and False on the others; None if each rank keeps its values.
    """
    values: list[Any] = [None] * len(parts)

    def put(index: int, value: Tensor, is_new: bool) -> None:
        module, layout, _ = parts[index]
        if (extension := module._fsdp_extension) is not None:
            if layout.parallel is not None:
                value = extension.post_unflatten_transform(value, layout.parallel)
            if as_rows and module._device_mesh is not None:
                value = divide_over_mesh(value, extension, module.rank, module._device_mesh)
            if is_receiver is not None and isinstance(value, DTensor):
                value = value.full_tensor()
        if is_receiver is not False:
            device = torch.device("cpu") if offloads(module) else value.device
            values[index] = value.to(device, copy=not is_new)

    sharded: list[tuple[ShardedModule, int]] = []
    for module, of_unit in itertools.groupby(range(len(parts)), lambda index: parts[index][0]):
        if handle_of(module).layout.sharded:
            sharded += [(module, index) for index in of_unit]
        else:
            for index in of_unit:
                put(index, parts[index][2], is_new=False)
    for group, items in by_group(sharded):
        rows: list[int] = []
        wholes: list[int] = []
        for module, index in items:
            is_direct = as_rows and _keeps_rows_of_shards(module) and parts[index][1].rows is not None
            (rows if is_direct else wholes).append(index)
        with collective_errors.gathering(*dict.fromkeys(handle_of(module) for module, _ in items)):
            # offloaded before the next batch is made
            for index, own in zip(rows, _rows([parts[index] for index in rows], group), strict=True):
                put(index, own, is_new=True)
            found = wholes_of_parts([parts[index] for index in wholes], group, rank0_only)
            for index, whole in zip(wholes, found, strict=True):
                module = parts[index][0]
                if whole is None:
                    continue
                if as_rows and module._fsdp_extension is None:
                    whole = saved_rows(whole, module).clone()
                put(index, whole, is_new=True)
    return values


def saved_shards(
    shards: Sequence[tuple[ShardedModule, Tensor]],
    as_rows: bool,
    rank0_only: bool,
    offloads: Callable[[ShardedModule], bool],
    is_receiver: bool | None = None,
) -> list[list[Any]]:
    """Return ``saved_parts`` of each unit's shard; empty lists on ranks without a result. Collective."""
    values: list[list[Any]] = [[] for _ in shards]
    flat: list[tuple[ShardedModule, Tensor, int]] = []
    parts: list[Part] = []
    places: list[int] = []
    for place, (module, shard) in enumerate(shards):
        is_sharded = handle_of(module).layout.sharded
        if is_sharded and not as_rows and not handle_of(module).is_parallel:
            flat.append((module, shard, place))
            continue
        for layout, part in split_shard(module, shard):
            parts.append((module, layout, part if is_sharded else layout.shaped(part)))
            places.append(place)
    for group, items in by_group(flat):
        found = wholes_of_shards([(module, shard) for module, shard, _ in items], group, rank0_only)
        for (module, _, place), wholes in zip(items, found, strict=True):
            if is_receiver is not False:
                values[place] = [whole.cpu() for whole in wholes] if offloads(module) else wholes
    saved = saved_parts(parts, as_rows, rank0_only, offloads, is_receiver)
    for place, value in zip(places, saved, strict=True):
        values[place] += [] if value is None else [value]
    return values


def wholes_of_shards(
    shards: Sequence[tuple[ShardedModule, Tensor]], group: dist.ProcessGroup, rank0_only: bool
) -> Iterator[list[Tensor]]:
    """Yield the full parameters of each unit's shard; empty lists on ranks without a result. Collective.

    Memory beyond the results is one batch: the largest unit, or ``FULL_BATCH_NBYTES`` if units are smaller.
    """
    limit = max(
        *(handle_of(module).layout.padded_numel * shard.itemsize for module, shard in shards),
        FULL_BATCH_NBYTES,
    )
    buffer, nbytes = ReceiveBuffer(), 0
    batch: list[tuple[ShardedModule, Tensor]] = []
    for index, (module, shard) in enumerate(shards):
        batch.append((module, shard.to(module.compute_device)))
        nbytes += sum(handle_of(module).layout.param_numels) * shard.itemsize
        if nbytes < limit and index + 1 < len(shards):
            continue
        layouts = [param_layouts(one) for one, _ in batch]
        count = sum(map(len, layouts))
        wholes: Iterator[Tensor | None]
        if rank0_only or are_large(nbytes, count, batch[0][1].device, group):
            items = [(one, *part) for one, own in batch for part in split_shard(one, own)]
            wholes = wholes_of_parts(items, group, rank0_only)
        else:
            sources = [[layout.shard for layout in own] for own in layouts]
            shapes = [[layout.memory_shape for layout in own] for own in layouts]
            flats = gather_flat([own for _, own in batch], sources, shapes, group, buffer)
            orders = (layout.order for own in layouts for layout in own)
            wholes = map(dims_from_memory, flats, orders)
        with collective_errors.gathering(*(handle_of(one) for one, _ in batch)):
            for own in layouts:
                yield [whole for whole in itertools.islice(wholes, len(own)) if whole is not None]
        batch, nbytes = [], 0


def wholes_of_parts(
    items: Sequence[Part], group: dist.ProcessGroup, rank0_only: bool
) -> Iterator[Tensor | None]:
    """Yield full tensors from this rank's 1-D part of each shard; None on ranks without a result. Collective."""
    if not items:
        return
    largest = max(handle_of(module).layout.padded_numel * piece.itemsize for module, _, piece in items)
    wholes = gather(
        (piece for _, _, piece in items),
        [layout.shard for _, layout, _ in items],
        group,
        rank0_only=rank0_only,
        device=items[0][0].compute_device,
        shapes=[layout.memory_shape for _, layout, _ in items],
        batch_nbytes=max(largest, FULL_BATCH_NBYTES),
    )
    for (_, layout, _), whole in zip(items, wholes, strict=True):
        yield None if whole is None else dims_from_memory(whole, layout.order)


def by_group(items: Iterable[OfUnit]) -> Iterator[tuple[dist.ProcessGroup, list[OfUnit]]]:
    """Yield (group, items) of units with the same shard group and device, in the same order on every rank."""
    members: dict[tuple[dist.ProcessGroup, torch.device], list[OfUnit]] = defaultdict(list)
    for module, of_unit in itertools.groupby(items, lambda item: item[0]):
        members[module.process_group, module.compute_device] += of_unit
    for (group, _), same_group in members.items():
        yield group, same_group


def _rows(items: Sequence[Part], group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Yield this rank's rows of each tensor, from its 1-D part of each shard. Collective."""
    if not items:
        return
    device, layouts = items[0][0].compute_device, [layout for _, layout, _ in items]
    rows = redistribute(
        (piece for *_, piece in items),
        [layout.shard for layout in layouts],
        [layout.rows for layout in layouts if layout.rows is not None],
        group,
        device=device,
        shapes=[layout.own_rows for layout in layouts],
        # independent of offloading, which may differ between ranks
        batch_nbytes=None if device.type == "cpu" else DEVICE_BATCH_NBYTES,
    )
    for layout, own in zip(layouts, rows, strict=True):
        yield dims_from_memory(own, layout.order)


def own_rows(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a view of this rank's rows of a full tensor; all of a 0-d tensor."""
    if not whole.dim():
        return whole
    start, end = chunk_partition(whole.shape, world_size).bounds(rank)
    shape = rows_shape(whole.shape, end - start)
    return whole.contiguous().view(-1)[start:end].view(shape)


def _keeps_rows_of_shards(module: ShardedModule) -> bool:
    """Return True if sharded values are divided over the ranks of the unit.

    Not under tensor parallelism, and not with a mesh of several dimensions without a hybrid strategy: as in
    torch, the unit is sharded over the first dimension then, and values are divided over the last.
    """
    mesh = module._device_mesh
    is_divided_alike = mesh is None or mesh.ndim == 1 or module._replicate_group is not None
    return is_divided_alike and module._fsdp_extension is None


def saved_rows(whole: Tensor, module: ShardedModule) -> Tensor:
    """Return a view of this rank's rows, in sharded values of the unit, of a full tensor."""
    mesh = module._device_mesh
    if mesh is None:
        return own_rows(whole, module.rank, module.world_size)
    return own_rows(whole, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))


def shards_of_rows(
    items: Sequence[tuple[ParamLayout, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> Iterator[Tensor]:
    """Yield this rank's 1-D part of each shard, from its rows of each tensor. Collective."""
    direct = [(layout, rows) for layout, rows in items if layout.rows is not None]
    shards = redistribute(
        (to_memory_order(rows, layout.order) for layout, rows in direct),
        [layout.rows for layout, _ in direct if layout.rows is not None],
        [layout.shard for layout, _ in direct],
        group,
        device=device,
    )
    others = [(layout, rows) for layout, rows in items if layout.rows is None]
    wholes = wholes_of_rows(others, group, device)
    # order of `items`; full tensors need no further transfer
    for layout, _ in items:
        if layout.rows is not None:
            yield next(shards)
        else:
            start, end = layout.shard.bounds(group.rank())
            yield to_memory_order(next(wholes), layout.order)[start:end].clone()  # frees the full tensor


def wholes_of_rows(
    items: Sequence[tuple[ParamLayout, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> Iterator[Tensor]:
    """Yield full, contiguous tensors from every rank's rows. Collective."""
    natural = [chunk_partition(layout.shape, group.size()) for layout, _ in items]
    numels = [partition.numel_on(group.rank()) for partition in natural]
    # every rank has a 0-d tensor; the partition selects rank 0's
    pieces = (rows.reshape(-1)[:numel] for (_, rows), numel in zip(items, numels, strict=True))
    wholes = list(redistribute(pieces, natural, None, group, device=device))
    for (layout, _), whole in zip(items, wholes, strict=True):
        yield whole.view(layout.shape)


def whole_of_value(value: object, fqn: str, module: ShardedModule, layout: ParamLayout) -> Tensor:
    """Return the full tensor of a sharded value. Collective. Raises like ``rows_of_value``."""
    items = [(layout, rows_of_value(value, fqn, module, layout))]
    (whole,) = wholes_of_rows(items, module.process_group, module.compute_device)
    return whole


# ----------------------------------------------------------------- values


def value_of_rows(module: ShardedModule, rows: Tensor, layout: ParamLayout) -> Tensor:
    """Return the sharded value for ``rows`` of this rank.

    A DTensor if the unit has a device mesh, else a ShardedTensor, contiguous for parameters of any strides; a
    plain tensor for a 0-d parameter.
    """
    if (mesh := module._device_mesh) is not None:
        meta = TensorMeta(layout.shape, strides_in(layout.shape, layout.order), rows.dtype)
        spec = DTensorSpec(mesh, _placements(mesh, bool(layout.shape)), meta)
        return DTensor(rows, spec, requires_grad=False)
    if not layout.shape:
        return rows
    return _Places.of(module, rows.device.type).sharded_tensor(rows.contiguous(), layout.shape)


@custom_sharded_op_impl(torch.Tensor.data_ptr)  # type: ignore[untyped-decorator]  # torch declares no types
def _refuse_address(types: object, args: object, kwargs: object, process_group: object) -> None:
    """Raise with a remedy: torch's ``async_save`` calls data_ptr() first, and torch's own error has none."""
    raise RuntimeError(
        "a ShardedTensor has no data_ptr(), so that torch.distributed.checkpoint.async_save cannot "
        "copy it: wrap the model with device_mesh=..., whose state dicts it supports, or pass "
        "fsdp_c.checkpoint.model_state(model) and optim_state(model, optimizer), or call "
        "fsdp_c.checkpoint.save(..., background=True)"
    )


def flat_value(module: ShardedModule, local: Tensor) -> ShardedTensor:
    """Return the flat parameter, with this rank's elements ``local``."""
    shape = torch.Size([handle_of(module).layout.numel])
    return _Places.of(module, local.device.type).sharded_tensor(local, shape)


class _Places:
    """Placements of a unit's rows over its ranks. Cached per unit: many values share few placements."""

    def __init__(self, module: ShardedModule, device_type: str) -> None:
        self.group = module.process_group
        self.rank = module.rank
        self.device_type = device_type
        ranks = dist.get_process_group_ranks(self.group)
        if device_type == "cpu":
            self.devices = [_remote_device(f"rank:{rank}/cpu") for rank in ranks]
        else:
            per_node = torch.get_device_module(device_type).device_count()
            self.devices = [_remote_device(f"rank:{rank}/{device_type}:{rank % per_node}") for rank in ranks]
        self.specs: dict[int, ShardingSpec] = {}
        # metadata by shape; shared by many tensors, never modified
        self.rows: dict[torch.Size, list[ShardMetadata]] = {}

    @classmethod
    def of(cls, module: ShardedModule, device_type: str) -> _Places:
        known: _Places | None = module.__dict__.get("_state_dict_places")
        if known is None or known.device_type != device_type:
            known = module.__dict__["_state_dict_places"] = cls(module, device_type)
        return known

    def rows_metadata(self, shape: torch.Size) -> list[ShardMetadata]:
        """Return offsets, sizes and device of each rank's rows of a tensor of ``shape``."""
        if shape not in self.rows:
            # an empty tensor is one shard
            step = -(-shape[0] // len(self.devices)) if shape.numel() else max(shape[0], 1)
            starts = range(0, max(shape[0], 1), step)
            self.rows[shape] = [
                ShardMetadata(
                    [start, *[0] * (len(shape) - 1)], [min(step, shape[0] - start), *shape[1:]], device
                )
                for start, device in zip(starts, self.devices, strict=False)
            ]
        return self.rows[shape].copy()

    def sharded_tensor(self, local: Tensor, shape: torch.Size) -> ShardedTensor:
        """Return a ShardedTensor like its own constructors, without their validation of values computed here."""
        shards = self.rows_metadata(shape)
        pinned = torch.cuda.is_initialized() and local.is_pinned()
        properties = TensorProperties(local.dtype, pin_memory=pinned)
        spec: ShardingSpec | None = (
            EnumerableShardingSpec(shards) if len(shards) == 1 else self.specs.get(len(shards))
        )
        if spec is None:
            spec = ChunkShardingSpec(dim=0, placements=[*self.devices[: len(shards)]])
            self.specs[len(shards)] = spec
        own = []
        if self.rank < len(shards):
            own.append(Shard.__new__(Shard))
            own[0].tensor, own[0].metadata = local, shards[self.rank]
        tensor: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            ShardedTensor, shape, dtype=local.dtype, layout=torch.strided, pin_memory=pinned
        )
        tensor.__dict__.update(
            _sharding_spec=spec,
            _metadata=ShardedTensorMetadata(shards, shape, properties),
            _local_shards=own,
            _process_group=self.group,
            _init_rrefs=False,
            _sharded_tensor_id=None,
            _remote_shards={},
        )
        return tensor


def strides_in(shape: Sequence[int], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the strides of a dense tensor with its dimensions in this order in memory."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _placements(mesh: DeviceMesh, has_rows: bool) -> tuple[Placement, ...]:
    """Return placements of rows over the last mesh dimension, and of replicas over the others."""
    last: Placement = ShardPlacement(0) if has_rows else Replicate()
    return (*[Replicate()] * (mesh.ndim - 1), last)


def shape_of(value: Any) -> torch.Size:
    """Return the shape of a tensor or placeholder. ShardedTensor's own attribute would use its dispatcher."""
    return value.metadata().size if isinstance(value, ShardedTensor) else value.shape


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a tensor or placeholder, without ShardedTensor's dispatcher."""
    return value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype


def rows_of_value(value: object, fqn: str, module: ShardedModule, layout: ParamLayout) -> Tensor:
    """Return this rank's rows of a loaded value. Collective only for a value of other ranks or placements.

    Raises AssertionError for a value of neither sharded type, and for a ShardedTensor that is not divided
    into rows over the ranks of its group.
    """
    if isinstance(value, DTensor):
        mesh, group = value.device_mesh, module.process_group
        rows_group = mesh.get_group(mesh.ndim - 1)
        is_of_unit = rows_group is group or ranks_of(rows_group) == ranks_of(group)
        if is_of_unit and value.placements == _placements(mesh, value.dim() > 0):
            return value.to_local()
        moved: Any = value.to(module.compute_device)  # the mesh may have no group for CPU tensors
        whole = moved.full_tensor()
        return own_rows(whole, module.rank, module.world_size).clone()  # frees the full tensor
    if not isinstance(value, ShardedTensor):
        if isinstance(value, Tensor) and not layout.shape:
            return value
        raise AssertionError(
            f"Expected ShardedTensor, got {type(value)} for {fqn} in a sharded state dict; load full "
            "tensors with StateDictType.FULL_STATE_DICT"
        )
    shards = value.local_shards()
    if len(shards) >= 2:
        raise AssertionError(
            f"Expects 0 or 1 shard per rank but got {len(shards)} shards on rank {module.rank} of {fqn}: "
            "load through torch.distributed.checkpoint, which divides it anew"
        )
    group = value._process_group
    same = group.size() == module.world_size
    partition = layout.rows if same and layout.rows else chunk_partition(layout.shape, group.size())
    numel = partition.numel_on(group.rank())
    rows = (
        shards[0].tensor
        if shards
        else torch.empty(rows_shape(layout.shape, 0), dtype=value.dtype, device="cpu")
    )
    if rows.numel() != numel:
        raise AssertionError(
            f"{fqn}: rank {group.rank()} of {group.size()} expects rows of {numel} elements but the value "
            f"has {rows.numel()}: it was saved by another number of ranks; load through "
            "torch.distributed.checkpoint, which divides it anew"
        )
    if same:
        return rows
    # torch's load_sharded_optimizer_state_dict divides over all ranks, regardless of the unit's shard group
    (whole,) = wholes_of_rows([(layout, rows)], group, module.compute_device)
    return own_rows(whole, module.rank, module.world_size)
