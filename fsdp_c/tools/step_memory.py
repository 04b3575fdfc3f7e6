"""How much unsharded parameter storage a training step holds at once: bytes, summed over what the runtime says.

It takes a dry run of the step (csrc/runtime/dry_run.h, which says what is taken for granted of the model) and decides
there, as in training, what is gathered, held back and freed when. Nothing of that is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsdp_c import _C
from fsdp_c.compat.upstream import BackwardPrefetch, ShardingStrategy

Event = tuple[int, int]  # a constant of _C, and the unit
TWO_STEPS = (True, True)  # the first has no order to follow yet


class StepUnit(NamedTuple):
    """One unit, as far as a step's memory depends on it. ``parent``: index of the unit around it, None for a root."""

    parent: int | None
    nbytes: int  # of its unsharded parameters
    strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    has_params: bool
    is_trainable: bool
    has_streams: bool
    is_segment: bool = False  # of the unit at ``parent``


class StepMemory(NamedTuple):
    """What a step holds and does: the most bytes at once, and how often each unit is gathered."""

    peak_nbytes: int
    gathers: tuple[int, ...]


def of_step(units: Sequence[StepUnit]) -> StepMemory:
    """The unsharded storage of a step of ``units``, an outer unit before its inner ones."""
    events = _events(units)
    gathers = [0] * len(units)
    nbytes = peak_nbytes = 0
    for kind, index in events:
        if kind == _C.DRY_RUN_GATHER:
            gathers[index] += 1
        elif kind == _C.DRY_RUN_TAKE:
            nbytes += units[index].nbytes
        else:
            nbytes -= units[index].nbytes
        peak_nbytes = max(peak_nbytes, nbytes)
    return StepMemory(peak_nbytes, tuple(gathers))


def _events(units: Sequence[StepUnit]) -> Iterator[Event]:
    """What the second step does. Trees follow each other in forward, and the other way round in backward."""
    runs, requires_grad = [], False
    for tree in _trees(units):
        runs.append(_dry_run(units, tree, requires_grad))
        requires_grad = requires_grad or any(units[index].is_trainable for index in tree)
    for *_, forward, _ in runs:
        yield from forward
    for *_, backward in reversed(runs):
        yield from backward


def _trees(units: Sequence[StepUnit]) -> list[list[int]]:
    """The units of each root, and that first."""
    trees: list[list[int]] = []
    tree_of: list[list[int]] = []
    for index, unit in enumerate(units):
        if unit.parent is None:
            trees.append([])
        tree_of.append(trees[-1] if unit.parent is None else tree_of[unit.parent])
        tree_of[index].append(index)
    return trees


def _dry_run(units: Sequence[StepUnit], tree: list[int], inputs_require_grad: bool) -> list[list[Event]]:
    places = {index: place for place, index in enumerate(tree)}
    given = tuple(_as_given(units[index], places) for index in tree)
    lists = _C.dry_run(
        given,
        TWO_STEPS,
        backward_prefetch_limit=1,
        forward_prefetch_limit=1,
        has_streams=units[tree[0]].has_streams,
        inputs_require_grad=inputs_require_grad,
    )
    return [[(kind, tree[place]) for kind, place in events] for events in lists]


def _as_given(unit: StepUnit, places: dict[int, int]) -> tuple[int, int, int, int, bool, bool, bool, bool]:
    return (
        -1 if unit.parent is None else places[unit.parent],
        unit.nbytes,
        unit.strategy.value,
        0 if unit.backward_prefetch is None else unit.backward_prefetch.value,
        unit.forward_prefetch,
        unit.has_params,
        unit.is_trainable,
        unit.is_segment,
    )
