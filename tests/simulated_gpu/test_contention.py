"""What a step takes when its work shares the device, computed by hand; and a real step, which takes the
timeline's time when it shares nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated_gpu.contention import contended
from tests.simulated_gpu.test_timeline import run
from tests.simulated_gpu.timeline import COMPUTE, GATHER, HOST_WAITS, Span, Step

GIVEN = {"ready": 0.0, "before": 0.0, "cause": -1}


def work(serial: int, stream: int, begin: float, us: float, **others: Any) -> Span:
    """As the timeline has it: launched at 0, but for what is said otherwise."""
    fields = {"asked": 0.0, "kind": COMPUTE, "name": str(serial)} | others
    return Span(begin, begin + us, serial=serial, stream=stream, **GIVEN | fields)  # type: ignore[arg-type]


def wait(serial: int, asked: float, over: float, *after: int) -> Span:
    return Span(
        asked, over, asked, serial=serial, stream=-1, kind=HOST_WAITS, name="waits", after=after, **GIVEN
    )


def times_of(*spans: Span) -> list[tuple[float, float]]:
    """When each began and ended."""
    taken = contended(Step(0.0, max(span.end for span in spans), list(spans)))
    return [(pytest.approx(span.begin), pytest.approx(span.end)) for span in taken.spans]


def test_two_kernels_that_each_need_all_of_the_memory_take_twice_as_long_beside_each_other() -> None:
    assert times_of(work(1, 0, 0, 100, memory=1.0), work(2, 5, 0, 40, memory=1.0)) == [(0, 140), (0, 80)]


def test_a_collective_takes_its_multiprocessors_from_a_product_and_none_from_a_copy() -> None:
    gather = work(1, 5, 0, 100, kind=GATHER, multiprocessors=0.2)
    # 80 of the product's 160 us beside the gather, then 80 more
    assert times_of(gather, work(2, 0, 0, 160, multiprocessors=1.0)) == [(0, 100), (0, 180)]
    assert times_of(gather, work(2, 0, 0, 100, memory=1.0)) == [(0, 100), (0, 100)]


def test_what_is_slow_holds_up_what_follows_on_its_stream_and_behind_its_events() -> None:
    first, beside = work(1, 0, 0, 100, memory=1.0), work(2, 5, 0, 100, memory=1.0)
    follows = work(3, 0, 100, 10)
    behind = work(4, 6, 100, 10, after=[2])
    taken = contended(Step(0.0, 110.0, [first, beside, follows, behind]))
    assert [(span.begin, span.end) for span in taken.spans[2:]] == [(200, 210), (200, 210)]
    assert (taken.spans[2].before, taken.spans[2].cause) == (200, -1)
    assert (taken.spans[3].ready, taken.spans[3].cause) == (200, 2)


def test_a_host_that_waits_launches_later_and_works_as_long_as_it_did() -> None:
    first, beside = work(1, 0, 0, 100, memory=1.0), work(2, 5, 0, 90, memory=1.0)
    # the wait for the second was over when it was asked for, the other 7 us after it
    over, until = wait(3, 93.0, 93.0, 2), wait(4, 93.0, 100.0, 1)
    late = work(5, 0, 120, 10, asked=120.0)
    taken = contended(Step(0.0, 130.0, [first, beside, over, until, late, wait(6, 121.0, 130.0, 5)]))
    assert [(span.begin, span.end) for span in taken.spans[2:]] == [
        (93, 180),
        (180, 190),
        (210, 220),
        (211, 220),
    ]
    assert taken.time == 220


REAL = """
    import fsdp_c
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from tests.simulated_gpu.contention import alone, contended

    def steps(wrap):
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4))).cuda()
        model = wrap(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        batch = torch.ones(32, 512, device="cuda")
        for _ in range(3):
            with step() as s:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return s

    def fsdp1(of):
        return lambda net: of(
            net, device_id=0, use_orig_params=True, auto_wrap_policy=lambda module, recurse, **_:
            recurse or isinstance(module, torch.nn.Linear))

    def fsdp2(net):
        for each in net: fully_shard(each)
        return fully_shard(net)

    timeline.set_costs(op=5, launch=2, collective=7, event=1)
    every = {"fsdp1": fsdp1(FullyShardedDataParallel), "fsdp2": fsdp2, "fsdp_c": fsdp1(fsdp_c.FullyShardedDataParallel)}
    for name, wrap in every.items():
        s = steps(wrap)
        again = {span.serial: span for span in alone(s).spans}
        pairs = [(span, again[span.serial]) for span in s.spans]
        times[name] = {
            "spans": len(pairs), "time": s.time, "alone": alone(s).time, "contended": contended(s).time,
            "apart": max(max(abs(a.begin - b.begin), abs(a.end - b.end)) for a, b in pairs),
        }
"""


def test_a_real_step_that_shares_nothing_takes_the_timelines_time_and_longer_if_it_does() -> None:
    for name, taken in run(REAL).items():
        assert taken["spans"] > 40, name
        assert taken["alone"] == pytest.approx(taken["time"], rel=1e-12), name
        assert taken["apart"] < 1e-6, name
        assert taken["contended"] > taken["time"], name
