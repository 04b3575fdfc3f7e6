"""Plans that ranks exchange in a save, and their merge, for any number of ranks."""

from __future__ import annotations

import functools
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from fsdp_c import _C
from fsdp_c.checkpoint.metadata import metadata_content
from fsdp_c.checkpoint.planning import (
    RECORD,
    Held,
    Planned,
    RankPart,
    RankPlan,
    RankResult,
    merge_plans,
    places_of,
    put_records,
)

SHAPES = {"in": (96, 40), "out": (40, 96), "experts": (6, 40, 30), "norm": (40,)}


ORDERS = {"experts": (1, 2, 0)}  # memory order of dimensions


def of_range(shape: tuple[int, ...], start: int, numel: int, order: tuple[int, ...] | None = None) -> Held:
    where = order, (0,) * len(shape), shape, start, numel
    return Held(torch.float32, shape, *where)


def plans_of(ranks: int, layers: int = 3, replicas: int = 1) -> list[RankPlan]:
    """Return the plans of layers that are units, with optimizer state, steps, and an object."""
    plans = []
    for rank in range(ranks):
        layout = _C.FlatLayout(
            [math.prod(shape) for shape in SHAPES.values()], 4, ranks // replicas, rank // replicas, True
        )
        paths: dict[Held | None, list[Any]] = {None: [("optim", "param_groups", 0, "lr")]}
        for layer in range(layers):
            for (name, shape), (inside, _, numel, start) in zip(
                SHAPES.items(), layout.shard_ranges(), strict=True
            ):
                if inside and numel:
                    for kind in ("model", "state"):
                        held = of_range(shape, start, numel, ORDERS.get(name))
                        paths.setdefault(held, []).append((kind, f"{layer}.{name}"))
                    paths.setdefault(of_range((), 0, 1), []).append(("step", f"{layer}.{name}"))
        plans.append([RankPart.of(*each) for each in paths.items()])
    return plans


def written(plans: list[RankPlan]) -> Planned:
    """Return the merged plan with fake results, whose records encode rank, part and key."""
    planned = merge_plans(plans)
    results = {}
    for rank, plan in enumerate(plans):
        records = []
        for number, positions in planned.shares[rank]:
            held = plan[number].held
            boxes = len(held.boxes()) if held else 1
            places = ((number * 1000 + key, box) for key in positions for box in range(boxes))
            records.append(b"".join(RECORD.pack(key * 64, 64 + box, 7, rank) for key, box in places))
        results[rank] = RankResult(1, 0, records)
    put_records(planned, results)
    return planned


def content_of(planned: Planned, ranks: int) -> bytes:
    files = {rank: f"__{rank}_0.distcp" for rank in range(ranks)}
    places = places_of(planned.groups, ["optim.param_groups.0.lr"])
    return b"".join(metadata_content(planned.groups, places, Path("x"), files))


def nbytes_by_rank(plans: list[RankPlan], planned: Planned) -> list[int]:
    return [
        sum(part.nbytes * len(positions) for number, positions in shares if (part := plan[number].held))
        for plan, shares in zip(plans, planned.shares, strict=True)
    ]


def test_replicas_share_the_work() -> None:
    plans = plans_of(8, layers=6, replicas=4)
    nbytes = nbytes_by_rank(plans, merge_plans(plans))
    assert max(nbytes) < 1.3 * sum(nbytes) / len(nbytes) and min(nbytes) > 0


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([of_range((4, 4), 0, 8), of_range((4, 4), 8, 7)], "ranks hold 15 of 16 elements"),
        ([of_range((4, 4), 0, 8), of_range((4, 4), 7, 9)], "no element 7 .*or some of them twice"),
        ([of_range((4, 4), 0, 8), of_range((4, 4), 9, 7)], "no element 8"),
        ([of_range((4, 4), 0, 8), of_range((4, 4), 0, 16)], "some of them twice"),
        ([of_range((4, 4), 0, 16), None], "a tensor on some ranks"),
        ([None, of_range((4, 4), 0, 16)], "a tensor on some ranks"),
        ([of_range((4, 4), 0, 8), of_range((4, 4), 8, 8)._replace(order=(1, 0))], "different orders"),
        ([of_range((4, 4), 0, 8)._replace(sizes=(2, 4))], "8 of 16 elements"),
        (
            [of_range((4, 4), 0, 8)._replace(sizes=(2, 4), offsets=(at, 0)) for at in (0, 1)],
            "some of them twice",
        ),
    ],
)
def test_what_ranks_do_not_hold_together_is_refused_by_name(parts: list[Held | None], reason: str) -> None:
    with pytest.raises(ValueError, match=f"model.weight.* {reason}"):
        merge_plans([[RankPart.of(held, [("model", "weight")])] for held in parts])


def test_where_replicas_differ_in_their_order_in_memory_the_first_ranks_is_written() -> None:
    whole = of_range((4, 4), 0, 16)
    plans = [[RankPart.of(whole._replace(order=order), [("model", "weight")])] for order in (None, (1, 0))]
    assert [[len(share) for share in rank] for rank in merge_plans(plans).shares] == [[2], []]


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of function calls in ``work``, C functions included."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_first_ranks_work_grows_no_faster_than_the_ranks() -> None:
    def growth(work: Callable[[list[RankPlan]], object]) -> Iterator[float]:
        counts = [calls_of(functools.partial(work, plans_of(ranks))) for ranks in (40, 160, 640)]
        return (large / small for small, large in zip(counts, counts[1:], strict=False))

    assert all(factor < 4.4 for factor in growth(merge_plans))
    assert all(factor < 4.4 for factor in growth(lambda plans: written(plans)))
    tables = [(ranks, written(plans_of(ranks))) for ranks in (40, 160, 640)]
    counts = [calls_of(functools.partial(content_of, table, ranks)) for ranks, table in tables]
    assert counts[2] / counts[1] < 4.4 and counts[1] / counts[0] < 4.4


def test_more_layers_cost_the_plan_next_to_nothing() -> None:
    few, many = (calls_of(functools.partial(merge_plans, plans_of(64, layers))) for layers in (2, 32))
    assert many < 2 * few
    assert max(len(pickle.dumps(plan)) for plan in plans_of(64, 80)) < 4000
