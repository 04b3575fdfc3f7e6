"""Time and memory of a step on the simulated GPU, by the model of time in device/timeline.h.

``with step() as taken:`` measures from the host's time at the begin until all streams are idle. The process
needs SIMULATED_GPU_TIMELINE=1 or SIMULATED_GPU_SHAPES=1, which ``environment()`` sets. All times are in
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
HOST = -1  # stands for the host where a stream is expected
Interval = tuple[float, float]


def environment(memory_gib: float = 80) -> dict[str, str]:
    """Return the environment variables of a process that computes nothing and represents all ranks on one
    device.
    """
    return simulated_gpu.environment(1) | {
        "SIMULATED_GPU_SHAPES": "1",
        "SIMULATED_GPU_RACES": "0",
        "SIMULATED_GPU_FREES": "0",
        "SIMULATED_GPU_MEMORY": str(int(memory_gib * 2**30)),
    }


def native() -> Any:
    """Return the device's library as a Python module."""
    import simulated_gpu as of_process

    return of_process.library()


def set_costs(**costs: float) -> None:
    """Set fields of ``machine_costs`` in device/timeline.h by name."""
    for name, value in costs.items():
        native().set_cost(name, value)


def host_is_free() -> None:
    """Set the host's costs to zero. The remaining time is due to the schedule only."""
    set_costs(**dict.fromkeys(HOST_COSTS, 0.0))


def set_wire(
    between_nodes: bool,
    us_by_nbytes: Sequence[tuple[float, float]],
    ranks: int = 0,
    multiprocessors: float = 0.0,
) -> None:
    """Set the time of an all-gather as a table by the output's bytes, linear between the given sizes. The
    table is for groups of ``ranks`` ranks; with 0, for all groups without their own table. Collectives occupy
    the given fraction of the ``multiprocessors``.
    """
    native().set_wire(between_nodes, us_by_nbytes, ranks, multiprocessors)


@dataclass
class Span:
    """A kernel, a copy, a collective, or a wait of the host."""

    begin: float
    end: float
    asked: float  # host time of the launch
    ready: float  # time at which the stream's waits are over
    before: float  # end of the previous work on the stream
    serial: int
    cause: int  # span that delayed this one, if it ended after the stream's previous work; -1 otherwise
    stream: int  # 0: the default stream
    kind: int
    name: str
    after: Sequence[int] = ()  # spans on other streams that must end before this one
    memory: float = 0.0  # fraction of the memory bandwidth used when alone
    multiprocessors: float = 0.0  # fraction used; a collective's are not available to other spans


# ---- intervals


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same time."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint intervals."""
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
    """The spans between two times at which the device was idle."""

    begin: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def of(self, *kinds: int) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    @property
    def main(self) -> list[Span]:
        """Return the spans of the default stream, collectives included."""
        return [span for span in self.spans if span.stream == 0]

    @property
    def time(self) -> float:
        return self.end - self.begin

    @property
    def compute(self) -> float:
        """Return the time in which the default stream computes."""
        return total(busy([span for span in self.main if span.kind == COMPUTE]))

    @property
    def communication(self) -> float:
        return total(busy(self.of(*COMMUNICATION)))

    @property
    def idle(self) -> list[Interval]:
        """Return the intervals in which the default stream neither computes nor copies."""
        gaps, at = [], self.begin
        for begin, end in busy([span for span in self.main if span.kind not in COMMUNICATION]):
            gaps.append((at, begin))
            at = end
        return [gap for gap in [*gaps, (at, self.end)] if gap[1] - gap[0] > 1e-6]

    @property
    def exposed(self) -> float:
        """Return the time in which the default stream is idle and a collective runs."""
        return total(common(self.idle, busy(self.of(*COMMUNICATION))))

    @property
    def host_bound(self) -> float:
        """Return the time in which the default stream is ready but idle, because the host, which is not
        waiting itself, launches late.
        """
        late = union([(max(s.ready, s.before, self.begin), s.begin) for s in self.main])
        return total(late) - total(common(late, busy(self.of(HOST_WAITS))))


# ---- memory


@dataclass(frozen=True)
class Block:
    """A block of memory in use, or a reserved segment."""

    nbytes: int
    stream: int  # stream of the allocation; 0: the default stream
    in_pool: bool


@dataclass
class Memory:
    """Changes of the device's memory in a period of time."""

    # (address, block, True if allocated or False if freed)
    changes: list[tuple[int, Block, bool]] = field(default_factory=list)
    # segments reserved at the end, by address
    segments: dict[int, Block] = field(default_factory=dict)

    @property
    def in_use(self) -> Counter[Block]:
        """Count the blocks in use at the end."""
        return Counter(self._follow()[0].values())

    @property
    def at_peak(self) -> Counter[Block]:
        return Counter(self._follow()[1].values())

    @property
    def idle_at_peak(self) -> Counter[Block]:
        """Count the idle bytes at the peak, per segment that is reserved at the end."""
        starts = sorted(self.segments)
        idle = {start: segment.nbytes for start, segment in self.segments.items()}
        for address, block in self._follow()[1].items():
            idle[starts[bisect_right(starts, address) - 1]] -= block.nbytes
        return Counter(
            replace(self.segments[start], nbytes=nbytes) for start, nbytes in idle.items() if nbytes
        )

    def _follow(self) -> tuple[dict[int, Block], dict[int, Block]]:
        """Return the blocks in use at the end and at the peak, by address."""
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
    """Log memory in the body. The yielded Memory is filled at the end."""
    native().log_memory()
    taken = Memory()
    yield taken
    for address, nbytes, stream, in_pool in native().take_memory_log():
        taken.changes.append((address, Block(abs(nbytes), stream, in_pool), nbytes > 0))
    for address, nbytes, stream, in_pool in native().reserved_segments():
        taken.segments[address] = Block(nbytes, stream, in_pool)


@contextmanager
def step() -> Iterator[Step]:
    """Measure the body. The yielded Step is filled at the end."""
    import torch

    torch.cuda.synchronize()
    native().take_spans()
    taken = Step(native().host_time())
    yield taken
    torch.cuda.synchronize()
    taken.end = native().host_time()
    taken.spans = [Span(*each) for each in native().take_spans()]
