"""Redistribution of tensors between shards of flat parameters, chunks of rows and single ranks.

[Note: Few large transfers]
A state dict has thousands of small tensors. Each is divided by a ``Partition``, and all ranks know all
partitions, so every rank computes locally its transfers with each peer, packs ranges of many tensors into one
buffer per batch, and exchanges batches by one all-to-all. Data that stays on a rank is never sent. A batch
ends when its tensors reach ``BATCH_NBYTES``, the same on every rank; at most one batch is in flight. Rows
saved from a GPU are exchanged by ``DEVICE_BATCH_NBYTES`` and, if offloaded, copied to CPU memory before the
next batch.

[Note: Large tensors]
gloo gathers and exchanges through a buffer of its own, and the result is copied once more from the batch's
buffer. If the tensors of a batch are large, each part is instead transferred directly from its source to its
place in the result, by broadcasts or point-to-point: a third of the work, and no additional memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c import _C

BATCH_NBYTES = 64 * 2**20
# limit for tensors saved from a device, where a model may have left little memory
DEVICE_BATCH_NBYTES = 8 * 2**20
LARGE_NBYTES = 2**20  # average size of a batch's tensors; see [Note: Large tensors]

# torch 2.13 named the collective like the others; the older name remains until torch removes it
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Partition(NamedTuple):
    """Division of the elements of one tensor, in memory order, over the ranks of a group.

    Rank r holds [r * step - offset, (r + 1) * step - offset), clipped to [0, numel).
    """

    numel: int
    step: int
    offset: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the range (start, end) of ``rank``; (0, 0) if empty."""
        return _C.partition_bounds(self, rank)

    def numel_on(self, rank: int) -> int:
        start, end = self.bounds(rank)
        return end - start


def shard_partition(layout: _C.FlatLayout, index: int) -> Partition:
    """Return the division of parameter ``index`` of a flat parameter by its shards."""
    return Partition(layout.param_numels[index], max(layout.shard_numel, 1), layout.param_offsets[index])


def chunk_partition(shape: Sequence[int], world_size: int) -> Partition:
    """Return the chunks of ``torch.chunk(world_size)`` of a contiguous tensor; rank 0 holds 0-d tensors."""
    numel = math.prod(shape)
    if numel == 0 or not shape:
        return rank_partition(numel, 0)
    return Partition(numel, -(-shape[0] // world_size) * (numel // shape[0]), 0)


def rank_partition(numel: int, rank: int) -> Partition:
    """Return the partition with all elements on one rank."""
    step = max(numel, 1)
    return Partition(numel, step, rank * step)


class ReceiveBuffer:
    """Receive buffer, reused by all batches: page faults of fresh memory cost as much as the transfer."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def take(self, like: Tensor, numel: int) -> Tensor:
        """Return a 1-D tensor with the dtype and device of ``like``, valid until the next call."""
        last = self._last
        if last is None or last.dtype != like.dtype or last.device != like.device or len(last) < numel:
            self._last = last = None  # freed before the larger one is allocated
            self._last = last = like.new_empty(numel)
        return last[:numel]


def redistribute(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    targets: Sequence[Partition] | None,
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    batch_nbytes: int | None = None,
) -> Iterator[Tensor]:
    """Yield this rank's part of each tensor under ``targets``, as a new tensor, from its part under ``sources``.

    ``pieces`` are 1-D, with numel 0 where this rank holds nothing, and are consumed batch by batch: a
    generator need not hold them all. ``targets``: None for full tensors on every rank. Ranks pass the same
    dtypes and partitions in the same order. Collective: every rank exhausts the iterator. ``device``: device
    of the transfers and results, by default that of the pieces. ``shapes``: of this rank's results; 1-D by
    default. ``batch_nbytes``: bytes per transfer over all ranks, BATCH_NBYTES by default; batches of full
    tensors end with a flat parameter. See [Note: Few large transfers]. Raises ValueError for a piece whose
    size differs from its source partition's.
    """
    first, buffer = 0, ReceiveBuffer()
    limit = batch_nbytes or BATCH_NBYTES
    for batch, nbytes in _batches(pieces, sources, device, limit, gathers=targets is None):
        own = slice(first, first + len(batch))
        given = (batch, sources[own], targets and targets[own], group)
        own_shapes = shapes and shapes[own]
        if are_large(nbytes, len(batch), batch[0].device, group):
            made = start_exchange(*given)()
            yield from map(Tensor.view, made, own_shapes) if own_shapes else made
        else:
            yield from _exchange(*given, own_shapes, buffer)
        first = own.stop


def gather(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    group: dist.ProcessGroup,
    *,
    rank0_only: bool,
    shapes: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Iterator[Tensor | None]:
    """Yield the full tensors on every rank, with ``rank0_only`` None on other ranks than 0. See ``redistribute``."""
    held = not rank0_only or group.rank() == 0
    targets = [rank_partition(source.numel, 0) for source in sources] if rank0_only else None
    for whole in redistribute(pieces, sources, targets, group, shapes=shapes if held else None, **options):
        yield whole if held else None


def gather_flat(
    shards: Sequence[Tensor],
    sources: Sequence[Sequence[Partition]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: dist.ProcessGroup,
    buffer: ReceiveBuffer,
) -> Iterator[Tensor]:
    """Yield the full parameters of flat parameters, as new tensors: those of ``sources`` per shard, in ``shapes``.

    ``shards``: this rank's, padded, of equal size on every rank. All shards are sent in one all-gather, with
    less work per parameter than in ``redistribute``. Collective.
    """
    wire = _wire_dtype(list(shards))
    sent = _as(shards[0], wire) if len(shards) == 1 else torch.cat([_as(shard, wire) for shard in shards])
    is_one = len(shards) == len(sources[0]) == 1 and not sources[0][0].offset
    numel = len(sent) * group.size()
    received = sent.new_empty(numel) if is_one else buffer.take(sent, numel)
    _all_gather_single(received, sent, group=group)
    if is_one:  # the received buffer is the result, with padding at its end
        yield _as(received, shards[0].dtype)[: sources[0][0].numel].view(*shapes[0])
        return
    ranges: list[int] = []
    counts, base = [], 0
    for shard, parts in zip(shards, sources, strict=True):
        size, step = shard.itemsize, shard.nbytes
        for numel, _, first in parts:
            at, end, count = first * size, (first + numel) * size, 0
            while at < end:
                rank, offset = divmod(at, step)
                nbytes = min(end - at, step - offset)
                ranges += [0, rank * sent.nbytes + base + offset, nbytes]
                at += nbytes
                count += 1
            counts.append(count)
        base += step
    likes = [shard for shard, parts in zip(shards, sources, strict=True) for _ in parts]
    yield from join_ranges([received], ranges, counts, likes, list(itertools.chain.from_iterable(shapes)))


# ----------------------------------------------------------------- batches


def _batches(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    device: torch.device | None,
    limit_nbytes: int,
    gathers: bool,
) -> Iterator[tuple[list[Tensor], int]]:
    """Yield (pieces of a batch, their full tensors' total bytes over all ranks)."""
    batch: list[Tensor] = []
    nbytes, last = 0, Partition(0, 1, 0)
    for piece, source in zip(pieces, sources, strict=True):
        # only shards of a full flat parameter are even: an all-gather of others would be mostly padding
        if nbytes >= limit_nbytes and (
            not gathers or source.step != last.step or source.offset <= last.offset
        ):
            yield batch, nbytes
            batch, nbytes = [], 0
        batch.append((piece if device is None or piece.device == device else piece.to(device)).contiguous())
        nbytes += source.numel * piece.itemsize
        last = source
    if batch:
        yield batch, nbytes


# ----------------------------------------------------------------- one batch


def join_ranges(
    sources: list[Tensor],
    ranges: list[int],
    counts: list[int],
    likes: list[Tensor],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Return new tensors of ``shapes``, with the dtypes of ``likes``, each joined from ``counts`` byte ranges.

    ``ranges``: flat list of (source, start, nbytes). Sources are contiguous.
    """
    if sources[0].device.type != "cpu":
        return _join_elsewhere(sources, ranges, counts, likes, shapes)
    cpu = sources[0].device  # faster than its name
    joined = [
        torch.empty(shape, dtype=like.dtype, device=cpu) for like, shape in zip(likes, shapes, strict=True)
    ]
    torch.ops.fsdp_c.join_ranges(joined, sources, ranges, counts)
    return joined


def _join_elsewhere(
    sources: list[Tensor],
    ranges: list[int],
    counts: list[int],
    likes: list[Tensor],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Join ranges with torch operators, on devices whose memory the custom op cannot access."""
    data = [source.view(-1).view(torch.uint8) for source in sources]
    triples = iter(zip(*[iter(ranges)] * 3, strict=True))
    joined = []
    for count, like, shape in zip(counts, likes, shapes, strict=True):
        parts = [
            data[source][start : start + nbytes] for source, start, nbytes in itertools.islice(triples, count)
        ]
        # no kernel for tensors without elements here, the usual case if one of many ranks receives all
        whole = torch.cat(parts).view(like.dtype) if parts else like.new_empty(0)
        joined.append(whole.view(shape))
    return joined


def _wire_dtype(pieces: list[Tensor]) -> torch.dtype:
    """Return the common dtype of a batch, or uint8 if dtypes differ or backends may not support it."""
    dtype = pieces[0].dtype
    common = dtype.is_floating_point and dtype.itemsize > 1 and all(piece.dtype == dtype for piece in pieces)
    return dtype if common else torch.uint8


def _check(pieces: list[Tensor], sources: Sequence[Partition], rank: int) -> None:
    """Raise ValueError, before any transfer, for a piece whose size differs from its partition's."""
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
    targets: Sequence[Partition] | None,
    group: dist.ProcessGroup,
    shapes: Sequence[Sequence[int]] | None,
    buffer: ReceiveBuffer,
) -> list[Tensor]:
    """Return the parts under ``targets``. Collective: one all-to-all, or one all-gather."""
    rank, world_size, wire = group.rank(), group.size(), _wire_dtype(pieces)
    sizes = [piece.itemsize for piece in pieces]
    wanted = [rank_partition(source.numel, rank) for source in sources] if targets is None else targets
    planned = zip(sources, wanted, sizes, strict=True)
    plan = _C.exchange_plan(planned, rank, world_size, targets is None)
    held_nbytes, made_nbytes, sent_ranges, sent_nbytes, received_nbytes, parts, counts = plan
    if [piece.nbytes for piece in pieces] != held_nbytes or any(piece.dim() != 1 for piece in pieces):
        _check(pieces, sources, rank)
    if shapes is None:
        shapes = [(nbytes // size,) for nbytes, size in zip(made_nbytes, sizes, strict=True)]
    if targets is None:
        sent = pieces[0].new_empty(max(received_nbytes) // wire.itemsize, dtype=wire)
        numel = sum(held_nbytes) // wire.itemsize  # the rest is padding
        torch.cat([_as(piece, wire) for piece in pieces], out=sent[:numel])
        received = buffer.take(sent, len(sent) * world_size)
        _all_gather_single(received, sent, group=group)
    else:
        like = pieces[0].new_empty(0, dtype=wire)
        numels = [nbytes // wire.itemsize for nbytes in sent_nbytes]
        (sent,) = join_ranges(pieces, sent_ranges, [len(sent_ranges) // 3], [like], [(sum(numels),)])
        splits = [nbytes // wire.itemsize for nbytes in received_nbytes]
        received = buffer.take(like, sum(splits))
        dist.all_to_all_single(received, sent, splits, numels, group=group)
    del sent  # freed before results of the same size are allocated
    return join_ranges([received, *pieces], parts, counts, pieces, shapes)


def are_large(nbytes: int, count: int, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return True if ``count`` tensors of ``nbytes`` in total are transferred directly. See [Note: Large tensors]."""
    return (
        nbytes >= LARGE_NBYTES * count
        and device.type == "cpu"
        and "cpu:gloo" in dist.get_backend_config(group)
    )


def start_exchange(
    pieces: list[Tensor],
    sources: Sequence[Partition],
    targets: Sequence[Partition] | None,
    group: dist.ProcessGroup,
) -> Callable[[], list[Tensor]]:
    """Start direct transfers of each part from its source to its place in the result. Collective.

    Evenly divided tensors are all-gathered, except large ones on gloo; other parts are broadcast, or sent
    point-to-point. Returns a function that waits for all and returns this rank's part of each tensor under
    ``targets``, 1-D.
    """
    rank = group.rank()
    _check(pieces, sources, rank)
    made: list[Tensor] = []
    works: list[Any] = []
    transfers: list[dist.P2POp] = []
    for tag, (piece, source) in enumerate(zip(pieces, sources, strict=True)):
        start, end = (0, source.numel) if targets is None else targets[tag].bounds(rank)
        own = piece.new_empty(end - start)
        _C.prefer_large_pages(own)
        made.append(own)
        is_even = targets is None and source == Partition(len(piece) * group.size(), len(piece), 0)
        if is_even and not are_large(own.nbytes, 1, own.device, group):
            given = own.view(torch.uint8), piece.view(torch.uint8)
            works.append(_all_gather_single(*given, group=group, async_op=True))
            continue
        if targets is None:
            for peer in range(group.size()):
                first, last = source.bounds(peer)
                if peer == rank:
                    own[first:last] = piece
                if first < last:
                    data = own[first:last].view(torch.uint8)
                    works.append(dist.broadcast(data, group=group, group_src=peer, async_op=True))
            continue
        for peer, offset, numel in _C.partition_overlaps(source, targets[tag], rank):
            if peer != rank:
                data = piece[offset : offset + numel].view(torch.uint8)
                transfers.append(dist.P2POp(dist.isend, data, group=group, tag=tag, group_peer=peer))
        for peer, offset, numel in _C.partition_overlaps(targets[tag], source, rank):
            place = own[offset : offset + numel]
            if peer == rank:
                first = start + offset - source.bounds(rank)[0]
                place.copy_(piece[first : first + numel])
            else:
                data = place.view(torch.uint8)
                transfers.append(dist.P2POp(dist.irecv, data, group=group, tag=tag, group_peer=peer))
    works += dist.batch_isend_irecv(transfers) if transfers else []

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        pieces.clear()  # sends may read them until here
        return made

    return wait


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
