"""Shards of flat parameters become chunks of rows, full tensors or shards of another layout, and back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.state import redistribution
from fsdp_c.state.redistribution import (
    Partition,
    chunk_partition,
    gather,
    gather_flat,
    rank_partition,
    redistribute,
    shard_partition,
)
from tests.pairwise import pairwise
from tests.ranks import device, on_ranks

SHAPES = [(5, 3), (), (0, 4), (1,), (2, 3, 4), (7,), (3, 0), (64, 33), (1, 9)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


def tensors(mixed: bool) -> list[torch.Tensor]:
    generator = torch.Generator(device()).manual_seed(3)
    dtypes = DTYPES if mixed else [torch.float32]
    return [
        torch.randint(0, 100, shape, generator=generator).to(dtypes[index % len(dtypes)])
        for index, shape in enumerate(SHAPES)
    ]


def part(tensor: torch.Tensor, partition: Partition, rank: int) -> torch.Tensor:
    start, end = partition.bounds(rank)
    return tensor.flatten()[start:end]


def shards(world_size: int, rank: int) -> list[Partition]:
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    layout = _C.FlatLayout(numels, 4, world_size, rank, True)
    return [shard_partition(layout, index) for index in range(len(SHAPES))]


@pytest.fixture(params=[2**20, 0], ids=["small", "large"])
def large_nbytes(request: pytest.FixtureRequest) -> int:
    """Return the size from which tensors count as large and move one by one."""
    return request.param


def limits(batch_nbytes: int, large_nbytes: int) -> Any:
    return mock.patch.multiple(redistribution, BATCH_NBYTES=batch_nbytes, LARGE_NBYTES=large_nbytes)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batch_nbytes", [1, 2**20])
@on_ranks(4)
def test_shards_become_chunks_and_chunks_shards(rank, world_size, mixed, batch_nbytes, large_nbytes):
    wholes, sources = tensors(mixed), shards(world_size, rank)
    targets = [chunk_partition(shape, world_size) for shape in SHAPES]
    pieces = [part(whole, source, rank) for whole, source in zip(wholes, sources, strict=True)]
    group = dist.group.WORLD
    with limits(batch_nbytes, large_nbytes):
        chunks = list(redistribute(pieces, sources, targets, group))
    for whole, chunk in zip(wholes, chunks, strict=True):
        expected = whole.chunk(world_size)[rank : rank + 1] if whole.dim() else [whole][rank:]
        assert torch.equal(
            chunk, torch.cat([one.flatten() for one in expected]) if expected else whole.flatten()[:0]
        )
        assert chunk.untyped_storage().nbytes() == chunk.nbytes
    with limits(batch_nbytes, large_nbytes):
        back = list(redistribute(chunks, targets, sources, group))
    for piece, again in zip(pieces, back, strict=True):
        assert torch.equal(piece, again)
        assert piece.dtype == again.dtype


@pairwise(rank0_only=[False, True], mixed=[False, True], batch_nbytes=[1, 2**20])
@on_ranks(2)
def test_gathered_tensors_are_whole(rank, world_size, rank0_only, mixed, batch_nbytes, large_nbytes):
    wholes, sources = tensors(mixed), shards(world_size, rank)
    pieces = (part(whole, source, rank) for whole, source in zip(wholes, sources, strict=True))
    with limits(batch_nbytes, large_nbytes):
        found = list(gather(pieces, sources, dist.group.WORLD, rank0_only=rank0_only))
    for whole, full in zip(wholes, found, strict=True):
        if rank0_only and rank:
            assert full is None
        else:
            assert torch.equal(full, whole.flatten())


@on_ranks(2)
def test_redistribute_to_one_rank_sends_no_elements_that_stay(rank):
    source, target = Partition(10, 6, 0), rank_partition(10, 0)
    data = torch.arange(10.0)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as transfer:
        (whole,) = redistribute([part(data, source, rank)], [source], [target], dist.group.WORLD)
    assert [call.args[1].numel() for call in transfer.call_args_list] == [0 if rank == 0 else 4]
    assert torch.equal(whole, data if rank == 0 else data[:0])


@on_ranks(2)
def test_piece_of_another_size_is_refused(rank):
    source = Partition(10, 6, 0)
    with pytest.raises(
        ValueError, match=f"rank {rank} passes a piece of shape .3,. where its part has {6 - 2 * rank}"
    ):
        list(redistribute([torch.zeros(3)], [source], [source], dist.group.WORLD))


def test_a_receive_buffer_is_reused_by_a_batch_of_its_own_size():
    buffer, like = redistribution.ReceiveBuffer(), torch.empty(0)
    first = buffer.take(like, 4)
    assert buffer.take(like, 4).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("shapes", [[(2, 3), ()], [(6,), (1, 1)]])
def test_ranges_are_joined_alike_where_the_op_cannot_reach(shapes):
    sources = [torch.arange(12.0), torch.arange(5, dtype=torch.int64)]
    likes = [torch.empty(0), torch.empty(0, dtype=torch.int64)]
    arguments = (sources, [0, 8, 16, 0, 40, 8, 1, 24, 8], [2, 1], likes, shapes)
    joined, elsewhere = redistribution.join_ranges(*arguments), redistribution._join_elsewhere(*arguments)
    assert torch.equal(joined[0], torch.tensor([2.0, 3, 4, 5, 10, 11]).view(shapes[0]))
    assert torch.equal(joined[1], torch.tensor(3).view(shapes[1]))
    for one, other in zip(joined, elsewhere, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_empty_pieces_of_a_rank_cost_no_launch():
    """On a device launches cost time, and most pieces for one of many ranks are empty."""
    source, like = torch.arange(4.0), torch.empty(0)
    with mock.patch.object(torch, "cat", wraps=torch.cat) as cat:
        made = redistribution._join_elsewhere(
            [source], [0, 4, 8], [0, 1, 0], [like] * 3, [(0,), (2,), (3, 0)]
        )
    assert [one.tolist() for one in made] == [[], [1.0, 2.0], [[], [], []]]
    assert cat.call_count == 1


@pytest.mark.parametrize("numels", [(11,), (4, 7)], ids=["one parameter", "two parameters"])
@on_ranks(2)
def test_gather_flat_copies_neither_the_shard_nor_a_single_parameter(rank, numels):
    shard, seen = torch.arange(6.0) + 6 * rank, []
    sources = [[Partition(numel, 6, offset) for numel, offset in zip(numels, (0, 4), strict=False)]]
    all_gather = redistribution._all_gather_single

    def watched(received, sent, **kwargs):
        seen.append((received.data_ptr(), sent.data_ptr()))
        return all_gather(received, sent, **kwargs)

    with mock.patch.object(redistribution, "_all_gather_single", watched):
        shapes = [[(numel,) for numel in numels]]
        wholes = list(gather_flat([shard], sources, shapes, dist.group.WORLD, redistribution.ReceiveBuffer()))
    assert torch.equal(torch.cat(wholes), torch.arange(11.0))
    ((received, sent),) = seen
    assert sent == shard.data_ptr()
    assert (wholes[0].data_ptr() == received) == (len(numels) == 1)


@pytest.mark.parametrize(
    "partition", [(-1, 1, 0), (1, 0, 0), (1, 1, -1), (2**62, 1, 2**62), (1, 2**63 - 1, 1)]
)
def test_partition_outside_its_domain_is_refused(partition):
    with pytest.raises(ValueError, match="not a partition"):
        _C.partition_bounds(partition, 0)
