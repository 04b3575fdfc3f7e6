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
    for batch in _batches(pieces, sources, device, batch_nbytes or BATCH_NBYTES, _always):
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
    for batch in _batches(pieces, sources, device, batch_nbytes or BATCH_NBYTES, _begins):
        end = first + len(batch)
        yield from _gather_batch(batch, sources[first:end], group)
        first = end


# ----------------------------------------------------------------- batches


def _always(last: Partition, following: Partition) -> bool:
    return True


def _begins(last: Partition, following: Partition) -> bool:
    """Shards of a whole flat parameter are even, which parts of it are not: an all-gather would be mostly padding."""
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


def _wire_dtype(pieces: list[Tensor]) -> torch.dtype:
    """The dtype of a batch, or bytes when it is mixed or one that backends may not know."""
    dtype = pieces[0].dtype
    common = dtype.is_floating_point and dtype.itemsize > 1 and all(piece.dtype == dtype for piece in pieces)
    return dtype if common else torch.uint8


class _Plan:
    """What moves in one batch, and how the tensors are made of what arrives."""

    def __init__(
        self, pieces: list[Tensor], sources: Sequence[Partition], targets: Sequence[Partition], rank: int, world: int
    ) -> None:
        """``rank``: whose new parts are made; with ``targets`` on rank 0 anybody may play it."""
        self.wire = _wire_dtype(pieces)
        itemsize = self.wire.itemsize
        scales = [piece.element_size() // itemsize for piece in pieces]
        plan = _C.exchange_plan(zip(sources, targets, scales, strict=True), rank, world)
        self.held, self.outgoing, self.incoming, self.senders = plan
        self.numels = [sum(each) for each in self.incoming]

    def wired(self, pieces: list[Tensor]) -> list[Tensor]:
        return [_as(piece, self.wire) for piece in pieces]

    def split(self, peer: int, received: Tensor) -> Iterator[Tensor]:
        """The parts in what ``peer`` sent."""
        return iter(received.split(self.incoming[peer]) if self.incoming[peer] else ())

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


def _check(pieces: list[Tensor], sources: Sequence[Partition], rank: int) -> None:
    """Raise ValueError, before anything is sent, for a piece that is not what its partition says."""
    for piece, source in zip(pieces, sources, strict=True):
        start, end = source.bounds(rank)
        if piece.dim() != 1 or piece.numel() != end - start:
            raise ValueError(
                f"rank {rank} passes a piece of shape {tuple(piece.shape)} where its part has {end - start} elements "
                f"({source})"
            )


def _exchange(
    pieces: list[Tensor], sources: Sequence[Partition], targets: Sequence[Partition], group: dist.ProcessGroup
) -> list[Tensor]:
    """The parts under ``targets``: one all-to-all of what changes ranks."""
    rank = group.rank()
    plan = _Plan(pieces, sources, targets, rank, group.size())
    wired = plan.wired(pieces)
    if [wire.numel() for wire in wired] != plan.held or any(piece.dim() != 1 for piece in pieces):
        _check(pieces, sources, rank)
    outgoing = [[wired[index].narrow(0, start, numel) for index, start, numel in each] for each in plan.outgoing]
    kept, outgoing[rank] = outgoing[rank], []
    numels = [0 if peer == rank else numel for peer, numel in enumerate(plan.numels)]
    received = _all_to_all(outgoing, numels, wired[0], group)
    parts = [iter(kept) if peer == rank else plan.split(peer, data) for peer, data in enumerate(received)]
    return plan.assemble(parts, pieces)


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
    _check(pieces, sources, group.rank())
    plan = _Plan(pieces, sources, [rank0_partition(source.numel) for source in sources], 0, group.size())
    sent = pieces[0].new_empty(max(plan.numels), dtype=plan.wire)
    torch.cat(plan.wired(pieces), out=sent[: plan.numels[group.rank()]])
    received = sent.new_empty(len(sent) * group.size())
    _all_gather_single(received, sent, group=group)
    if len(pieces) == 1 and sources[0].offset == 0 and len(received) - sum(plan.numels) < len(sent):
        return [_as(received[: sum(plan.numels)], pieces[0].dtype)]  # in order as it is, the padding behind it
    rows = received.view(group.size(), len(sent))
    parts = [plan.split(peer, rows[peer, :numel]) for peer, numel in enumerate(plan.numels)]
    return plan.assemble(parts, pieces)
