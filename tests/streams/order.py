"""Is every pair of accesses to one piece of memory ordered? A recorded step replayed as a happens-before graph.

A trace is what a step enqueued, in the order in which the host did:

    ("read" | "write", stream, block, what)   work on memory
    ("alloc", stream, block, what)            memory taken from the stream's pool: from then on it is another block
    ("free", block)                           memory given back to the pool of the stream that took it
    ("record", stream, event), ("wait", stream, event), ("synchronize", event)

A stream runs its own work in order. A wait puts what it enqueues next after everything that the event's stream had
enqueued, or waited for, when the event was recorded. The host waits by synchronize alone. Its work on its own memory
is work on the stream HOST; whatever is enqueued later comes after it.

Memory is reused as by torch's caching allocator: a freed block may be handed out again on the stream that took it (that
of the first access, if that was not told), at once. So all accesses must come before the next allocation there; on
COMPUTE, where the script may allocate at any time, before the free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST, COMPUTE, PRE_UNSHARD, UNSHARD, POST_BACKWARD, ALL_REDUCE = range(-1, 5)
STREAMS = {
    HOST: "host",
    COMPUTE: "compute",
    PRE_UNSHARD: "pre-unshard",
    UNSHARD: "unshard",
    POST_BACKWARD: "post-backward",
    ALL_REDUCE: "all-reduce",
}

Entry = tuple[Any, ...]
Clock = dict[int, int]  # stream -> how much of its work comes before


@dataclass
class Block:
    """One piece of memory between an allocation and its end."""

    owner: int
    name: str
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)  # stream -> its last: (place on it, what it was)
    writes: dict[int, tuple[int, str]] = field(default_factory=dict)


def unordered(trace: Iterable[Entry]) -> list[str]:
    """A sentence for each pair of accesses that nothing orders, and for each wait for an event never recorded."""
    return list(_Replay().run(trace))


def waits(trace: Sequence[Entry], kinds: Sequence[str] = ("wait",)) -> list[int]:
    """The places of the waits in a trace."""
    return [place for place, entry in enumerate(trace) if entry[0] in kinds]


def without(trace: Sequence[Entry], place: int) -> list[Entry]:
    """The trace of a runtime that forgets one entry."""
    return [*trace[:place], *trace[place + 1 :]]


def is_implied(trace: Sequence[Entry], place: int) -> bool:
    """Whether a stream knows the same without one of its waits when it next does or records something."""
    with_it, without_it, stream = _Replay(), _Replay(), trace[place][1]
    for index, entry in enumerate(trace):
        if index > place and entry[0] in ("read", "write", "alloc", "record") and entry[1] == stream:
            break
        list(with_it.run([entry]))
        if index != place:
            list(without_it.run([entry]))
    return with_it.clocks[stream] == without_it.clocks[stream]


def lags(trace: Iterable[Entry], stream: int, beside: int) -> Iterator[int]:
    """For each access on a stream: how much of another stream's work, enqueued before it, it need not wait for."""
    replay = _Replay()
    for entry in trace:
        list(replay.run([entry]))
        if entry[0] in ("read", "write") and entry[1] == stream:
            yield replay.clocks[beside][beside] - replay.clocks[stream][beside]


class _Replay:
    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self.events: dict[int, Clock] = {}
        self.blocks: dict[int, Block] = {}
        self.freed: dict[int, list[Block]] = defaultdict(list)  # by the stream in whose pool they are

    def run(self, trace: Iterable[Entry]) -> Iterator[str]:
        for entry in trace:
            yield from getattr(self, "on_" + entry[0])(*entry[1:])

    # ---- clocks

    def _advance(self, stream: int) -> int:
        """One more piece of work on a stream; what the host knows and did comes before it."""
        clock = self.clocks[stream]
        if stream != HOST:
            _join(clock, self.clocks[HOST])
        clock[stream] += 1
        return clock[stream]

    def on_record(self, stream: int, event: int) -> Iterator[str]:
        self._advance(stream)
        self.events[event] = dict(self.clocks[stream])
        return iter(())

    def on_wait(self, stream: int, event: int) -> Iterator[str]:
        if event not in self.events:
            yield f"{STREAMS[stream]} waits for event {event}, which was never recorded"
            return
        _join(self.clocks[stream], self.events[event])

    def on_synchronize(self, event: int) -> Iterator[str]:
        return self.on_wait(HOST, event)

    # ---- memory

    def on_alloc(self, stream: int, block: int, what: str) -> Iterator[str]:
        place = self._advance(stream)
        for old in self.freed.pop(stream, []):
            yield from self._late(old, stream, f"the memory is taken again by {what}")
        self.blocks[block] = Block(stream, what)
        self.blocks[block].writes[stream] = (place, f"allocation of {what}")

    def on_free(self, block: int) -> Iterator[str]:
        freed = self.blocks.pop(block, None)
        if freed is None:
            return
        if freed.owner in (COMPUTE, HOST):
            yield from self._late(freed, freed.owner, "the memory is given back")
        else:
            self.freed[freed.owner].append(freed)

    def on_read(self, stream: int, block: int, what: str) -> Iterator[str]:
        known = self.blocks.setdefault(block, Block(stream, what))
        place = self._advance(stream)
        yield from self._against(known.writes, known, stream, f"read by {what}")
        known.reads[stream] = (place, what)

    def on_write(self, stream: int, block: int, what: str) -> Iterator[str]:
        known = self.blocks.setdefault(block, Block(stream, what))
        place = self._advance(stream)
        yield from self._against(known.writes, known, stream, f"written by {what}")
        yield from self._against(known.reads, known, stream, f"written by {what}")
        known.writes[stream] = (place, what)

    def _late(self, block: Block, stream: int, what: str) -> Iterator[str]:
        self._advance(stream)
        yield from self._against(block.writes, block, stream, what)
        yield from self._against(block.reads, block, stream, what)

    def _against(self, accesses: dict[int, tuple[int, str]], block: Block, stream: int, what: str) -> Iterator[str]:
        clock, here = self.clocks[stream], f"{block.name}: {what} on {STREAMS[stream]}"
        for other, (place, earlier) in accesses.items():
            if clock[other] < place:
                yield f"{here}, and nothing orders it after {earlier} on {STREAMS[other]}"


def _join(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)
