"""No operation calls so much more when there is more to do that its cost would grow faster than that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import growth

LIMIT = 1.3
FEW = 200  # calls, of which a handful more or less would be a growth
OF_TORCHS_OWN = {  # nn.Module.load_state_dict goes through what is left for each child; hooks rename it at each unit
    "depth": {"LOCAL load"},
    "buffers": {"LOCAL load"},
}


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Counter:
    """Calls of functions, Python's and C's, that an operation makes."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def count(self, name: str, call: Callable[[], Any]) -> Any:
        events = [0]

        def on_event(frame: object, event: str, _: object) -> None:
            if event in ("call", "c_call"):
                events[0] += 1

        sys.setprofile(on_event)
        try:
            return call()
        finally:
            sys.setprofile(None)
            self.found[name] = events[0]


def counts(name: str) -> dict[str, list[int]]:
    """Of each operation, by the sizes."""
    build, _, sizes = growth.DIMENSIONS[name]
    rows = []
    for size in (sizes[0], *sizes):  # the first time does more
        counter = Counter()
        with growth.group_of(size if name == "ranks" else 2):
            growth.run("fsdp_c", partial(build, size), counter.count, counter.count)
        rows.append(counter.found)
    return {operation: [row[operation] for row in rows[1:]] for operation in rows[0]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", growth.DIMENSIONS)
def test_calls_do_not_grow_faster_than_the_model(name: str) -> None:
    found = counts(name)
    assert {"construct", "step", "FULL get", "SHARDED load", "summon", "destroy"} <= found.keys()
    sizes, left_out = growth.DIMENSIONS[name].quick, OF_TORCHS_OWN.get(name, set())
    held = {
        operation: each for operation, each in found.items() if each[-1] > FEW and operation not in left_out
    }
    exponents = {operation: growth.exponent(sizes, each) for operation, each in held.items()}
    assert {operation: value for operation, value in exponents.items() if value > LIMIT} == {}
