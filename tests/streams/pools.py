"""What a step takes from the device: a trace replayed on an allocator that keeps what is freed, as torch's does.

Each stream has memory of its own, and the parameters of the units a pool apart. A piece that is freed joins its free
neighbours, and is handed out again: the smallest that is large enough, the rest of it staying free. What fits into none
is taken from the device, and never goes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.streams.order import Entry
from tests.streams.recorder import OURS, UNSHARDED

Pool = tuple[int, bool]  # the stream, and whether it is the pool of unsharded parameters


class Piece(NamedTuple):
    """Bytes [start, end) of what was taken at once."""

    segment: int
    start: int
    end: int


class Taken(NamedTuple):
    """Memory that came from the device, and by which entry of the trace."""

    place: int
    what: str
    nbytes: int


def taken(trace: Sequence[Entry], nbytes: Mapping[int, int]) -> Iterator[Taken]:
    """What the runtime's own allocations take from the device; ``nbytes`` gives the size of each block."""
    free: dict[Pool, list[Piece]] = defaultdict(list)
    used: dict[int, tuple[Pool, Piece]] = {}
    for place, entry in enumerate(trace):
        if entry[0] == "alloc" and entry[3] in OURS and nbytes[entry[2]]:
            _, stream, block, what = entry
            pool = (stream, what == UNSHARDED)
            piece = _take(free[pool], nbytes[block])
            if piece is None:
                piece = Piece(place, 0, nbytes[block])
                yield Taken(place, what, nbytes[block])
            used[block] = pool, piece
        elif entry[0] == "free" and entry[1] in used:
            pool, piece = used.pop(entry[1])
            _give_back(free[pool], piece)


def _take(free: list[Piece], nbytes: int) -> Piece | None:
    fitting = [piece for piece in free if piece.end - piece.start >= nbytes]
    if not fitting:
        return None
    smallest = min(fitting, key=lambda piece: piece.end - piece.start)
    free.remove(smallest)
    middle = smallest.start + nbytes
    if middle < smallest.end:
        free.append(smallest._replace(start=middle))
    return smallest._replace(end=middle)


def _give_back(free: list[Piece], piece: Piece) -> None:
    for neighbour in [other for other in free if other.segment == piece.segment]:
        if piece.start in (neighbour.start, neighbour.end) or piece.end == neighbour.start:
            free.remove(neighbour)
            piece = Piece(piece.segment, min(piece.start, neighbour.start), max(piece.end, neighbour.end))
    free.append(piece)
