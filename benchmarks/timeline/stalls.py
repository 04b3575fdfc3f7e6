"""Analysis of a step of the timeline: stalls by cause, traces and pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timeline.measure import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    GATHER,
    HOST,
    HOST_WAITS,
    OTHER_COLLECTIVE,
    SCATTER,
    Span,
    Step,
    busy,
    common,
    total,
)

Stall = tuple[float, str, str]  # us, name of the blocked work, name of its cause


class Causes:
    """Causes for which spans waited after their launch."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_serial = {span.serial: span for span in spans}
        self._by_end = {(span.stream, span.end): span for span in spans}

    def of(self, span: Span) -> str:
        """Return the cause of a span. For a kernel of a side stream, follow the causes of that kernel."""
        cause = self._of(span)
        while cause and cause.kind == COMPUTE and cause.stream > 0:
            if cause.begin > cause.ready:
                return "the host"
            cause = self._of(cause)
        return f"{cause.name} on {name_of_row(cause.stream)}" if cause else "an earlier step"

    def _of(self, span: Span) -> Span | None:
        return self._by_serial.get(span.cause) or self._by_end.get((span.stream, span.before))


def longest(sums: dict[tuple[str, str], float], least: float) -> list[Stall]:
    return sorted(((us, *names) for names, us in sums.items() if us >= least), reverse=True)


def stalls(step: Step, least: float = 1.0, without: Sequence[Span] = ()) -> list[Stall]:
    """Return the stalls of the default stream. Time in which the spans of ``without`` ran is excluded."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    host_waits, left_out, causes = busy(step.of(HOST_WAITS)), busy(without), Causes(step.spans)
    for span in step.main:
        free_from = max(span.before, step.begin)
        if span.ready > free_from:
            held = [(free_from, span.ready)]
            sums[span.name, causes.of(span)] += total(held) - total(common(held, left_out))
        late = [(max(span.ready, free_from), span.begin)] if span.begin > max(span.ready, free_from) else []
        waiting = total(common(late, host_waits))
        sums[span.name, "the host, which waits for the device"] += waiting
        sums[span.name, "the host"] += total(late) - waiting
    sums["the end", "side streams"] = step.end - max((span.end for span in step.main), default=step.begin)
    return longest(sums, least)


def wire_stalls(step: Step, least: float = 1.0) -> list[Stall]:
    """Return the times without any collective between the first and the last one."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    causes, ordered = Causes(step.spans), sorted(step.of(*COMMUNICATION), key=lambda span: span.begin)
    end = ordered[0].begin if ordered else step.begin
    for span in ordered:
        ready = min(span.ready, span.begin)
        if ready > end:
            sums[span.name, causes.of(span)] += ready - end
        if span.begin > max(ready, end):
            sums[span.name, "the host"] += span.begin - max(ready, end)
        end = max(end, span.end)
    return longest(sums, least)


def trace(step: Step, path: str | Path) -> None:
    """Write a trace for https://ui.perfetto.dev or chrome://tracing."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name_of_row(row)}}
        for row in sorted({span.stream for span in step.spans})
    ]
    for span in step.spans:
        arguments = {
            "asked": span.asked - step.begin,
            "ready": span.ready - step.begin,
            "waited for": span.cause,
        }
        place = {
            "pid": 0,
            "tid": span.stream,
            "ts": span.begin - step.begin,
            "dur": span.end - span.begin,
        }
        events.append({"ph": "X", "name": span.name, **place, "args": {"serial": span.serial, **arguments}})
    Path(path).write_text(json.dumps({"traceEvents": events}))


def name_of_row(row: int) -> str:
    return "host waits" if row == HOST else "compute" if row == 0 else f"stream {row}"


def picture(steps: dict[str, Step], path: str | Path, since: float = 0.0, until: float | None = None) -> None:
    """Draw the streams of each step, aligned at the begin of the steps, one step above the other. Needs
    matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {
        COMPUTE: "#4c72b0",
        COPY: "#8c8c8c",
        GATHER: "#55a868",
        SCATTER: "#c44e52",
        OTHER_COLLECTIVE: "#8172b2",
    }
    names = {COMPUTE: "kernel", GATHER: "all-gather", SCATTER: "reduce-scatter", HOST_WAITS: "the host waits"}
    all_rows = {
        name: sorted({span.stream for span in one.spans}, reverse=True) for name, one in steps.items()
    }
    heights = [len(rows) + 1 for rows in all_rows.values()]
    figure, axes = pyplot.subplots(
        len(steps), squeeze=False, figsize=(14, 0.32 * sum(heights) + 0.8), height_ratios=heights, sharex=True
    )
    for (name, one), axis in zip(steps.items(), axes[:, 0], strict=True):
        rows = all_rows[name]
        for kind in sorted({span.kind for span in one.spans}):
            for row in rows:
                bars = [(s.begin - one.begin, s.end - s.begin) for s in one.of(kind) if s.stream == row]
                bars = [(begin / 1e3, length / 1e3) for begin, length in bars]
                axis.broken_barh(
                    bars, (rows.index(row) - 0.4, 0.8), facecolors=colours.get(kind, "#dddd55"), lw=0
                )
        axis.set_yticks(range(len(rows)), [name_of_row(row) for row in rows], fontsize=7)
        axis.set_title(f"{name}: {one.time / 1e3:.1f} ms", fontsize=9, loc="left")
        axis.axvline(one.time / 1e3, color="black", lw=0.8)
    axes[0, 0].legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=colours.get(kind, "#dddd55")) for kind in names],
        labels=list(names.values()), loc="upper right", fontsize=7, ncols=4,
    )  # fmt: skip
    last = max(one.time for one in steps.values()) if until is None else until
    axes[-1, 0].set_xlim(since / 1e3, last / 1e3)
    axes[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
