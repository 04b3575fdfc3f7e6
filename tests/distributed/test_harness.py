"""The harness itself: bodies run on ranks, failures name the rank, a hang is ended."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, RankHang, RankPool, on_ranks, pool

HERE = __name__


def reports_itself(rank: int, world_size: int) -> tuple[int, int, int]:
    return rank, world_size, os.getpid()


def raises_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError(f"planted on {rank}")


def raises_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("planted before the collective")
    dist.barrier()


def hangs_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def dies_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()


def skips(rank: int, world_size: int) -> None:
    pytest.skip("planted")


def asserts_falsely(rank: int, world_size: int) -> None:
    assert rank + 1 == 10


class RaisesAtItsEnd:
    def __del__(self) -> None:
        raise ValueError("planted at the end")


def drops_what_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        RaisesAtItsEnd()


def returns_a_lambda(rank: int, world_size: int) -> object:
    return lambda: None


@pytest.fixture
def own_pool():
    """A pool of its own, so that planted failures do not restart the session's ranks."""
    one = RankPool(2)
    yield one
    one.close()


@pytest.mark.parametrize("value", [3, 5])
@on_ranks(2)
def test_body_gets_rank_world_size_and_parameters(rank: int, world_size: int, value: int) -> None:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert (world_size, dist.get_rank(), value in (3, 5), total.item()) == (2, rank, True, 1.0)


@on_ranks(4)
def test_four_ranks_form_one_group(rank: int, world_size: int) -> None:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert (world_size, dist.get_world_size(), total.item()) == (4, 4, 6)


@on_ranks(2)
def test_body_runs_on_one_thread_with_a_fixed_seed(rank: int, world_size: int) -> None:
    assert torch.get_num_threads() == 1
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_processes_are_kept_between_bodies() -> None:
    first = pool(2).run(HERE, "reports_itself")
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert pool(2).run(HERE, "reports_itself") == first


def test_failure_names_rank_error_and_line(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"failed on rank 1 of 2: ValueError: planted on 1") as failure:
        own_pool.run(HERE, "raises_on_last_rank")
    assert "in raises_on_last_rank" in str(failure.value)
    assert "failed on rank 0" not in str(failure.value)


def test_failing_assert_shows_its_values(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"failed on rank 1 of 2: AssertionError: assert \(1 \+ 1\) == 10"):
        own_pool.run(HERE, "asserts_falsely")


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


def test_ranks_left_in_a_collective_are_named_beside_the_failure(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="failed on rank 0") as failure:
        own_pool.run(HERE, "raises_while_others_wait")
    assert "rank 1 of 2 still running" in str(failure.value)


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


def test_result_that_cannot_be_pickled_is_a_failure(own_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="failed on rank 0 of 2: the body's result cannot be pickled"):
        own_pool.run(HERE, "returns_a_lambda")
