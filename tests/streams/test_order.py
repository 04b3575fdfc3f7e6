"""Events order all accesses to memory in a step: recorded on CPU ranks that pretend to have streams."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffload

from fsdp_c import _C
from tests.ranks import on_ranks
from tests.storage import live_nbytes
from tests.streams.order import (
    ALL_REDUCE,
    COMPUTE,
    HOST,
    POST_BACKWARD,
    PRE_UNSHARD,
    UNSHARD,
    Entry,
    lags,
    unordered,
    waits,
    without,
)
from tests.streams.pools import taken
from tests.streams.recorder import GRADIENTS, OURS, UNSHARDED, Recorder, recording
from tests.streams.scenarios import (
    BF16,
    HYBRID_SCENARIOS,
    SCENARIOS,
    STEPS,
    Trainer,
    accumulate,
    plain,
    raising_in,
    record,
    record_hybrid,
)


def assert_ordered(trace: list[Entry]) -> None:
    found = unordered(trace)
    assert not found, "\n".join([f"{len(found)} in {len(trace)} entries", *found[:5]])


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2)
def test_every_access_of_a_step_is_ordered(rank: int, world_size: int, name: str) -> None:
    recorder = record(rank, name)
    assert len(recorder.trace) > 200
    assert_ordered(recorder.trace)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("name", HYBRID_SCENARIOS)
@on_ranks(4)
def test_every_access_of_a_hybrid_step_is_ordered(rank: int, world_size: int, name: str, strategy: str) -> None:
    assert_ordered(record_hybrid(rank, name, strategy).trace)


@on_ranks(4)
def test_a_tree_may_be_hybrid_in_part(rank: int, world_size: int) -> None:
    """The reductions of its other units end on another stream."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    with recording() as recorder:
        trainer = Trainer(rank, strategy="FULL_SHARD", hybrid_blocks=(mesh, [0, 2]))
        accumulate(trainer)
    assert_ordered(recorder.trace)


# ---- memory

POOLED = ["FULL_SHARD", "SHARD_GRAD_OP", "bf16", "prefetch after", "no prefetch", "forward prefetch", "evaluate"]


@pytest.mark.parametrize("name", POOLED)
@on_ranks(2)
def test_no_step_holds_more_storage_than_was_reserved_before_the_first(rank: int, world_size: int, name: str) -> None:
    """Bytes of unsharded storage: the root's pool on a GPU holds as many as were alive at its lazy initialisation."""
    body, arguments = SCENARIOS[name]
    with recording():
        trainer = Trainer(rank, net={"blocks": 7}, **arguments)
        base = live_nbytes()
        _C.peak_unsharded_nbytes(reset=True)
        with raising_in(trainer.model.module, "register_forward_pre_hook"):
            trainer.forward()
        reserved = _C.peak_unsharded_nbytes(reset=True) - base
        body(trainer)
    assert 0 < _C.peak_unsharded_nbytes() - base <= reserved


STEADY = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "reduce fp32",
    "no limit, forward prefetch, bf16",
    "accumulate, NO_SHARD",
    "offload, SHARD_GRAD_OP, bf16",
]


@pytest.mark.parametrize("name", STEADY)
@on_ranks(2)
def test_a_step_takes_no_memory_that_the_first_did_not_take(rank: int, world_size: int, name: str) -> None:
    """The parameters' pool is filled before the first gather; what else the runtime allocates, in the first step."""
    body, arguments = SCENARIOS[name]
    with recording() as recorder:
        trainer = Trainer(rank, **({"net": {"blocks": 7}} | arguments))
        ends = counting_entries_after_updates(trainer, recorder)
        body(trainer)
        body(trainer)
    trace = recorder.trace
    found = list(taken(trace, recorder.nbytes))
    gather = next((place for place, entry in enumerate(trace) if entry[:2] == ("write", UNSHARD)), 0)
    assert any(one.place < ends[0] for one in found)
    assert [one for one in found if one.place > (gather if one.what == UNSHARDED else ends[0])] == []
    again = [entry for entry in trace[ends[0] :] if entry[0] == "alloc" and entry[3] in OURS]
    assert len(again) >= 7 * (len(ends) - 1)  # which all were served


def counting_entries_after_updates(trainer: Trainer, recorder: Recorder) -> list[int]:
    ends: list[int] = []
    update = trainer.update

    def counted() -> None:
        update()
        ends.append(len(recorder.trace))

    trainer.update = counted  # type: ignore[method-assign]
    return ends


class FullPool:
    """Refuses to grow a storage for the first time, or ``always``; the second try is the one beside the pool."""

    def __init__(self, always: bool) -> None:
        self.resize, self.always, self.refused = torch.UntypedStorage.resize_, always, 0
        self.last: Any = None

    def __call__(self, storage: Any, nbytes: int) -> Any:
        if nbytes and (self.always or storage._cdata != self.last):
            self.last = storage._cdata
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.last = None
        return self.resize(storage, nbytes)


@on_ranks(2)
def test_what_a_full_pool_refuses_is_taken_beside_it(rank: int, world_size: int) -> None:
    """There torch's allocator gives back what others have freed; a device that is full all the same says so."""
    for always in (False, True):
        pool = FullPool(always)
        with recording(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes, pool=pool: pool(storage, nbytes))
            trainer = Trainer(rank)
            with pytest.raises(torch.OutOfMemoryError) if always else contextlib.nullcontext():
                plain(trainer)
        assert pool.refused == 2 if always else pool.refused > 7 * STEPS


def test_memory_that_is_kept_is_found_by_what_comes_after_it() -> None:
    """A runtime that forgets to free one buffer takes another in the next step; pieces are split, and joined again."""
    step = [("alloc", COMPUTE, 1, GRADIENTS), ("alloc", COMPUTE, 2, GRADIENTS), ("free", 1), ("free", 2)]
    whole, nbytes = ("alloc", COMPUTE, 3, GRADIENTS), {1: 10, 2: 20, 3: 30, 4: 31}
    assert [one.nbytes for one in taken([*step, *step], nbytes)] == [10, 20]
    assert [one.nbytes for one in taken([*step[:3], *step], nbytes)] == [10, 20, 20]
    assert [one.nbytes for one in taken([whole, ("free", 3), *step, whole], nbytes)] == [30]
    assert [one.nbytes for one in taken([whole, ("free", 3), ("alloc", COMPUTE, 4, GRADIENTS)], nbytes)] == [30, 31]
    assert [one.nbytes for one in taken([whole, ("free", 3), ("alloc", UNSHARD, 1, GRADIENTS)], nbytes)] == [30, 10]


# ---- what the checker is worth


def is_needed(trace: list[Entry], place: int) -> bool:
    """Whether work follows on the stream of a wait before the next wait there."""
    stream = trace[place][1]
    following = (entry for entry in trace[place + 1 :] if entry[0] in ("read", "write", "alloc", "wait"))
    return next((entry[0] != "wait" for entry in following if entry[1] == stream), False)


# Which stream reads what the script wrote before a step: it waits for the step's beginning, the others do so beside it.
READERS = {
    "no limit": UNSHARD,
    "no limit, forward prefetch, bf16": PRE_UNSHARD,
    "offload, no limit, forward prefetch": HOST,
}


def assert_each_wait_is_needed(trace: list[Entry], name: str) -> set[int]:
    """Returns the streams that wait."""
    begin = next(entry[2] for entry in trace if entry[0] == "record")
    needed = [place for place in waits(trace) if is_needed(trace, place)]
    needed = [place for place in needed if trace[place][2] != begin or trace[place][1] == READERS[name]]
    unnoticed = [place for place in needed if not unordered(without(trace, place))]
    assert not unnoticed, [(place, trace[place]) for place in unnoticed]
    assert len(needed) > 10 * STEPS
    return {trace[place][1] for place in needed}


@pytest.mark.parametrize("name", READERS)
@on_ranks(2)
def test_each_wait_that_is_dropped_is_reported(rank: int, world_size: int, name: str) -> None:
    streams = assert_each_wait_is_needed(record(rank, name).trace, name)
    with_input = READERS[name] != UNSHARD
    assert streams == {COMPUTE, UNSHARD, POST_BACKWARD} | ({PRE_UNSHARD} if with_input else set())


@pytest.mark.parametrize("name", ["no limit", "no limit, forward prefetch, bf16"])
@on_ranks(4)
def test_each_wait_of_a_hybrid_step_that_is_dropped_is_reported(rank: int, world_size: int, name: str) -> None:
    trace = record_hybrid(rank, name).trace
    if rank == 0:
        assert assert_each_wait_is_needed(trace, name) >= {COMPUTE, UNSHARD, POST_BACKWARD, ALL_REDUCE}


@on_ranks(2)
def test_each_wait_of_the_host_for_offloaded_gradients_is_needed(rank: int, world_size: int) -> None:
    trace = record(rank, "offload, SHARD_GRAD_OP, bf16").trace
    needed = [place for place in waits(trace, ["synchronize"]) if is_before_the_host(trace, place)]
    assert len(needed) == STEPS
    assert all(unordered(without(trace, place)) for place in needed)


def is_before_the_host(trace: list[Entry], place: int) -> bool:
    """Whether the next work after an entry is the host's own."""
    following = (entry[1] for entry in trace[place + 1 :] if entry[0] in ("read", "write"))
    return next(following, COMPUTE) == HOST


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_offload_through_a_device_gives_the_same_numbers(rank: int, world_size: int, strategy: str) -> None:
    """While a step is recorded the CPU plays the device as well: what goes up and comes down is copied."""

    def train(offload: bool) -> list[Tensor]:
        torch.manual_seed(7)
        trainer = Trainer(rank, strategy=strategy, cpu_offload=CPUOffload(offload), mixed_precision=BF16)
        accumulate(trainer)
        return [param.detach().clone() for param in trainer.model.parameters()]

    with recording():
        moved = train(True)
    assert all(torch.equal(one, other) for one, other in zip(moved, train(False), strict=True))


@on_ranks(2)
def test_a_record_that_comes_too_early_is_reported(rank: int, world_size: int) -> None:
    trace = record(rank, "no limit").trace
    gathers = [place for place, entry in enumerate(trace) if entry[0] == "write" and entry[1] == UNSHARD]
    for place in gathers[-4:]:
        after = next(later for later in range(place, len(trace)) if trace[later][:2] == ("record", UNSHARD))
        early = [*trace[:place], trace[after], *trace[place:after], *trace[after + 1 :]]
        assert unordered(early)


@on_ranks(2)
def test_gathers_run_beside_the_computation_before_them(rank: int, world_size: int) -> None:
    """Waits are no more than is needed: a unit's gather does not wait for the forward of the one before it."""
    behind = list(lags(record(rank, "no limit").trace, UNSHARD, COMPUTE))
    assert sum(lag > 5 for lag in behind) >= STEPS * 3


@on_ranks(2)
def test_what_a_gather_reads_is_made_beside_the_gather_before_it(rank: int, world_size: int) -> None:
    behind = list(lags(record(rank, "no limit, forward prefetch, bf16").trace, PRE_UNSHARD, UNSHARD))
    assert sum(lag > 0 for lag in behind) >= STEPS * 3


@pytest.mark.parametrize("name", ["FULL_SHARD", "reduce fp32"])
@on_ranks(4)
def test_computation_and_reduce_scatters_run_beside_the_all_reduce_before_them(
    rank: int, world_size: int, name: str
) -> None:
    trace = record_hybrid(rank, name).trace
    assert sum(lag > 0 for lag in lags(trace, POST_BACKWARD, ALL_REDUCE)) >= STEPS * 2
    assert sum(lag > 0 for lag in lags(trace, COMPUTE, ALL_REDUCE)) >= STEPS * 10


# ---- the checker by itself

GATHER = [("alloc", UNSHARD, 1, "parameters"), ("write", UNSHARD, 1, "gather"), ("record", UNSHARD, 7)]
USE = [("wait", COMPUTE, 7), ("read", COMPUTE, 1, "forward"), ("record", COMPUTE, 8), ("free", 1)]
AGAIN = [("wait", UNSHARD, 8), ("alloc", UNSHARD, 2, "parameters")]


def test_an_ordered_trace_is_accepted() -> None:
    assert unordered(GATHER + USE + AGAIN) == []


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (GATHER + USE[1:], "read by forward on compute, and nothing orders it after gather on unshard"),
        (GATHER + USE + AGAIN[1:], "taken again by parameters on unshard, and nothing orders it after forward"),
        (GATHER + [("free", 1), *AGAIN[1:], ("read", COMPUTE, 1, "late")] + [("write", UNSHARD, 1, "x")], "late"),
        ([("wait", COMPUTE, 9)], "never recorded"),
        ([*GATHER, ("wait", COMPUTE, 7), ("write", UNSHARD, 1, "more"), *USE[1:]], "after more on unshard"),
        ([("write", COMPUTE, 3, "pack"), ("read", POST_BACKWARD, 3, "reduce"), ("free", 3)], "given back"),
    ],
)
def test_an_unordered_pair_is_named(trace: list[Entry], told: str) -> None:
    assert any(told in line for line in unordered(trace))


def test_a_host_that_synchronises_orders_what_it_enqueues_next() -> None:
    assert unordered([*GATHER, ("synchronize", 7), *USE[1:]]) == []
