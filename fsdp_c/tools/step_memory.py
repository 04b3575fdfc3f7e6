"""How much unsharded parameter storage a step holds at once: bytes, summed over what the runtime says.

It takes a dry run of the step (csrc/runtime/dry_run.h, which says what is taken for granted of the model) and
decides there, as in training, what is gathered, held back and freed when. Nothing of that is known here.

What is counted is the storage that all-gathers fill, or casts and uploads where nothing is sharded, and what
is kept of it for a backward that gathers within the node. The former is what a root's own pool holds on a
GPU, until nothing gathered is left in a backward and its last reduction reads memory of the pool. Not
counted: that, the shards, which are there all the time, and activations, gradients, and what the optimizer
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fsdp_c import _C
from fsdp_c.tools import allocator
from fsdp_c.tools.unit_summary import UnitSummary

Event = tuple[int, int, int]  # a constant of _C, the unit, and bytes
STEP = (True,)  # whether gradients are reduced
ACCUMULATION = (False, False, True)  # two backwards under no_sync() before one that reduces
BEFORE = (True,)  # in the first step there is no order of units yet
# nor, if the second takes more memory, all the segments that later ones find
BEFORE_ACCUMULATION = (True, True)


class StepMemory(NamedTuple):
    """What a step holds and does: the most bytes at once, and how often each unit is gathered."""

    peak_nbytes: int  # of tensors
    peak_allocated_nbytes: int  # of the blocks that a GPU's allocator gives for them
    gathers: tuple[int, ...]  # over all ranks
    node_gathers: tuple[int, ...]


def of_step(units: Sequence[UnitSummary]) -> StepMemory:
    """What a step of ``units`` does, an outer one before its inner ones."""
    return _of_steps(units, BEFORE, STEP)


def of_accumulation(units: Sequence[UnitSummary]) -> StepMemory:
    """What three steps do that accumulate gradients, after others."""
    return _of_steps(units, BEFORE_ACCUMULATION, ACCUMULATION)


def _of_steps(units: Sequence[UnitSummary], before: Sequence[bool], measured: Sequence[bool]) -> StepMemory:
    """Whether gradients are reduced, for each of the steps that are measured, and of those before."""
    storage = _Storage(units)
    for step, events in enumerate(_steps(units, [*before, *measured])):
        if step == len(before):
            storage.begin_to_measure()
        for event in events:
            storage.follow(*event)
    gathers = tuple(storage.gathers), tuple(storage.node_gathers)
    return StepMemory(storage.peak_nbytes, storage.peak_allocated_nbytes, *gathers)


class _Storage:
    """The bytes that units hold."""

    def __init__(self, units: Sequence[UnitSummary]) -> None:
        self._pools: dict[int, allocator.Pool | None] = {}
        for root, *inner in _trees(units):
            pool = allocator.Pool() if _has_streams(units[root]) else None
            self._pools |= dict.fromkeys([root, *inner], pool)
        self._held: dict[int, allocator.Block] = {}
        self._nbytes = self._allocated_nbytes = 0
        self._num_units = len(units)
        self.begin_to_measure()

    def begin_to_measure(self) -> None:
        self.peak_nbytes, self.peak_allocated_nbytes = self._nbytes, self._allocated_nbytes
        self.gathers, self.node_gathers = [0] * self._num_units, [0] * self._num_units

    def follow(self, kind: int, index: int, nbytes: int) -> None:
        if kind == _C.DRY_RUN_GATHER:
            self.gathers[index] += 1
        elif kind == _C.DRY_RUN_TAKE:
            self._take(index, nbytes)
        elif kind == _C.DRY_RUN_GIVE_BACK:
            self._give_back(index, nbytes)
        elif kind == _C.DRY_RUN_GATHER_IN_NODE:
            self.node_gathers[index] += 1
        elif kind == _C.DRY_RUN_KEEP:
            self._count(nbytes, self._kept_nbytes(index, nbytes))
        elif kind == _C.DRY_RUN_FORGET:
            self._count(-nbytes, -self._kept_nbytes(index, nbytes))
        elif pool := self._pools[index]:
            pool.give_back(pool.take(nbytes))

    def _take(self, index: int, nbytes: int) -> None:
        pool = self._pools[index]
        block = self._held[index] = allocator.Block(nbytes, 0, False) if pool is None else pool.take(nbytes)
        self._count(nbytes, block.nbytes)

    def _kept_nbytes(self, index: int, nbytes: int) -> int:
        """Memory of nobody's pool: what it takes beyond its rounded size depends on what else is there."""
        return nbytes if self._pools[index] is None else allocator.rounded(nbytes)

    def _count(self, nbytes: int, allocated_nbytes: int) -> None:
        self._nbytes += nbytes
        self._allocated_nbytes += allocated_nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
        self.peak_allocated_nbytes = max(self.peak_allocated_nbytes, self._allocated_nbytes)

    def _give_back(self, index: int, nbytes: int) -> None:
        pool, block = self._pools[index], self._held.pop(index)
        self._count(-nbytes, -block.nbytes)
        if pool is not None:
            pool.give_back(block)


def _steps(units: Sequence[UnitSummary], sync_gradients: Sequence[bool]) -> Iterator[Iterator[Event]]:
    """What each step does; the first one begins with what is reserved."""
    runs, requires_grad = [], False
    for tree in _trees(units):
        runs.append(_dry_run(units, tree, sync_gradients, requires_grad))
        requires_grad = requires_grad or any(units[index].is_trainable for index in tree)
    for step in range(len(sync_gradients)):
        yield _events(
            [run[0] if step == 0 else [] for run in runs], [run[1 + 3 * step :][:3] for run in runs]
        )


def _events(reserved: list[list[Event]], of_trees: list[list[list[Event]]]) -> Iterator[Event]:
    """Trees follow each other in forward, and the other way round in backward."""
    for before, (forward, _, _) in zip(reserved, of_trees, strict=True):
        yield from before
        yield from forward
    for _, backward, _ in reversed(of_trees):
        yield from backward
    for _, _, end in reversed(of_trees):
        yield from end


def _trees(units: Sequence[UnitSummary]) -> list[list[int]]:
    """The units of each root, and that first."""
    trees: list[list[int]] = []
    tree_of: list[list[int]] = []
    for index, unit in enumerate(units):
        if unit.parent is None:
            trees.append([])
        tree_of.append(trees[-1] if unit.parent is None else tree_of[unit.parent])
        tree_of[index].append(index)
    return trees


def _dry_run(
    units: Sequence[UnitSummary], tree: list[int], sync_gradients: Sequence[bool], inputs_require_grad: bool
) -> list[list[Event]]:
    root, places = units[tree[0]], {index: place for place, index in enumerate(tree)}
    with torch.enable_grad():  # as in a step, whatever holds where somebody asks
        lists = _C.dry_run(
            tuple(
                (
                    -1 if unit.parent is None else places[unit.parent],
                    unit.unsharded_nbytes,
                    unit.sharding_strategy.value,
                    0 if unit.backward_prefetch is None else unit.backward_prefetch.value,
                    unit.forward_prefetch,
                    unit.dtype is not None,
                    unit.is_trainable,
                    unit.is_segment,
                    unit.is_optional,
                    unit.reduce_scatter_nbytes,
                    unit.node_nbytes,
                )
                for unit in map(units.__getitem__, tree)
            ),
            tuple(sync_gradients),
            backward_prefetch_limit=root.backward_prefetch_limit,
            forward_prefetch_limit=root.forward_prefetch_limit,
            has_streams=_has_streams(root),
            inputs_require_grad=inputs_require_grad,
        )
    return [[(kind, tree[place], nbytes) for kind, place, nbytes in events] for events in lists]


def _has_streams(root: UnitSummary) -> bool:
    return root.device_type == "cuda"
