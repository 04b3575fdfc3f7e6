"""What the order of recorded steps is worth: each scenario replayed whole, and with each of its waits dropped in turn.

python -m tests.streams.report [--markdown FILE] [--only WORD ...]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from tests import ranks
from tests.streams.order import STREAMS, is_implied, unordered, waits, without
from tests.streams.scenarios import HYBRID_SCENARIOS, SCENARIOS, record, record_hybrid

HYBRID = "HYBRID_SHARD"
TIMEOUT_S = 900.0
EXPLAINED = """\
Steps of CPU ranks that pretend to have streams, recorded and replayed as a happens-before graph. 'accesses' are reads,
writes and allocations; 'unordered' pairs of accesses to one piece of memory that nothing orders. Then each wait of a
stream is dropped from the trace in turn: 'reported' is how often the replay finds an unordered pair then; 'implied' are
waits whose stream does nothing before it knows the same from another one; 'spare' the rest, which order what this
scenario does not do, or what the host has waited for. 'host' are the host's own waits: the limiter's and offload's.
"""


class Line(NamedTuple):
    """One scenario on rank 0."""

    scenario: str
    ranks: int
    streams: str
    entries: int
    accesses: int
    unordered: int
    waits: int
    reported: int
    implied: int
    spare: int
    host: int


def look(rank: int, world_size: int, name: str) -> Line | None:
    """Run on the ranks; rank 0 replays."""
    trace = (record_hybrid(rank, name, HYBRID) if world_size == 4 else record(rank, name)).trace
    if rank:
        return None
    places = waits(trace)
    reported = {place for place in places if unordered(without(trace, place))}
    implied = {place for place in places if place not in reported and is_implied(trace, place)}
    accesses = [entry for entry in trace if entry[0] in ("read", "write", "alloc")]
    used = {entry[1] for entry in accesses}
    return Line(
        f"{HYBRID}, {name}" if world_size == 4 else name,
        world_size,
        ", ".join(text for stream, text in STREAMS.items() if stream in used),
        len(trace),
        len(accesses),
        len(unordered(trace)),
        len(places),
        len(reported),
        len(implied),
        len(places) - len(reported) - len(implied),
        len(waits(trace, ["synchronize"])),
    )


def lines(only: list[str]) -> Iterator[Line]:
    for world_size, names in ((2, SCENARIOS), (4, HYBRID_SCENARIOS)):
        for name in names:
            if all(word in name for word in only):
                yield ranks.pool(world_size).run(__name__, look.__name__, {"name": name}, TIMEOUT_S)[0]


def markdown(found: list[Line]) -> str:
    heads = list(Line._fields)
    rows = [heads, ["---"] + ["---:" if head not in ("streams",) else "---" for head in heads[1:]], *found]
    text = [f"# The order of steps, {time.strftime('%Y-%m-%d')}", "", EXPLAINED]
    text += [f"torch {torch.__version__}, CPython {platform.python_version()}", ""]
    return "\n".join(text + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that the scenario's name has")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    print(EXPLAINED)
    found: list[Line] = []
    try:
        for line in lines(args.only):
            found.append(line)
            counts = ", ".join(f"{field} {value}" for field, value in zip(Line._fields[3:], line[3:], strict=True))
            print(f"{line.scenario} ({line.ranks} ranks): {counts}", flush=True)
    finally:
        ranks.close_pools()
    if args.markdown:
        args.markdown.write_text(markdown(found))
    raise SystemExit(any(line.unordered for line in found))


if __name__ == "__main__":
    main()
