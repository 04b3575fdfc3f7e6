"""Moving tensors between ways to divide them over ranks: flat parameters' shards, chunks of rows, one rank.

[Note: Few large transfers]
A state dict has thousands of small tensors. Each is divided by a ``Partition``, and all ranks know all
partitions: so every rank computes alone what it sends to whom, packs the pieces of many tensors into one
buffer per batch, and one all-to-all moves them. What stays on a rank is never sent. A batch ends where its
tensors reach ``BATCH_NBYTES``, the same on every rank; no more than a batch is in flight. Rows that are saved
from a GPU go by ``DEVICE_BATCH_NBYTES``, and on to CPU memory, where they are offloaded, before the next
batch.

[Note: Large tensors]
What gloo gathers or exchanges goes through memory of its own, and once more through a batch's. Where the
tensors of a batch are large, every part goes instead from where it lies to its place in the result, by
broadcasts or from rank to rank: a third of the work, and no memory besides. Small flat parameters that are
gathered together go by ``_COPIED_NBYTES``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from fsdp_c import _C

BATCH_NBYTES = 64 * 2**20
DEVICE_BATCH_NBYTES = 8 * 2**20  # for what is saved from a device, where a model may have left little memory
_COPIED_NBYTES = 8 * 2**20  # in gloo's memory, of two gathers at a time
LARGE_NBYTES = 2**20  # of the tensors of a batch on average; see [Note: Large tensors]

# torch 2.13 names the collective as the others; the older name stays until torch drops it
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Partition(NamedTuple):
    """How the elements of one tensor, in memory order, are divided over the ranks of a group.

    Rank r holds [r * step - offset, (r + 1) * step - offset), cut to [0, numel).
    """

    numel: int
    step: int
    offset: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """The (start, end) that ``rank`` holds; (0, 0) for nothing."""
        return _C.partition_bounds(self, rank)


def shard_partition(layout: _C.FlatLayout, index: int) -> Partition:
    """Parameter ``index`` of a flat parameter, divided by its shards."""
    return Partition(layout.param_numels[index], max(layout.shard_numel, 1), layout.param_offsets[index])


def chunk_partition(shape: Sequence[int], world_size: int) -> Partition:
    """``torch.chunk(world_size)`` of a contiguous tensor's first dimension; rank 0 holds a 0-d one."""
    numel = math.prod(shape)
    if numel == 0 or not shape:
        return rank0_partition(numel)
    return Partition(numel, -(-shape[0] // world_size) * (numel // shape[0]), 0)


def rank0_partition(numel: int) -> Partition:
    """Everything on rank 0."""
    return rank_partition(numel, 0)


def rank_partition(numel: int, rank: int) -> Partition:
    """Everything on one rank."""
    step = max(numel, 1)
    return Partition(numel, step, rank * step)


class Space:
    """Memory for what is received, of use to all batches: fresh pages cost as much as the transfer."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def take(self, like: Tensor, numel: int) -> Tensor:
        """A 1-D tensor as ``like``, valid until the next one is taken."""
        last = self._last
        if last is None or last.dtype != like.dtype or last.device != like.device or len(last) < numel:
            self._last = last = None  # the old memory goes before the new comes
            self._last = last = like.new_empty(numel)
        return last[:numel]


def redistribute(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    targets: Sequence[Partition],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    batch_nbytes: int | None = None,
) -> Iterator[Tensor]:
    """Yield this rank's part of each tensor under ``targets``, new, from its part under ``sources``.

    ``pieces`` are 1-D, numel 0 where this rank holds nothing, and are taken batch by batch: a generator need
    not hold them all. Ranks pass the same dtypes and partitions in the same order. Collective: every rank
    consumes it to its end. ``device``: where the transfer takes place and the results stay; by default where
    the pieces are. ``shapes``: of the results, this rank's own; 1-D by default. ``batch_nbytes``: how much is
    moved at once, over all ranks, BATCH_NBYTES by default. See [Note: Few large transfers]. Raises ValueError
    for a piece that is not what the source partition says.
    """
    first, space = 0, Space()
    for batch in _batches(pieces, sources, device, batch_nbytes or BATCH_NBYTES, lambda *_: True):
        end = first + len(batch)
        if _are_large(batch, sources[first:end], group):
            made = _exchange_large(batch, sources[first:end], targets[first:end], group)
            yield from _shaped(made, shapes and shapes[first:end])
        else:
            given = sources[first:end], targets[first:end]
            yield from _exchange(batch, *given, group, shapes and shapes[first:end], space)
        first = end


def gather(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    rank0_only: bool = False,
    batch_nbytes: int | None = None,
) -> Iterator[Tensor | None]:
    """Yield the whole of each tensor, freshly allocated; with ``rank0_only`` None on the other ranks.

    Memory beyond the results: one batch, or what lies between two beginnings of a flat parameter in
    ``sources`` if that is more. Arguments, collective behaviour and errors as for ``redistribute``.
    """
    if rank0_only:
        targets = [rank0_partition(source.numel) for source in sources]
        held = group.rank() == 0
        shapes = shapes if held else None
        moved = redistribute(
            pieces, sources, targets, group, device=device, shapes=shapes, batch_nbytes=batch_nbytes
        )
        for whole in moved:
            yield whole if held else None
        return
    first, space = 0, Space()
    for batch in _batches(pieces, sources, device, batch_nbytes or BATCH_NBYTES, _begins):
        end = first + len(batch)
        if _are_large(batch, sources[first:end], group):
            yield from _shaped(_gather_large(batch, sources[first:end], group), shapes and shapes[first:end])
        else:
            yield from _gather_batch(batch, sources[first:end], group, shapes and shapes[first:end], space)
        first = end


def gather_flat(
    shards: Sequence[Tensor],
    places: Sequence[Sequence[tuple[int, int]]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: dist.ProcessGroup,
    space: Space,
) -> Iterator[Tensor]:
    """Of each flat parameter the tensors at its ``places``, (first element, numel), whole and new.

    ``shards``: this rank's, padded, of equal size on every rank; all go in one all-gather. Collective.
    """
    wire = _wire_dtype(list(shards))
    sent = _as(shards[0], wire) if len(shards) == 1 else torch.cat([_as(shard, wire) for shard in shards])
    received = space.take(sent, len(sent) * group.size())
    _all_gather_single(received, sent, group=group)
    ranges: list[int] = []
    counts, base = [], 0
    for shard, parts in zip(shards, places, strict=True):
        size, step = shard.itemsize, shard.nbytes
        for first, numel in parts:
            at, end, count = first * size, (first + numel) * size, 0
            while at < end:
                rank, offset = divmod(at, step)
                nbytes = min(end - at, step - offset)
                ranges += [0, rank * sent.nbytes + base + offset, nbytes]
                at += nbytes
                count += 1
            counts.append(count)
        base += step
    likes = [shard for shard, parts in zip(shards, places, strict=True) for _ in parts]
    yield from join_ranges([received], ranges, counts, likes, list(itertools.chain.from_iterable(shapes)))


def start_gather(
    shards: Sequence[Tensor],
    ranges: Sequence[tuple[int, int]],
    wholes: Sequence[Tensor],
    group: dist.ProcessGroup,
    receivers: Sequence[int],
) -> list[dist.Work]:
    """Of each flat parameter the elements [first, end) of ``ranges``, in ``wholes`` once the works are waited
    for, on the ranks ``receivers`` of the group; the others pass no ``wholes``.

    ``shards``: this rank's, of one dtype, those of a flat parameter equal in size on every rank. Where all
    ranks get flat parameters from end to end, one collective brings all, but with gloo: see [Note: Large
    tensors]. Collective.
    """
    wire, rank = _wire_dtype(list(shards)), group.rank()
    sent, received = [_as(shard, wire) for shard in shards], [_as(whole, wire) for whole in wholes]
    for_all = len(receivers) == group.size()
    if for_all and all(
        len(whole) == len(shard) * group.size() for whole, shard in zip(wholes, shards, strict=True)
    ):
        nbytes = sum(whole.nbytes for whole in wholes)
        if not are_large(nbytes, len(wholes), wholes[0].device, group):
            return [_start_whole(received[run], sent[run], group) for run in _runs(received)]
    works, transfers = [], []
    for index, (shard, (first, end)) in enumerate(zip(shards, ranges, strict=True)):
        for owner in range(group.size()):
            offset, size = owner * len(shard), shard.itemsize // wire.itemsize
            start, stop = max(first, offset), min(end, offset + len(shard))
            if start >= stop:
                continue
            part = sent[index][(start - offset) * size : (stop - offset) * size]
            place = received[index][(start - first) * size : (stop - first) * size] if received else part
            if owner == rank and received:
                place.copy_(part)
            if for_all:
                works.append(dist.broadcast(place, group=group, group_src=owner, async_op=True))
            elif owner == rank:
                others = [to for to in receivers if to != rank]
                transfers += [dist.P2POp(dist.isend, part, group=group, group_peer=to) for to in others]
            elif received:
                transfers.append(dist.P2POp(dist.irecv, place, group=group, group_peer=owner))
    return works + (dist.batch_isend_irecv(transfers) if transfers else [])


def _start_whole(wholes: list[Tensor], shards: list[Tensor], group: dist.ProcessGroup) -> dist.Work:
    options = AllgatherOptions()
    options.asyncOp = True
    work: dist.Work = (
        group.allgather_into_tensor_coalesced(wholes, shards, options)
        if len(shards) > 1
        else _all_gather_single(wholes[0], shards[0], group=group, async_op=True)
    )
    return work


def _runs(wholes: Sequence[Tensor]) -> Iterator[slice]:
    """Of those to gather together: on the CPU of as many as gloo may copy at once."""
    first, nbytes = 0, 0
    for index, whole in enumerate(wholes):
        if whole.is_cpu and index > first and nbytes + whole.nbytes > _COPIED_NBYTES:
            yield slice(first, index)
            first, nbytes = index, 0
        nbytes += whole.nbytes
    yield slice(first, len(wholes))


# ----------------------------------------------------------------- batches


def _begins(last: Partition, following: Partition) -> bool:
    """Shards of a whole flat parameter are even, parts are not: an all-gather would be mostly padding."""
    return following.step != last.step or following.offset <= last.offset


def _batches(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    device: torch.device | None,
    limit_nbytes: int,
    may_end: Callable[[Partition, Partition], bool],
) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    nbytes = 0
    for index, piece in enumerate(pieces):
        source = sources[index]
        if nbytes >= limit_nbytes and may_end(sources[index - 1], source):
            yield batch
            batch, nbytes = [], 0
        batch.append((piece if device is None or piece.device == device else piece.to(device)).contiguous())
        nbytes += source.numel * piece.element_size()
    if batch:
        yield batch


# ----------------------------------------------------------------- one batch


class _Plan(NamedTuple):
    """See ``_C.exchange_plan``; all in bytes."""

    held: list[int]
    made: list[int]
    sent: list[int]
    sent_nbytes: list[int]
    received_nbytes: list[int]
    parts: list[int]
    part_counts: list[int]

    @classmethod
    def of(
        cls,
        pieces: list[Tensor],
        sources: Sequence[Partition],
        targets: Sequence[Partition],
        rank: int,
        world: int,
        gathers: bool = False,
    ) -> _Plan:
        sizes = [piece.element_size() for piece in pieces]
        return cls(*_C.exchange_plan(zip(sources, targets, sizes, strict=True), rank, world, gathers))

    def assemble(
        self, received: Tensor, pieces: list[Tensor], shapes: Sequence[Sequence[int]] | None
    ) -> list[Tensor]:
        """The tensors, in the dtypes of ``pieces``."""
        if shapes is None:
            shapes = [
                (nbytes // piece.element_size(),) for nbytes, piece in zip(self.made, pieces, strict=True)
            ]
        return join_ranges([received, *pieces], self.parts, self.part_counts, pieces, shapes)


def join_ranges(
    sources: list[Tensor],
    ranges: list[int],
    counts: list[int],
    likes: list[Tensor],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """New tensors of ``shapes`` and ``likes``' dtypes, each joined of ``counts`` byte ranges of sources.

    ``ranges``: (source, start, nbytes) of each, one behind the other in one list. Sources are contiguous.
    """
    if sources[0].device.type != "cpu":
        return _join_elsewhere(sources, ranges, counts, likes, shapes)
    ndims, sizes = list(map(len, shapes)), list(itertools.chain.from_iterable(shapes))
    joined: list[Tensor] = torch.ops.fsdp_c.join_ranges(sources, ranges, counts, likes, ndims, sizes)
    return joined


def _join_elsewhere(
    sources: list[Tensor],
    ranges: list[int],
    counts: list[int],
    likes: list[Tensor],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """The same on devices whose memory the op cannot reach."""
    data = [source.view(-1).view(torch.uint8) for source in sources]
    triples = iter(zip(*[iter(ranges)] * 3, strict=True))
    joined = []
    for count, like, shape in zip(counts, likes, shapes, strict=True):
        parts = [
            data[source][start : start + nbytes] for source, start, nbytes in itertools.islice(triples, count)
        ]
        # nothing is launched for what is not this rank's, as most is that goes to one of many ranks
        whole = torch.cat(parts).view(like.dtype) if parts else like.new_empty(0)
        joined.append(whole.view(shape))
    return joined


def _wire_dtype(pieces: list[Tensor]) -> torch.dtype:
    """The dtype of a batch, or bytes when it is mixed or one that backends may not know."""
    dtype = pieces[0].dtype
    common = dtype.is_floating_point and dtype.itemsize > 1 and all(piece.dtype == dtype for piece in pieces)
    return dtype if common else torch.uint8


def _check(pieces: list[Tensor], sources: Sequence[Partition], rank: int) -> None:
    """Raise ValueError, before anything is sent, for a piece that is not what its partition says."""
    for piece, source in zip(pieces, sources, strict=True):
        start, end = _C.partition_bounds(source, rank)
        if piece.dim() != 1 or piece.numel() != end - start:
            raise ValueError(
                f"rank {rank} passes a piece of shape {tuple(piece.shape)} where its part has {end - start} "
                f"elements ({source})"
            )


def _exchange(
    pieces: list[Tensor],
    sources: Sequence[Partition],
    targets: Sequence[Partition],
    group: dist.ProcessGroup,
    shapes: Sequence[Sequence[int]] | None,
    space: Space,
) -> list[Tensor]:
    """The parts under ``targets``: one all-to-all of what changes ranks."""
    rank = group.rank()
    plan = _Plan.of(pieces, sources, targets, rank, group.size())
    if [piece.nbytes for piece in pieces] != plan.held or any(piece.dim() != 1 for piece in pieces):
        _check(pieces, sources, rank)
    like = pieces[0].new_empty(0, dtype=_wire_dtype(pieces))
    numels = [nbytes // like.itemsize for nbytes in plan.sent_nbytes]
    (sent,) = join_ranges(pieces, plan.sent, [len(plan.sent) // 3], [like], [(sum(numels),)])
    splits = [nbytes // like.itemsize for nbytes in plan.received_nbytes]
    received = space.take(like, sum(splits))
    dist.all_to_all_single(received, sent, splits, numels, group=group)
    del sent  # before as much is made anew
    return plan.assemble(received, pieces, shapes)


def _gather_batch(
    pieces: list[Tensor],
    sources: Sequence[Partition],
    group: dist.ProcessGroup,
    shapes: Sequence[Sequence[int]] | None,
    space: Space,
) -> list[Tensor]:
    """The whole tensors: one all-gather of what each rank holds, padded to the longest."""
    _check(pieces, sources, group.rank())
    targets = [rank0_partition(source.numel) for source in sources]  # every rank does as rank 0 does
    plan = _Plan.of(pieces, sources, targets, 0, group.size(), gathers=True)
    row_nbytes = max(plan.received_nbytes)
    sent = _adjacent(pieces, row_nbytes)
    sent = _packed(pieces, row_nbytes) if sent is None else sent
    if len(pieces) == 1 and sources[0].offset == 0 and row_nbytes * group.size() - plan.made[0] < row_nbytes:
        received = sent.new_empty(len(sent) * group.size())  # the result itself, with the padding behind it
        _all_gather_single(received, sent, group=group)
        whole = _as(received[: plan.made[0] // received.itemsize], pieces[0].dtype)
        return [whole.view(shapes[0]) if shapes else whole]
    received = space.take(sent, len(sent) * group.size())
    _all_gather_single(received, sent, group=group)
    del sent  # before as much is made anew
    return plan.assemble(received, pieces, shapes)


def _are_large(pieces: list[Tensor], sources: Sequence[Partition], group: dist.ProcessGroup) -> bool:
    """The same on every rank."""
    nbytes = sum(source.numel * piece.element_size() for piece, source in zip(pieces, sources, strict=True))
    return are_large(nbytes, len(pieces), pieces[0].device, group)


def are_large(nbytes: int, count: int, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether ``count`` tensors of ``nbytes`` together go from where they lie: see [Note: Large tensors]."""
    return (
        nbytes >= LARGE_NBYTES * count
        and device.type == "cpu"
        and "cpu:gloo" in dist.get_backend_config(group)
    )


def _gather_large(
    pieces: list[Tensor], sources: Sequence[Partition], group: dist.ProcessGroup
) -> list[Tensor]:
    _check(pieces, sources, group.rank())
    wholes = [_new(piece, source.numel) for piece, source in zip(pieces, sources, strict=True)]
    works = []
    for whole, piece, source in zip(wholes, pieces, sources, strict=True):
        for rank in range(group.size()):
            start, end = source.bounds(rank)
            if rank == group.rank():
                whole[start:end] = piece
            if start < end:
                data = whole[start:end].view(torch.uint8)
                works.append(dist.broadcast(data, group=group, group_src=rank, async_op=True))
    _wait(works)
    return wholes


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _exchange_large(
    pieces: list[Tensor], sources: Sequence[Partition], targets: Sequence[Partition], group: dist.ProcessGroup
) -> list[Tensor]:
    rank = group.rank()
    _check(pieces, sources, rank)
    made: list[Tensor] = []
    works: list[dist.Work | None] = []
    for tag, (piece, source, target) in enumerate(zip(pieces, sources, targets, strict=True)):
        start, end = target.bounds(rank)
        own = _new(piece, end - start)
        for peer, offset, numel in _C.partition_overlaps(source, target, rank):
            if peer != rank:
                data = piece[offset : offset + numel].view(torch.uint8)
                works.append(dist.isend(data, group=group, group_dst=peer, tag=tag))
        for peer, offset, numel in _C.partition_overlaps(target, source, rank):
            place = own[offset : offset + numel]
            if peer != rank:
                works.append(dist.irecv(place.view(torch.uint8), group=group, group_src=peer, tag=tag))
            else:
                first = start + offset - source.bounds(rank)[0]
                place.copy_(piece[first : first + numel])
        made.append(own)
    _wait(works)
    return made


def _new(like: Tensor, numel: int) -> Tensor:
    made = like.new_empty(numel)
    _C.prefer_large_pages(made)
    return made


def _shaped(tensors: list[Tensor], shapes: Sequence[Sequence[int]] | None) -> list[Tensor]:
    return [one.view(shape) for one, shape in zip(tensors, shapes, strict=True)] if shapes else tensors


def _packed(pieces: list[Tensor], nbytes: int) -> Tensor:
    """A copy of all, one behind the other, then padding up to ``nbytes``."""
    wire = _wire_dtype(pieces)
    sent = pieces[0].new_empty(nbytes // wire.itemsize, dtype=wire)
    torch.cat(
        [_as(piece, wire) for piece in pieces],
        out=sent[: sum(piece.nbytes for piece in pieces) // wire.itemsize],
    )
    return sent


def _adjacent(pieces: list[Tensor], nbytes: int) -> Tensor | None:
    """A view of ``nbytes`` that begins with all pieces, where they lie one behind the other as in a shard."""
    held = [piece for piece in pieces if piece.numel()]
    if not held or _wire_dtype(pieces) != held[0].dtype:
        return None
    first, at = held[0], held[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in held:
        if piece.data_ptr() != at or piece.untyped_storage().data_ptr() != storage:
            return None
        at += piece.nbytes
    start = first.storage_offset()
    if start * first.itemsize + nbytes > first.untyped_storage().nbytes():
        return None
    return first.as_strided((nbytes // first.itemsize,), (1,), start)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
