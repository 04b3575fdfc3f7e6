"""fsdp_c bitwise equals torch's FSDP1: losses, parameters, buffers, gradients after every backward, and full
state dicts.

Each point of the grid is a test. Its id consists of scenario, strategy, orig or flat (use_orig_params),
precision and optimizer. Both implementations run in the same body on the same two ranks, so ``-k`` selects
points. Points at which torch itself raises are listed in REFUSALS, and a test checks that torch still raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import cycle, product

import pytest

from tests.pairwise import all_pairs
from tests.parity.engine import OPTIMIZERS, PRECISIONS, Point, assert_same_record, compare, record_run
from tests.parity.scenarios import CORE, NARROW, SCENARIOS, WIDE
from tests.ranks import STRATEGIES, all_strategies, both_views, on_ranks


@dataclass(frozen=True)
class Refusal:
    """Points at which torch raises. ``message`` matches torch's error."""

    where: Callable[[Point], bool]
    message: str
    reason: str


REFUSALS = (
    Refusal(
        lambda point: point.scenario == "frozen_in_unit" and not point.use_orig_params,
        "has both parameters with requires_grad=True and False",
        "a flat parameter without use_orig_params is trained or frozen as a whole",
    ),
    Refusal(
        lambda point: point.scenario.startswith("checkpoint_around") and point.precision == "cast_inputs",
        "mixed dtype|must have the same dtype",  # on the CPU, on a GPU
        "the recomputation of a checkpointed unit does not cast its inputs again",
    ),
    Refusal(
        lambda point: point.scenario == "shared" and point.precision == "keep_low" and point.use_orig_params,
        "attempting to assign a gradient with dtype",
        "a low-precision gradient is assigned to the second name of a full-precision parameter",
    ),
)


def torch_loses_gradients(point: Point) -> bool:
    """Return True for points at which torch loses gradients. After a forward without backward, torch's
    post-backward hook is on a node that the next forward does not use if parameters are cast: gradients are
    neither reduced nor exposed. The last two tests show this and the result of fsdp_c.
    """
    return point.scenario == "forward_without_backward" and point.precision == "bf16_reduce_fp32"


def refusal(point: Point) -> Refusal | None:
    return next((one for one in REFUSALS if one.where(point)), None)


def grid() -> Iterable[Point]:
    """Yield the points. Of scenarios in CORE, precisions and layouts (strategy, use_orig_params) any two meet, and
    all layouts run in fp32. Optimizers take turns.
    """
    layouts = [*product(STRATEGIES, (True, False))]
    wanted = [(scenario, *layout, "fp32") for scenario, layout in product(CORE, layouts)]
    wanted += [("plain", *layout, precision) for layout, precision in product(layouts, PRECISIONS)]
    wanted += [
        (scenario, *layout, precision)
        for scenario, layout, precision in all_pairs([*CORE], layouts, [*PRECISIONS])
    ]
    wanted += [("shared", "FULL_SHARD", True, "keep_low")]  # one of REFUSALS
    wanted += all_pairs([*WIDE], STRATEGIES, (True, False), ("fp32", "bf16_reduce_fp32"))
    wanted += all_pairs([*NARROW], STRATEGIES[:2], (True, False), ("fp32",))
    one, other = OPTIMIZERS
    for point, optimizer in zip(dict.fromkeys(wanted), cycle((one, other, other, one))):
        yield Point(*point, optimizer)


POINTS = list(grid())
COMPARED = [
    pytest.param(point, id=point.id)
    for point in POINTS
    if not refusal(point) and not torch_loses_gradients(point)
]
REFUSED = [pytest.param(point, id=point.id) for point in POINTS if refusal(point)]


@pytest.mark.parametrize("point", COMPARED)
@on_ranks(2)
def test_training_equals_torch(rank: int, world_size: int, point: Point) -> None:
    compare(point, SCENARIOS[point.scenario], rank, world_size)


@pytest.mark.parametrize("point", REFUSED)
@on_ranks(2)
def test_points_left_out_are_those_torch_refuses(rank: int, world_size: int, point: Point) -> None:
    found = refusal(point)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=found.message):
        record_run(point, SCENARIOS[point.scenario], "torch", rank, world_size)


THROWN_AWAY = Point("forward_without_backward", precision="bf16_reduce_fp32")


@on_ranks(2)
def test_torch_loses_all_gradients_after_a_forward_without_backward_in_bf16(
    rank: int, world_size: int
) -> None:
    trace = record_run(THROWN_AWAY, SCENARIOS[THROWN_AWAY.scenario], "torch", rank, world_size)
    gradients = [value for label, value in trace.items() if "gradient" in label]
    assert gradients and all(gradient is None for gradient in gradients)


@all_strategies
@both_views
@on_ranks(2)
def test_forward_without_backward_changes_nothing_in_bf16(
    rank: int, world_size: int, use_orig_params: bool, strategy: str
) -> None:
    point = replace(THROWN_AWAY, strategy=strategy, use_orig_params=use_orig_params)
    expected = record_run(point, SCENARIOS["plain"], "torch", rank, world_size)
    actual = record_run(point, SCENARIOS[point.scenario], "fsdp_c", rank, world_size)
    kept = {label: value for label, value in actual.items() if "thrown away" not in label}
    assert_same_record(point, expected, kept)
