"""What a step took on the simulated GPU, by the model of time in device/timeline.h, and where the time went.

``with step() as taken:`` measures from the host's time at the begin to when all streams are through. It takes
a process with SIMULATED_GPU_TIMELINE=1 or SIMULATED_GPU_SHAPES=1: ``environment()``. All times are in
microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests import simulated_gpu

COMPUTE, COPY, GATHER, SCATTER, OTHER_COLLECTIVE, HOST_WAITS = range(6)
COMMUNICATION = (GATHER, SCATTER, OTHER_COLLECTIVE)
HOST_COSTS = ("op", "view", "launch", "collective", "event", "segment", "unit")
HOST = -1  # in the place of a stream
Interval = tuple[float, float]


def environment(memory_gib: float = 80) -> dict[str, str]:
    """What to add to the environment of a process that computes nothing and stands for all ranks on one
    device."""
    return simulated_gpu.environment(1) | {
        "SIMULATED_GPU_SHAPES": "1",
        "SIMULATED_GPU_RACES": "0",
        "SIMULATED_GPU_FREES": "0",
        "SIMULATED_GPU_MEMORY": str(int(memory_gib * 2**30)),
    }


def native() -> Any:
    """The device's library, as a module of Python."""
    import simulated_gpu as of_process

    return of_process.library()


def set_costs(**costs: float) -> None:
    """What device/timeline.h has in ``machine_costs``, by name."""
    for name, value in costs.items():
        native().set_cost(name, value)


def host_is_free() -> None:
    """The host costs nothing: what is left is the schedule's own."""
    set_costs(**dict.fromkeys(HOST_COSTS, 0.0))


def set_wire(
    between_nodes: bool,
    us_by_nbytes: Sequence[tuple[float, float]],
    ranks: int = 0,
    multiprocessors: float = 0.0,
) -> None:
    """How long an all-gather takes by the bytes that each rank has in the end; straight between the given
    sizes. For a group of so many ``ranks``, or with 0 for those without a table of their own. Collectives
    occupy that part of the ``multiprocessors``."""
    native().set_wire(between_nodes, us_by_nbytes, ranks, multiprocessors)


@dataclass
class Span:
    """A kernel, a copy, a collective, or a wait of the host."""

    begin: float
    end: float
    asked: float  # the host's time at the launch
    ready: float  # the stream's, with what it waited for
    before: float  # the end of what the stream did before
    serial: int
    cause: int  # the span for which the stream waited, where that was later than its own work; -1
    stream: int  # 0: the default stream
    kind: int
    name: str
    after: Sequence[int] = ()  # what was to be over before, but for what its stream did itself
    memory: float = 0.0  # the part of the memory's bandwidth that it takes while it is alone
    multiprocessors: float = 0.0  # of those that compute; a collective keeps its own from others


# ---- intervals


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time, as intervals that do not touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What is in both, each of which is a union."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def busy(spans: Sequence[Span]) -> list[Interval]:
    return union([(span.begin, span.end) for span in spans])


# ---- a step


@dataclass
class Step:
    """What ran between two times at which the device was through with everything."""

    begin: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def of(self, *kinds: int) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    @property
    def main(self) -> list[Span]:
        """What ran on the default stream, collectives on it included."""
        return [span for span in self.spans if span.stream == 0]

    @property
    def time(self) -> float:
        return self.end - self.begin

    @property
    def compute(self) -> float:
        """The default stream computes."""
        return total(busy([span for span in self.main if span.kind == COMPUTE]))

    @property
    def communication(self) -> float:
        return total(busy(self.of(*COMMUNICATION)))

    @property
    def idle(self) -> list[Interval]:
        """The default stream neither computes nor copies."""
        gaps, at = [], self.begin
        for begin, end in busy([span for span in self.main if span.kind not in COMMUNICATION]):
            gaps.append((at, begin))
            at = end
        return [gap for gap in [*gaps, (at, self.end)] if gap[1] - gap[0] > 1e-6]

    @property
    def exposed(self) -> float:
        """The default stream is idle while a collective runs."""
        return total(common(self.idle, busy(self.of(*COMMUNICATION))))

    @property
    def host_bound(self) -> float:
        """All that the default stream waited for is over, but the host, which waits for nothing, launches
        late."""
        late = union([(max(s.ready, s.before, self.begin), s.begin) for s in self.main])
        return total(late) - total(common(late, busy(self.of(HOST_WAITS))))


# ---- memory


@dataclass(frozen=True)
class Block:
    """Memory in use, or reserved."""

    nbytes: int
    stream: int  # to which it belongs; 0: the default stream
    in_pool: bool


@dataclass
class Memory:
    """What was in use on the device, from one moment to another."""

    # the address, and whether it is taken
    changes: list[tuple[int, Block, bool]] = field(default_factory=list)
    # by their addresses: what is reserved at the end
    segments: dict[int, Block] = field(default_factory=dict)

    @property
    def in_use(self) -> Counter[Block]:
        """At the end."""
        return Counter(self._follow()[0].values())

    @property
    def at_peak(self) -> Counter[Block]:
        return Counter(self._follow()[1].values())

    @property
    def idle_at_peak(self) -> Counter[Block]:
        """What was not in use then of each segment that is there at the end."""
        starts = sorted(self.segments)
        idle = {start: segment.nbytes for start, segment in self.segments.items()}
        for address, block in self._follow()[1].items():
            idle[starts[bisect_right(starts, address) - 1]] -= block.nbytes
        return Counter(
            replace(self.segments[start], nbytes=nbytes) for start, nbytes in idle.items() if nbytes
        )

    def _follow(self) -> tuple[dict[int, Block], dict[int, Block]]:
        """What is used, by address: at the end, and at the peak."""
        used: dict[int, Block] = {}
        nbytes = peak = 0
        at_peak: dict[int, Block] = {}
        for address, block, is_taken in self.changes:
            nbytes += block.nbytes if is_taken else -block.nbytes
            if is_taken:
                used[address] = block
            else:
                del used[address]
            if nbytes > peak:
                peak, at_peak = nbytes, dict(used)
        return used, at_peak


def nbytes_of(blocks: Counter[Block]) -> int:
    return sum(block.nbytes * count for block, count in blocks.items())


@contextmanager
def memory() -> Iterator[Memory]:
    """Yields a Memory, which is filled at the end."""
    native().log_memory()
    taken = Memory()
    yield taken
    for address, nbytes, stream, in_pool in native().take_memory_log():
        taken.changes.append((address, Block(abs(nbytes), stream, in_pool), nbytes > 0))
    for address, nbytes, stream, in_pool in native().reserved_segments():
        taken.segments[address] = Block(nbytes, stream, in_pool)


@contextmanager
def step() -> Iterator[Step]:
    """Yields a Step, which is filled at the end."""
    import torch

    torch.cuda.synchronize()
    native().take_spans()
    taken = Step(native().host_time())
    yield taken
    torch.cuda.synchronize()
    taken.end = native().host_time()
    taken.spans = [Span(*each) for each in native().take_spans()]
