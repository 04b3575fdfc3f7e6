"""Replay of a simulated step with contention between its kernels, copies and collectives.

In the timeline every span takes as long as it does alone. The replay launches the same spans from the same
host, in the same order and behind the same events, and lets them share the device:

- Kernels share the multiprocessors. A memory-bound kernel occupies a fraction of them equal to its fraction
  of the bandwidth, although it computes nothing.
- A collective occupies its multiprocessors as long as it runs. Compute-bound kernels get the rest.
- All running spans share the memory bandwidth.

If spans need more of a resource than there is, all of them slow down by the same factor. A span takes as long as in
the timeline if its neighbours leave enough of every resource for it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, replace

from benchmarks.timeline.measure import COMMUNICATION, COMPUTE, HOST_WAITS, Span, Step

LEAST_SHARE = 0.1  # fraction of the multiprocessors left to kernels, however many collectives run


@dataclass
class Running:
    """A running span and its remaining work."""

    span: Span
    begin: float
    since: float  # time at which the rate was set
    rate: float  # 1.0: as fast as alone
    left: float  # us of work at rate 1.0, left at ``since``
    asked: float
    ready: float
    before: float
    cause: int

    @property
    def end(self) -> float:
        return self.since + self.left / self.rate

    def go_on_at(self, rate: float, now: float) -> None:
        if rate != self.rate:
            self.left -= (now - self.since) * self.rate
            self.since, self.rate = now, rate

    def as_span(self) -> Span:
        times = {"begin": self.begin, "end": self.end, "asked": self.asked, "ready": self.ready}
        return replace(self.span, before=self.before, cause=self.cause, **times)


def rates_of(running: list[Span]) -> list[float]:
    """Return each span's rate when all of them run at once; 1.0 is the rate of a span alone."""
    kept = sum(span.multiprocessors for span in running if span.kind in COMMUNICATION)
    wanted = sum(span.multiprocessors or span.memory for span in running if span.kind == COMPUTE)
    of_kernel = 1.0 / max(1.0, wanted)
    of_product = min(1.0, max(1.0 - kept, LEAST_SHARE) / wanted) if wanted else 1.0
    memory = 1.0 / max(1.0, sum(span.memory for span in running))
    rates = []
    for span in running:
        rate = memory if span.memory else 1.0
        if span.kind == COMPUTE:
            rate = min(rate, of_product if span.multiprocessors else of_kernel)
        rates.append(rate)
    return rates


class Replay:
    """One step. The host repeats its launches and waits; the work between them takes the same time."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.now = step.begin
        self.host = iter(step.spans)
        self.host_was_at = step.begin  # time on the timeline
        self.host_time = step.begin
        self.next: Span | None = None  # next launch or wait of the host
        self.unfinished = {span.serial for span in step.spans if span.kind != HOST_WAITS}
        self.ends: dict[int, float] = {}  # end of each finished span, by serial
        # launched spans and their launch times, by stream
        self.queues: dict[int, deque[tuple[Span, float]]] = defaultdict(deque)
        self.last_end: dict[int, float] = defaultdict(float)  # end of the last work by stream
        self.running: list[Running] = []
        self.spans: list[Span] = []

    def run(self) -> Step:
        self._advance_host()
        while self.next or self.running:
            first = min(self.running, key=lambda each: each.end, default=None)
            host_at = self.host_time if self._host_can_go_on() else math.inf
            if first and first.end <= host_at:
                self.now = first.end
                self._finish(first)
            else:
                self.now = max(self.now, host_at)
                self._host_goes_on()
            self._start_what_can()
        rest = self.step.end - self.host_was_at
        return Step(self.step.begin, self.host_time + rest, sorted(self.spans, key=lambda span: span.serial))

    # ---- the host

    def _advance_host(self) -> None:
        """Advance the host to its next launch or wait."""
        self.next = next(self.host, None)
        if self.next:
            self.host_time += max(0.0, self.next.asked - self.host_was_at)
            self.host_was_at = self.next.end if self.next.kind == HOST_WAITS else self.next.asked

    def _host_can_go_on(self) -> bool:
        return self.next is not None and (self.next.kind != HOST_WAITS or self._is_over(self.next))

    def _host_goes_on(self) -> None:
        assert self.next
        if self.next.kind == HOST_WAITS:
            begin = self.host_time
            self.host_time = max([begin, *(self.ends.get(each, begin) for each in self.next.after)])
            times = {"asked": begin, "ready": begin, "before": begin}
            self.spans.append(replace(self.next, begin=begin, end=self.host_time, **times))
        else:
            self.queues[self.next.stream].append((self.next, self.host_time))
        self._advance_host()

    # ---- the device

    def _is_over(self, span: Span) -> bool:
        return not any(each in self.unfinished for each in span.after)

    def _start_what_can(self) -> None:
        busy = {each.span.stream for each in self.running}
        started = False
        for stream, queue in self.queues.items():
            if queue and stream not in busy and self._is_over(queue[0][0]):
                span, asked = queue.popleft()
                before = self.last_end[stream]
                last = max(span.after, key=lambda each: self.ends.get(each, 0.0), default=-1)
                ready = max(before, self.ends.get(last, 0.0))
                cause = last if ready > before else -1
                length = span.end - span.begin
                self.running.append(
                    Running(span, self.now, self.now, 1.0, length, asked, ready, before, cause)
                )
                started = True
        if started:
            self._set_rates()

    def _finish(self, which: Running) -> None:
        self.running.remove(which)
        self.unfinished.remove(which.span.serial)
        self.ends[which.span.serial] = self.last_end[which.span.stream] = self.now
        self.spans.append(which.as_span())
        self._set_rates()

    def _set_rates(self) -> None:
        for each, rate in zip(self.running, rates_of([each.span for each in self.running]), strict=True):
            each.go_on_at(rate, self.now)


def contended(step: Step) -> Step:
    """Return the step with the times of its spans on a shared device."""
    return Replay(step).run()


def alone(step: Step) -> Step:
    """Return the step simulated without contention. Its times are those of the timeline."""
    spans = [replace(span, memory=0.0, multiprocessors=0.0) for span in step.spans]
    return contended(Step(step.begin, step.end, spans))
