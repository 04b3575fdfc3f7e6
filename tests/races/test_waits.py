"""Each wait of the runtime is left out in turn. The omission must be detected, be implied by other waits, or have a
written reason.

A part of the waits, always the same ones; all of them with pytest --exhaustive.
"""

from __future__ import annotations

import pytest

from tests.races.programs import PROGRAMS, Step, lags, run
from tests.races.waits import CHOSEN, look
from tests.settings import EXHAUSTIVE

pytestmark = pytest.mark.usefixtures("one_of_four_ranks")
STRIDE = 1 if EXHAUSTIVE else 16
TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("program", CHOSEN)
def test_each_wait_is_needed_or_implied_or_explained(program: str) -> None:
    found = look(program, STRIDE)
    assert not found.unexplained()


PREFETCHED = "no limit, forward prefetch, bf16"
HYBRID = f"HYBRID_SHARD, {PREFETCHED}"

# Kinds of waits (waiting stream, awaited stream), with a program that needs each.
NEEDED = {
    ("pre-unshard", "compute"): PREFETCHED,
    ("unshard", "compute"): "no limit",
    ("unshard", "pre-unshard"): PREFETCHED,
    ("compute", "unshard"): "no limit",
    ("post-backward", "compute"): "no limit",
    ("compute", "post-backward"): "no limit",
    ("all-reduce", "post-backward"): HYBRID,
    ("post-backward", "all-reduce"): HYBRID,
    ("compute", "all-reduce"): HYBRID,
    ("compute", "compute"): "two streams",
    ("host", "compute"): "offload, gradients read",
    ("host", "pre-unshard"): "offload, write after evaluating",
}


# A last reduction whose input lies in the pool, which large units have: pytest --width 640.
OF_THE_POOL = {("post-backward", "unshard"), ("unshard", "post-backward"), ("pre-unshard", "post-backward")}


@pytest.mark.parametrize("kind", NEEDED, ids=" for ".join)
def test_each_kind_of_wait_is_needed_somewhere(kind: tuple[str, str]) -> None:
    """Waits in the middle of the program are tried first: they belong to ordinary steps."""
    program = NEEDED[kind]
    whole = run(program)
    middle = len(whole.waits) // 2
    of_kind = [nth for nth, wait in enumerate(whole.waits) if wait.kind == kind and wait.orders]
    of_kind.sort(key=lambda nth: abs(nth - middle))
    assert any(run(program, drop=nth).reports for nth in of_kind)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_are_in_order_by_these_kinds(program: str) -> None:
    whole = run(program)
    assert not whole.reports
    assert {wait.kind for wait in whole.waits} <= set(NEEDED) | OF_THE_POOL


def test_a_program_goes_the_same_way_each_time() -> None:
    """Equal order in all runs is the premise of comparing runs with and without a wait. Autograd's thread may
    be late in some runs and change the order.
    """
    program = "HYBRID_SHARD, no limit, forward prefetch, bf16"
    assert any(run(program).order == run(program).order for _ in range(4))


# ---- absence of unnecessary waits


def test_all_gathers_overlap_with_the_previous_computation() -> None:
    """A unit's all-gather does not wait for the forward of the previous unit."""
    behind = list(lags(run("no limit").order, "unshard", "compute 1"))
    assert sum(lag > 3 for lag in behind) >= 6


def test_input_of_an_all_gather_is_cast_beside_the_previous_all_gather() -> None:
    behind = list(lags(run("no limit, forward prefetch, bf16").order, "pre-unshard", "unshard"))
    assert sum(lag > 0 for lag in behind) >= 6


@pytest.mark.parametrize("name", ["accumulate", "reduce fp32"])
def test_computation_and_reduce_scatters_run_beside_the_all_reduce_before_them(name: str) -> None:
    order = run(f"HYBRID_SHARD, {name}").order
    assert sum(lag > 0 for lag in lags(order, "post-backward", "all-reduce")) >= 4
    assert sum(lag > 0 for lag in lags(order, "compute 1", "all-reduce")) >= 20


def test_lags_count_unordered_launches_only() -> None:
    first, other = Step("one", "a", {"a": 1}), Step("two", "b", {"b": 1})
    assert list(lags([first, other], "b", "a")) == [1]
    assert list(lags([first, other._replace(after={"a": 1, "b": 1})], "b", "a")) == [0]
