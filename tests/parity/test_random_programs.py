"""Random programs give bitwise the same losses, gradients, parameters and state dicts with torch's FSDP1 and
fsdp_c.

``FSDP_C_RANDOM_PROGRAMS=500`` runs that many programs instead of 60. A failure prints the seed and the
program: ``FSDP_C_RANDOM_SEED=17`` runs that one alone, and ``FSDP_C_RANDOM_KEEP=1,2,5`` only these operations
of it, which is how to look for a smaller program that fails.
"""

from __future__ import annotations

import os

import pytest

from tests.parity.engine import assert_record_is_worth_comparing, differences
from tests.parity.programs import Program, ProgramError, generate, record_program, shortened
from tests.ranks import on_ranks
from tests.simulated_gpu import races

PROGRAMS = int(os.environ.get("FSDP_C_RANDOM_PROGRAMS", "60"))
PER_TEST = 15
SHOWN_DIFFERENCES = 6

if "FSDP_C_RANDOM_SEED" in os.environ:
    BATCHES = [(int(os.environ["FSDP_C_RANDOM_SEED"]),)]
else:
    BATCHES = [tuple(range(first, min(first + PER_TEST, PROGRAMS))) for first in range(0, PROGRAMS, PER_TEST)]
KEPT = tuple(int(number) for number in os.environ.get("FSDP_C_RANDOM_KEEP", "").split(",") if number)


def failure_text(program: Program, found: list[str]) -> str:
    shown = "\n  ".join(found[:SHOWN_DIFFERENCES])
    return (
        f"{len(found)} records differ, the first of them:\n  {shown}\n{program}\n"
        f"Again, and smaller: FSDP_C_RANDOM_SEED={program.seed} FSDP_C_RANDOM_KEEP=<numbers of operations>"
    )


def compare_program(program: Program, rank: int, world_size: int) -> None:
    try:
        expected = record_program(program, "torch", rank, world_size)
        races.forget()  # edited gradients are taken over by torch on the stream that gathers
        actual = record_program(program, "fsdp_c", rank, world_size)
    except ProgramError as error:
        raise AssertionError(failure_text(program, [str(error)])) from error
    found = sorted(differences(expected, actual), key=_moment)
    assert not found, failure_text(program, found)
    assert_record_is_worth_comparing(expected)


def _moment(difference: str) -> int:
    """The number of the operation that a label starts with: ``step 3 ...``."""
    return int(difference.split()[1])


@pytest.mark.parametrize("kept", [KEPT], ids=[""])
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"seeds {seeds[0]} to {seeds[-1]}")
@on_ranks(2, timeout_s=120.0)
def test_random_programs_equal_torch(
    rank: int, world_size: int, seeds: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    for seed in seeds:
        compare_program(shortened(generate(seed), kept), rank, world_size)


def test_programs_use_every_operation_and_configuration() -> None:
    """What a seed can reach is reached by the programs of CI, so that equality says something about it."""
    programs = [generate(seed) for seed in range(60)]
    operations = {one.name for program in programs for one in program.operations}
    assert operations == {
        "train", "twice", "no_sync", "evaluate", "optimizer_step", "zero_grad", "clip", "summon", "save", "load",
        "checkpoint", "freeze", "edit", "raise_in_forward", "fail",
    }  # fmt: skip
    assert {program.point.strategy for program in programs} == {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}
    assert {plan.checkpoint for program in programs for plan in program.blocks} == {
        None,
        "reentrant",
        "nonreentrant",
    }
    assert {plan.plan for program in programs for plan in program.blocks} == {
        "none",
        "unit",
        "nested",
        "inner",
    }


def test_a_seed_gives_one_program() -> None:
    assert generate(5) == generate(5) != generate(6)
