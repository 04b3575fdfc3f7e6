"""Moving tensors between the ways they are divided over ranks: shards of flat parameters, chunks of rows, one rank.

[Note: Few large transfers]
A state dict has thousands of small tensors. Each is divided by a ``Partition``, and all ranks know all partitions: so
every rank computes alone what it sends to whom, packs the pieces of many tensors into one buffer per batch, and one
all-to-all moves them. What stays on a rank is never sent. A batch ends where its tensors reach ``BATCH_NBYTES``, the
same on every rank; no more than a batch is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c import _C

BATCH_NBYTES = 64 * 2**20

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
    """``torch.chunk(world_size)`` of a contiguous tensor along its first dimension; rank 0 holds a 0-d one."""
    numel = math.prod(shape)
    if numel == 0 or not shape:
        return rank0_partition(numel)
    return Partition(numel, -(-shape[0] // world_size) * (numel // shape[0]), 0)


def rank0_partition(numel: int) -> Partition:
    """Everything on rank 0."""
    return Partition(numel, max(numel, 1), 0)


def redistribute(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    targets: Sequence[Partition],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    batch_nbytes: int | None = None,
) -> Iterator[Tensor]:
    """Yield this rank's part of each tensor under ``targets``, freshly allocated, from its part under ``sources``.

    ``pieces`` are 1-D, numel 0 where this rank holds nothing, and are taken batch by batch: a generator need not hold
    them all. Ranks pass the same dtypes and partitions in the same order. Collective: every rank consumes it to
    its end. ``device``: where the transfer takes place and the results stay; by default where the pieces are.
    ``batch_nbytes``: how much is moved at once, over all ranks, BATCH_NBYTES by default.
    See [Note: Few large transfers]. Raises ValueError for a piece that is not what the source partition says.
    """
    first = 0
    for batch in _batches(pieces, sources, group, device, batch_nbytes or BATCH_NBYTES, _always):
        end = first + len(batch)
        yield from _exchange(batch, sources[first:end], targets[first:end], group)
        first = end


def gather(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    rank0_only: bool = False,
    batch_nbytes: int | None = None,
) -> Iterator[Tensor | None]:
    """Yield the whole of each tensor, 1-D and freshly allocated; with ``rank0_only`` None on the other ranks.

    Memory beyond the results: one batch, or what lies between two beginnings of a flat parameter in ``sources`` if
    that is more. Arguments, collective behaviour and errors as for ``redistribute``.
    """
    if rank0_only:
        targets = [rank0_partition(source.numel) for source in sources]
        held = group.rank() == 0
        for whole in redistribute(pieces, sources, targets, group, device=device, batch_nbytes=batch_nbytes):
            yield whole if held else None
        return
    first = 0
    for batch in _batches(pieces, sources, group, device, batch_nbytes or BATCH_NBYTES, _begins):
        end = first + len(batch)
        yield from _gather_batch(batch, sources[first:end], group)
        first = end


# ----------------------------------------------------------------- batches


def _always(last: Partition, following: Partition) -> bool:
    return True


def _begins(last: Partition, following: Partition) -> bool:
    """Shards of a whole flat parameter are even, which parts of it are not: an all-gather would be mostly padding."""
    return following.step != last.step or following.offset < last.offset


def _batches(
    pieces: Iterable[Tensor],
    sources: Sequence[Partition],
    group: dist.ProcessGroup,
    device: torch.device | None,
    limit_nbytes: int,
    may_end: Callable[[Partition, Partition], bool],
) -> Iterator[list[Tensor]]:
    rank = group.rank()
    batch: list[Tensor] = []
    nbytes = 0
    for index, piece in enumerate(pieces):
        source = sources[index]
        if nbytes >= limit_nbytes and may_end(sources[index - 1], source):
            yield batch
            batch, nbytes = [], 0
        batch.append(_checked(piece, source, rank, device))
        nbytes += source.numel * piece.element_size()
    if batch:
        yield batch


def _checked(piece: Tensor, source: Partition, rank: int, device: torch.device | None) -> Tensor:
    start, end = _C.partition_bounds(source, rank)
    if piece.dim() != 1 or piece.numel() != end - start:
        raise ValueError(
            f"rank {rank} passes a piece of shape {tuple(piece.shape)} where its part has {end - start} elements "
            f"({source})"
        )
    return (piece if device is None else piece.to(device)).contiguous()


# ----------------------------------------------------------------- one batch


def _wire_dtype(pieces: list[Tensor]) -> torch.dtype:
    """The dtype of a batch, or bytes when it is mixed or one that backends may not know."""
    dtype = pieces[0].dtype
    common = dtype.is_floating_point and dtype.itemsize > 1 and all(piece.dtype == dtype for piece in pieces)
    return dtype if common else torch.uint8


class _Incoming:
    """What arrives in one batch: per rank the pieces that it sends, per tensor the ranks that it comes from."""

    def __init__(self, world_size: int) -> None:
        self.numels: list[list[int]] = [[] for _ in range(world_size)]
        self.senders: list[list[int]] = []

    def expect(self, overlaps: Sequence[tuple[int, int, int]], scale: int) -> None:
        """The next tensor is made of ``overlaps``, each element of which takes ``scale`` elements on the wire."""
        for peer, _, numel in overlaps:
            self.numels[peer].append(numel * scale)
        self.senders.append([peer for peer, _, _ in overlaps])

    def split(self, peer: int, received: Tensor) -> Iterator[Tensor]:
        """The pieces in what ``peer`` sent."""
        return iter(received.split(self.numels[peer]) if self.numels[peer] else ())

    def assemble(self, parts: list[Iterator[Tensor]], pieces: list[Tensor]) -> list[Tensor]:
        """The tensors, from the parts by peer, in the dtypes of ``pieces``."""
        return [
            _joined([next(parts[peer]) for peer in peers], piece)
            for peers, piece in zip(self.senders, pieces, strict=True)
        ]


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    if not parts:
        return like.new_empty(0)
    return _as(torch.cat(parts) if len(parts) > 1 else parts[0].clone(), like.dtype)


def _exchange(
    pieces: list[Tensor], sources: Sequence[Partition], targets: Sequence[Partition], group: dist.ProcessGroup
) -> list[Tensor]:
    """The parts under ``targets``: one all-to-all of what changes ranks."""
    rank = group.rank()
    wire = _wire_dtype(pieces)
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size())]
    incoming = _Incoming(group.size())
    for piece, source, target in zip(pieces, sources, targets, strict=True):
        scale = piece.element_size() // wire.itemsize
        data = _as(piece, wire)
        for peer, start, numel in _C.partition_overlaps(source, target, rank):
            outgoing[peer].append(data.narrow(0, start * scale, numel * scale))
        incoming.expect(_C.partition_overlaps(target, source, rank), scale)
    kept, outgoing[rank] = outgoing[rank], []
    numels = [0 if peer == rank else sum(each) for peer, each in enumerate(incoming.numels)]
    received = _all_to_all(outgoing, numels, data, group)
    parts = [iter(kept) if peer == rank else incoming.split(peer, data) for peer, data in enumerate(received)]
    return incoming.assemble(parts, pieces)


def _all_to_all(
    outgoing: list[list[Tensor]], numels: list[int], wire: Tensor, group: dist.ProcessGroup
) -> list[Tensor]:
    """What each rank sent to this one, ``numels`` elements each; ``wire`` is any tensor of the dtype and device."""
    sent = torch.cat([data for each in outgoing for data in each] or [wire.new_empty(0)])
    received = wire.new_empty(sum(numels))
    dist.all_to_all_single(received, sent, numels, [sum(map(len, each)) for each in outgoing], group=group)
    return list(received.split(numels))


def _gather_batch(pieces: list[Tensor], sources: Sequence[Partition], group: dist.ProcessGroup) -> list[Tensor]:
    """The whole tensors: one all-gather of what each rank holds, padded to the longest."""
    wire = _wire_dtype(pieces)
    incoming = _Incoming(group.size())
    for piece, source in zip(pieces, sources, strict=True):
        overlaps = _C.partition_overlaps(rank0_partition(source.numel), source, 0)
        incoming.expect(overlaps, piece.element_size() // wire.itemsize)
    numels = [sum(each) for each in incoming.numels]
    sent = pieces[0].new_empty(max(numels), dtype=wire)
    torch.cat([_as(piece, wire) for piece in pieces], out=sent[: numels[group.rank()]])
    received = sent.new_empty(len(sent) * group.size())
    _all_gather_single(received, sent, group=group)
    rows = received.view(group.size(), len(sent))
    parts = [incoming.split(peer, rows[peer, :numel]) for peer, numel in enumerate(numels)]
    return incoming.assemble(parts, pieces)
