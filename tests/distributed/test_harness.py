"""The harness itself: bodies run on ranks, failures name the rank, a hang is ended."""

from __future__ import annotations

import os
import time

import pytest

from tests.ranks import RankFailure, RankHang, RankPool

HERE = __name__


def reports_itself(rank: int, world_size: int) -> tuple[int, int, int]:
    return rank, world_size, os.getpid()


def raises_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError(f"planted on {rank}")


def hangs_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def dies_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()


def skips(rank: int, world_size: int) -> None:
    pytest.skip("planted")


class RaisesAtItsEnd:
    def __del__(self) -> None:
        raise ValueError("planted at the end")


def drops_what_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        RaisesAtItsEnd()


@pytest.fixture
def own_pool():
    """A pool of its own, so that planted failures do not restart the session's ranks."""
    one = RankPool(2)
    yield one
    one.close()


def test_failure_names_rank_error_and_line(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"failed on rank 1 of 2: ValueError: planted on 1") as failure:
        own_pool.run(HERE, "raises_on_last_rank")
    assert "in raises_on_last_rank" in str(failure.value)
    assert "failed on rank 0" not in str(failure.value)


def test_exception_that_python_only_prints_is_a_failure(own_pool: RankPool) -> None:
    with pytest.raises(
        RankFailure, match="failed on rank 1 of 2: AssertionError: .*RaisesAtItsEnd.*planted at the end"
    ):
        own_pool.run(HERE, "drops_what_raises")


def test_pool_is_replaced_after_a_failure(own_pool: RankPool) -> None:
    before = {pid for _, _, pid in own_pool.run(HERE, "reports_itself")}
    with pytest.raises(RankFailure):
        own_pool.run(HERE, "raises_on_last_rank")
    after = {pid for _, _, pid in own_pool.run(HERE, "reports_itself")}
    assert (before & after, own_pool.starts) == (set(), 2)


def test_hang_names_the_rank_and_shows_its_stack(own_pool: RankPool) -> None:
    own_pool.run(HERE, "reports_itself")  # imports this module
    with pytest.raises(RankHang, match=": rank 1 of 2 still running after 3 s") as failure:
        own_pool.run(HERE, "hangs_on_rank_1", timeout_s=3.0)
    assert "in hangs_on_rank_1" in str(failure.value)


def test_dead_process_is_named_with_its_signal(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="failed on rank 1 of 2: the process died with SIGABRT"):
        own_pool.run(HERE, "dies_on_rank_1")


def test_skip_on_all_ranks_skips_the_test(own_pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="planted"):
        own_pool.run(HERE, "skips")
