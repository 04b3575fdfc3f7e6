"""How much unsharded parameter storage a training step holds at once: the runtime's own rules, followed on paper.

Assumed is one step as most models run it: each unit once, in the order in which its modules are registered, a backward
through all that was computed, units not recomputed, the input of a frozen unit the output of the unit before it, which
returns what the last unit inside it returned. What is gathered when is decided in csrc/runtime/order.c, unit.c and
backward.c; a unit's post-backward comes after those of the units inside, whose autograd nodes are younger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_c.compat.upstream import BackwardPrefetch


class StepUnit(NamedTuple):
    """One unit, as far as a step's memory depends on it. ``parent``: index of the unit around it, None for a root."""

    parent: int | None
    nbytes: int  # of its unsharded parameters
    has_params: bool
    is_trainable: bool
    stays: bool  # unsharded from forward to backward, root or not
    is_sharded: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    has_streams: bool  # with streams, freed memory is held back until its last use is over


class StepMemory(NamedTuple):
    """What a step holds and does: the most bytes at once, and how often each unit is gathered."""

    peak_nbytes: int
    gathers: tuple[int, ...]


def of_step(units: Sequence[StepUnit]) -> StepMemory:
    """The unsharded storage of a step of ``units``, an outer unit before its inner ones."""
    storage = _Storage(units)
    trees = [_Tree(units, storage, index) for index, unit in enumerate(units) if unit.parent is None]
    for tree in trees:
        tree.forward(tree.root)
        tree.end_forward()
    for tree in reversed(trees):
        tree.backward(tree.root)
        tree.finish()
    return StepMemory(storage.peak, tuple(storage.gathers))


class _Storage:
    """Which units are gathered, and which memory of units that are not is held back."""

    def __init__(self, units: Sequence[StepUnit]) -> None:
        self._units = units
        self._live = 0
        self._gathered: set[int] = set()
        self._held_back: dict[int, int] = {}  # the last unit that was freed, by root
        self.peak = 0
        self.gathers = [0] * len(units)
        self.requires_grad = False  # whether the last unit's output does

    def gather(self, index: int, root: int) -> None:
        if index in self._gathered:
            return
        self._gathered.add(index)
        self.gathers[index] += 1
        if self._held_back.get(root) == index:
            del self._held_back[root]
            return
        self._live += self._units[index].nbytes
        self.peak = max(self.peak, self._live)

    def free(self, index: int, root: int) -> None:
        if index not in self._gathered:
            return
        self._gathered.remove(index)
        if not self._units[index].nbytes:  # nothing was gathered for it
            return
        self.settle(root)
        self._held_back[root] = index
        if not self._units[index].has_streams:
            self.settle(root)

    def settle(self, root: int) -> None:
        """Give back what is held back."""
        if root in self._held_back:
            self._live -= self._units[self._held_back.pop(root)].nbytes


class _Tree:
    """The units of one root, in a step."""

    def __init__(self, units: Sequence[StepUnit], storage: _Storage, root: int) -> None:
        self._units, self._storage, self.root = units, storage, root
        self._children: dict[int, list[int]] = {root: []}
        for index, unit in enumerate(units):
            if unit.parent in self._children:
                self._children[unit.parent].append(index)
                self._children[index] = []
        self._order = [index for index in self._children if units[index].has_params]
        self._following = dict(zip(self._order, self._order[1:], strict=False))
        self._preceding: dict[int, int] = {}  # in the order of post-forwards
        self._last: int | None = None  # that had its post-forward
        self._expected: set[int] = set()  # a backward will want it gathered
        self._has_inputs: set[int] = set()  # that require gradients
        self._passed: list[int] = []  # frozen units whose backward is over, gathered still

    def forward(self, index: int) -> None:
        unit, storage = self._units[index], self._storage
        if unit.has_params:
            self._gather(index)
            self._prefetch_forward(index)
        if storage.requires_grad:
            self._has_inputs.add(index)
        for child in self._children[index]:
            self.forward(child)
        storage.requires_grad |= unit.is_trainable
        if unit.has_params:
            self._end_forward(index)

    def _end_forward(self, index: int) -> None:
        unit = self._units[index]
        if self._last is not None:
            self._preceding[index] = self._last
        self._last = index
        if self._storage.requires_grad:
            self._expected.add(index)
        if not unit.is_sharded or index not in self._expected or not (unit.stays or index == self.root):
            self._free(index)

    def backward(self, index: int) -> None:
        unit = self._units[index]
        if index in self._expected:
            self._gather(index)
            self._expected.remove(index)
            if unit.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                self._prefetch_backward(index)
            if not self._ends_in_unit(index):
                self._free_passed()
        for child in reversed(self._children[index]):
            self.backward(child)
        if unit.has_params:
            self._end_backward(index)

    def _end_backward(self, index: int) -> None:
        """A frozen unit goes when its inputs have gradients: after the pre-backward of the unit that they come from."""
        unit = self._units[index]
        if not unit.is_trainable and (index not in self._has_inputs or self._follows_unit(index)):
            self._passed.append(index)
            return
        self._free(index)
        if unit.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(index)
        self._storage.settle(self.root)

    def _free_passed(self) -> None:
        for index in self._passed:
            if index in self._has_inputs:
                self._free(index)
                self._storage.settle(self.root)

    def _ends_in_unit(self, index: int) -> bool:
        """Whether the next pre-backward presumably belongs to the same output."""
        children = self._children[index]
        return bool(children) and children[-1] in self._expected

    def _follows_unit(self, index: int) -> bool:
        """Whether the unit's input presumably is the output of the unit before it."""
        parent = self._units[index].parent
        return parent is not None and self._children[parent][0] != index

    def end_forward(self) -> None:
        """A root that takes no part in the backward gives back what it holds."""
        if self.root not in self._expected:
            self._storage.settle(self.root)

    def finish(self) -> None:
        for index in self._order:
            self._free(index)
        self._storage.settle(self.root)

    def _gather(self, index: int) -> None:
        self._storage.gather(index, self.root)

    def _free(self, index: int) -> None:
        self._storage.free(index, self.root)

    def _prefetch_forward(self, index: int) -> None:
        if self._units[index].forward_prefetch and index in self._following:
            self._gather(self._following[index])

    def _prefetch_backward(self, index: int) -> None:
        candidate = self._preceding.get(index)
        if candidate is not None and candidate in self._expected:
            self._gather(candidate)
