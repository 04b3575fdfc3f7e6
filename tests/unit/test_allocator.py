"""The allocator that ``plan`` counts by: torch's rules, followed by hand."""

from __future__ import annotations

from fsdp_c.tools.allocator import Block, Pool

MIB = 2**20


def test_a_block_is_a_multiple_of_512_bytes() -> None:
    pool = Pool()
    assert [pool.take(nbytes).nbytes for nbytes in (1, 512, 513, MIB)] == [512, 512, 1024, MIB]


def test_the_rest_of_a_small_segment_is_used_up_before_another_is_taken() -> None:
    pool = Pool()
    first, second, third = (pool.take(MIB) for _ in range(3))
    assert (first.address, second.address) == (0, MIB)
    assert third.address > 2 * MIB


def test_small_and_large_blocks_are_never_of_one_segment() -> None:
    pool = Pool()
    small = pool.take(512)
    large = pool.take(MIB + 1)
    assert large.address >= small.address + 2 * MIB
    pool.give_back(small)
    assert pool.take(MIB + 1).address > large.address


def test_less_than_10_mib_is_cut_from_20_mib_and_more_has_a_segment_of_its_own() -> None:
    pool = Pool()
    first, second = pool.take(9 * MIB), pool.take(9 * MIB)
    assert second.address == first.address + 9 * MIB
    own = pool.take(11 * MIB)
    assert own == Block(12 * MIB, own.address, False)  # what is over is too little for a block


def test_what_is_over_goes_with_a_large_block_up_to_1_mib() -> None:
    pool = Pool()
    pool.give_back(pool.take(12 * MIB))
    kept = pool.take(11 * MIB)
    assert kept.nbytes == 12 * MIB
    pool.give_back(kept)
    assert pool.take(11 * MIB - 512).nbytes == 11 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = Pool()
    blocks = [pool.take(nbytes * MIB) for nbytes in (16, 12, 14)]
    for block in blocks:
        pool.give_back(block)
    assert pool.take(12 * MIB) == blocks[1]
    assert pool.take(13 * MIB) == blocks[2]
    assert pool.take(13 * MIB) == blocks[0]._replace(nbytes=13 * MIB)


def test_neighbours_join_and_segments_do_not() -> None:
    pool = Pool()
    left, middle, right = (pool.take(6 * MIB) for _ in range(3))
    for block in (left, right, middle):
        pool.give_back(block)
    assert pool.take(20 * MIB) == Block(20 * MIB, left.address, False)
    other = Pool()
    for block in [other.take(10 * MIB), other.take(10 * MIB)]:
        other.give_back(block)
    assert other.take(20 * MIB).address > 20 * MIB
