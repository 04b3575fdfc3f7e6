"""Leaves out each wait of a program in turn and classifies the result."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tests.races.programs import PROGRAMS, Wait, run

Kind = tuple[str, str]  # (waiting stream, awaited stream)

# Programs chosen so that each wait matters in one of them.
CHOSEN = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "two streams",
    "two streams, two forwards",
    "two streams, evaluate",
    "HYBRID_SHARD, no limit, forward prefetch, bf16",
    "HYBRID_SHARD, step in backward",
    "_HYBRID_SHARD_ZERO2, step in backward",
    "offload, gradients read",
    "offload, write after evaluating",
    "offload, no limit, forward prefetch",
    "bf16",
    "write after a refusal",
    "raise in backward",
    "raise in backward, NO_SHARD",
    "evaluate",
    "no limit, forward prefetch, bf16",
    "prefetch after",
    "no prefetch",
    "step in backward",
    "step in backward, state",
    "step in backward, late gradients",
    "memory taken again",
    "accumulate, SHARD_GRAD_OP",
    "replaced",
    "look at parameters, bf16",
    "flat",
    "forward prefetch",
    "offload, NO_SHARD",
]

SHOWN = (
    "the reduced gradients are the sum of no_sync, whose memory .grad exposes: it is freed later than "
    "that of other sums"
)
NOT_WRITTEN = "the step begins without any write or free since the previous one, for instance under no_sync"
IN_PLACE = (
    "an unsharded gradient is reduced in place: no memory is freed, and the last unit's wait would suffice"
)

GIVEN_BACK = (
    "memory allocated under one of the script's streams may have been used and freed under another: all "
    "of them wait for that at the end of a backward, also if none of their memory was"
)
FOLLOWED = (
    "the script's current stream is ordered after its previous one, whether or not it reads that stream's "
    "results"
)
MADE_BEFORE = (
    "the input of the all-gather is cast or uploaded on the pre-unshard stream, which has waited for the "
    "same work: this wait is for shards that are all-gathered without a copy, and for memory"
)
UPLOADED = (
    "uploads begin with the step, as casts of a shard on the device must; the host has waited for the "
    "values that it wrote"
)

PACKED = (
    "gradients are returned to the script's stream once they are packed, also if no memory is allocated "
    "under it again"
)
LAST = (
    "the memory freed last in a backward is written next by the last reduction's input, which is packed "
    "after the computation, or in the next step, whose all-gathers wait for the computation themselves"
)
WRITTEN_BACK = (
    "each unit whose shard was written back waits for the write by itself: the first unit's wait would "
    "suffice"
)

STEPPED = (
    "the gradient of the optimizer step is returned to the compute stream, which allocates no such memory "
    "before the next of these waits"
)

JOINED = (
    "after an exception the computation waits for all enqueued work, also for all-gathers whose "
    "parameters nothing has read"
)

# Reasons for waits that affect the order but whose absence is not detected, by program.
REASONS: dict[str, dict[Kind, str]] = {
    "two streams": {("compute", "compute"): GIVEN_BACK, ("compute", "post-backward"): PACKED},
    "two streams, two forwards": {("compute", "compute"): GIVEN_BACK, ("unshard", "compute"): NOT_WRITTEN},
    "two streams, evaluate": {("compute", "compute"): FOLLOWED, ("unshard", "compute"): NOT_WRITTEN},
    "evaluate": {("unshard", "compute"): NOT_WRITTEN},
    "replaced": {("unshard", "compute"): NOT_WRITTEN},
    "bf16": {("unshard", "compute"): MADE_BEFORE},
    "write after a refusal": {("unshard", "compute"): MADE_BEFORE},
    "no limit, forward prefetch, bf16": {
        ("unshard", "compute"): MADE_BEFORE,
        ("pre-unshard", "compute"): NOT_WRITTEN,
    },
    "HYBRID_SHARD, no limit, forward prefetch, bf16": {
        ("unshard", "compute"): MADE_BEFORE,
        ("pre-unshard", "compute"): NOT_WRITTEN,
    },
    "look at parameters, bf16": {
        ("pre-unshard", "compute"): WRITTEN_BACK,
        ("unshard", "compute"): MADE_BEFORE,
    },
    "raise in backward": {("unshard", "compute"): NOT_WRITTEN, ("compute", "unshard"): JOINED},
    "offload, gradients read": {("pre-unshard", "compute"): UPLOADED, ("unshard", "compute"): MADE_BEFORE},
    "offload, write after evaluating": {
        ("pre-unshard", "compute"): UPLOADED,
        ("unshard", "compute"): MADE_BEFORE,
    },
    "offload, no limit, forward prefetch": {
        ("pre-unshard", "compute"): UPLOADED,
        ("unshard", "compute"): MADE_BEFORE,
    },
    "NO_SHARD": {("compute", "post-backward"): IN_PLACE},
    "raise in backward, NO_SHARD": {("compute", "post-backward"): IN_PLACE},
    "offload, NO_SHARD": {
        ("compute", "post-backward"): IN_PLACE,
        ("pre-unshard", "compute"): UPLOADED,
        ("unshard", "compute"): MADE_BEFORE,
    },
    "HYBRID_SHARD, step in backward": {("compute", "all-reduce"): STEPPED},
    "_HYBRID_SHARD_ZERO2, step in backward": {("compute", "all-reduce"): STEPPED},
    "accumulate, SHARD_GRAD_OP": {("compute", "post-backward"): SHOWN, ("unshard", "compute"): NOT_WRITTEN},
}


LIMITER = "the rate limiter bounds the parameters unsharded at a time; streams are in order without it"


def reasons_of(program: str, waits: Iterable[Wait]) -> dict[Kind, str]:
    limited = PROGRAMS[program][1].get("limit_all_gathers", True)
    reasons = {("host", "compute"): LIMITER} if limited else {}
    if any(
        wait.kind == ("post-backward", "unshard") for wait in waits
    ):  # the last reduction's input is in the pool
        reasons["unshard", "compute"] = LAST
    return reasons | REASONS.get(program, {})


class Found(NamedTuple):
    """The waits of one program, classified by the effect of leaving them out."""

    program: str
    reports: frozenset[str]  # findings with all waits in place
    all_waits: list[Wait]
    waits: list[Wait]  # the waits that were left out
    known: list[Wait]  # the awaited work was already known to be finished
    implied: list[Wait]  # other waits imply the same order of all work and all memory
    caught: list[Wait]
    spare: list[Wait]  # all other waits

    def unexplained(self) -> Counter[Kind]:
        reasons = reasons_of(self.program, self.all_waits)
        return Counter(wait.kind for wait in self.spare if wait.kind not in reasons)


def look(program: str, stride: int = 1) -> Found:
    """Classify the waits of a program inside ``one_of_four``: all, or every ``stride``th from a fixed start."""
    first = zlib.crc32(program.encode()) % stride
    whole = run(program)
    found = Found(program, whole.reports, whole.waits, whole.waits[first::stride], [], [], [], [])
    for nth in range(first, len(whole.waits), stride):
        wait = whole.waits[nth]
        if not wait.orders:
            found.known.append(wait)
            continue
        without = run(program, drop=nth)
        if without.reports - whole.reports:
            found.caught.append(wait)
        elif without.order == whole.order or any(
            run(program, drop=nth).order == run(program).order for _ in range(4)
        ):
            found.implied.append(wait)  # autograd's thread may be late in some runs and change the order
        else:
            found.spare.append(wait)
    return found
