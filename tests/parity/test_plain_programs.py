"""Random training loops match the plain module. See tests/parity/plain_programs.py to run more of them."""

from __future__ import annotations

import pytest

from tests.parity.plain_programs import run_program
from tests.parity.programs import Side, generate
from tests.ranks import on_ranks

BATCHES = [tuple(range(first, first + 25)) for first in range(0, 75, 25)]


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"seeds {seeds[0]} to {seeds[-1]}")
@on_ranks(2, timeout_s=120.0)
def test_random_training_loops_equal_the_plain_module(
    rank: int, world_size: int, seeds: tuple[int, ...]
) -> None:
    for seed in seeds:
        program = generate(seed, "plain")
        failure = run_program(rank, world_size, program)
        assert failure is None, f"{failure}\n{program}"


@on_ranks(4)
def test_random_training_loops_of_four_ranks_equal_the_plain_module(rank: int, world_size: int) -> None:
    for seed in range(10):
        program = generate(seed, "plain", world_size)
        failure = run_program(rank, world_size, program)
        assert failure is None, f"{failure}\n{program}"


@on_ranks(2)
def test_a_gradient_that_is_not_averaged_is_found(rank: int, world_size: int) -> None:
    """Doubling the sharded model's learning rate looks like a missing average after one step."""
    right = Side.do_step

    def wrong(side: Side) -> None:
        side.optimizer.param_groups[0]["lr"] *= 1.0 if side.plain else 2.0
        right(side)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Side, "do_step", wrong)
        failure = run_program(rank, world_size, generate(0, "plain"))
    assert failure is not None and "step()" in failure and "parameter" in failure
