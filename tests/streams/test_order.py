"""Events order all accesses to memory in a step: recorded on CPU ranks that pretend to have streams."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH, Block, Net
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

STEPS = 2
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
REDUCE_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Trainer:
    """A model, its optimizer, and steps on them, as a scenario arranges them."""

    def __init__(self, rank: int, net: dict[str, Any] | None = None, **arguments: Any) -> None:
        torch.manual_seed(3)
        self.rank = rank
        strategy = ShardingStrategy[arguments.pop("strategy", "FULL_SHARD")]
        mesh, hybrid = arguments.pop("hybrid_blocks", (None, []))
        whole = Net(**(net or {}))
        for index in hybrid:
            inner = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh, "use_orig_params": True}
            whole.blocks[index] = FSDP(whole.blocks[index], device_id=torch.device("cpu"), **inner)
        self.model = FSDP(
            whole,
            auto_wrap_policy=None if hybrid else ModuleWrapPolicy({Block}),
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            **({"use_orig_params": True} | arguments),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def forward(self) -> Tensor:
        return self.model(torch.randn(3, WIDTH)).float().square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.model.clip_grad_norm_(1.0)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- scenarios: what happens in the steps


def plain(trainer: Trainer) -> None:
    for _ in range(STEPS):
        trainer.step()


def accumulate(trainer: Trainer) -> None:
    """With and without no_sync, gradients kept over several backwards."""
    for _ in range(2):
        with trainer.model.no_sync():
            trainer.forward().backward()
            trainer.forward().backward()
        trainer.forward().backward()
        trainer.forward().backward()
        trainer.update()


def two_forwards(trainer: Trainer) -> None:
    for _ in range(2):
        (trainer.forward() + trainer.forward()).backward()
        trainer.update()


def evaluate(trainer: Trainer) -> None:
    """Forwards without a backward, by both ways to say so, and in the middle of training."""
    for _ in range(2):
        trainer.step()
        with torch.no_grad():
            trainer.forward()
            trainer.forward()
        trainer.model.eval()
        trainer.forward()
        trainer.model.train()


def look_at_parameters(trainer: Trainer) -> None:
    """Whole parameters and state dicts, between steps and between a forward and its backward."""
    for _ in range(2):
        trainer.step()
        with FSDP.summon_full_params(trainer.model, writeback=True):
            for param in trainer.model.parameters():
                param.data.mul_(0.9)
        loss = trainer.forward()
        trainer.model.state_dict()
        loss.backward()
        trainer.update()


def call_a_unit_alone(trainer: Trainer) -> None:
    """A part of the model by itself, right after the optimizer has written; and gathered ahead by hand."""
    trainer.step()
    block = trainer.model.module.blocks[1]
    for _ in range(2):
        block(torch.randn(2, WIDTH)).sum().backward()
        trainer.update()
        work = block._unshard(async_op=True)
        work.wait()
        trainer.step()


class Refused(Exception):
    """What a scenario raises in the middle of a step."""


@contextlib.contextmanager
def raising_in(hooked: Any, register: str) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise Refused

    handle = getattr(hooked, register)(refuse)
    with pytest.raises(Refused):
        yield
    handle.remove()


def raise_in_forward(trainer: Trainer) -> None:
    for block in (0, 2):
        trainer.step()
        with raising_in(trainer.model.module.blocks[block], "register_forward_hook"):
            trainer.forward()
    trainer.step()


def raise_in_backward(trainer: Trainer) -> None:
    for block in (2, 0):
        trainer.step()
        with raising_in(trainer.model.module.blocks[block], "register_full_backward_hook"):
            trainer.forward().backward()
        gc.collect()
    trainer.step()


def refusing(collective: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The collective, refused once on every rank after so many calls."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise Refused
        return collective(*args, **kwargs)

    return call


def refuse_collectives(trainer: Trainer) -> None:
    for name, after in (("all_gather_into_tensor", 2), ("all_gather_into_tensor", 5), ("reduce_scatter_tensor", 1)):
        trainer.step()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Refused):
            patched.setattr(dist, name, refusing(getattr(dist, name), after))
            trainer.forward().backward()
        gc.collect()
    trainer.step()


def reduce_by_hook(trainer: Trainer) -> None:
    def reduce(state: Any, full: Tensor, shard: Tensor) -> None:
        dist.reduce_scatter_tensor(shard, full)

    trainer.model.register_comm_hook(None, reduce)
    plain(trainer)


def reduce_in_bf16(trainer: Trainer) -> None:
    for unit in FSDP.fsdp_modules(trainer.model):
        state = default_hooks.LowPrecisionState(unit.process_group)
        unit._handle.set_comm_hook(default_hooks.bf16_compress_hook, state, torch.bfloat16)
    plain(trainer)


def step_in_backward(trainer: Trainer) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, trainer.model.parameters(), {"lr": 0.1})
    for _ in range(STEPS):
        trainer.forward().backward()


def replace_parameters(trainer: Trainer) -> None:
    """Between steps, by tensors that nobody else holds; the first unit's on the way to its forward."""
    replace(trainer.model.module.inp)
    for _ in range(2):
        trainer.step()
        replace(trainer.model)
    hook = trainer.model.module.blocks[0].module.register_forward_hook(
        lambda *_: replace(trainer.model.module.blocks[2])
    )
    trainer.step()
    hook.remove()


def replace(module: Any) -> None:
    for param in module.parameters():
        param.data = param.data * 0.9


def step_twice_in_backward(trainer: Trainer) -> None:
    """Reentrant checkpoints end a unit's backward once for each forward: it is gathered again after its step."""
    _apply_optimizer_in_backward(torch.optim.SGD, trainer.model.parameters(), {"lr": 0.1})
    for _ in range(STEPS):
        (trainer.forward() + trainer.forward()).backward()


def write_after_evaluating(trainer: Trainer) -> None:
    """On the host, which has waited for nothing that evaluation enqueued."""
    trainer.step()
    for _ in range(2):
        with torch.no_grad():
            trainer.forward()
            for unit in FSDP.fsdp_modules(trainer.model):
                unit._flat_param.data.mul_(0.9)


# ---- every one of them is ordered

Body = Callable[[Trainer], None]
SCENARIOS: dict[str, tuple[Body, dict[str, Any]]] = {
    "FULL_SHARD": (plain, {}),
    "SHARD_GRAD_OP": (plain, {"strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": (plain, {"strategy": "NO_SHARD"}),
    "NO_SHARD bf16": (plain, {"strategy": "NO_SHARD", "mixed_precision": BF16}),
    "flat": (plain, {"use_orig_params": False}),
    "bf16": (plain, {"mixed_precision": BF16}),
    "reduce fp32": (accumulate, {"mixed_precision": REDUCE_FP32}),
    "prefetch after": (plain, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "no prefetch": (plain, {"backward_prefetch": None}),
    "forward prefetch": (plain, {"forward_prefetch": True}),
    "no limit": (plain, {"limit_all_gathers": False}),
    "no limit, forward prefetch, bf16": (
        plain,
        {"limit_all_gathers": False, "forward_prefetch": True, "mixed_precision": BF16},
    ),
    "accumulate": (accumulate, {}),
    "accumulate, SHARD_GRAD_OP": (accumulate, {"strategy": "SHARD_GRAD_OP", "use_orig_params": False}),
    "accumulate, NO_SHARD": (accumulate, {"strategy": "NO_SHARD"}),
    "two forwards": (two_forwards, {"limit_all_gathers": False}),
    "checkpointed": (plain, {"net": {"around": "nonreentrant"}, "limit_all_gathers": False}),
    "checkpointed inside": (plain, {"net": {"checkpoint_mode": "reentrant"}}),
    "evaluate": (evaluate, {"limit_all_gathers": False}),
    "evaluate in full precision": (evaluate, {"mixed_precision": BF16, "limit_all_gathers": False}),
    "look at parameters": (look_at_parameters, {"limit_all_gathers": False}),
    "look at parameters, bf16": (look_at_parameters, {"mixed_precision": BF16, "strategy": "SHARD_GRAD_OP"}),
    "replaced": (replace_parameters, {"limit_all_gathers": False, "forward_prefetch": True}),
    "replaced, bf16": (replace_parameters, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "replaced, flat": (replace_parameters, {"use_orig_params": False, "limit_all_gathers": False}),
    "replaced, offload": (replace_parameters, {"cpu_offload": CPUOffload(True), "forward_prefetch": True}),
    "a unit alone": (call_a_unit_alone, {"limit_all_gathers": False}),
    "raise in forward": (raise_in_forward, {"limit_all_gathers": False}),
    "raise in backward": (raise_in_backward, {"limit_all_gathers": False}),
    "raise in backward, NO_SHARD": (raise_in_backward, {"strategy": "NO_SHARD"}),
    "refuse collectives": (refuse_collectives, {"forward_prefetch": True}),
    "refuse collectives, bf16": (refuse_collectives, {"mixed_precision": BF16, "limit_all_gathers": False}),
    "hook": (reduce_by_hook, {}),
    "bf16 hook": (reduce_in_bf16, {}),
    "offload": (accumulate, {"cpu_offload": CPUOffload(True), "limit_all_gathers": False}),
    "offload, no limit, forward prefetch": (
        plain,
        {"cpu_offload": CPUOffload(True), "limit_all_gathers": False, "forward_prefetch": True},
    ),
    "offload, look at parameters, bf16": (
        look_at_parameters,
        {"cpu_offload": CPUOffload(True), "mixed_precision": BF16, "limit_all_gathers": False},
    ),
    "offload, SHARD_GRAD_OP, bf16": (
        plain,
        {"cpu_offload": CPUOffload(True), "strategy": "SHARD_GRAD_OP", "mixed_precision": BF16},
    ),
    "offload, NO_SHARD": (plain, {"cpu_offload": CPUOffload(True), "strategy": "NO_SHARD", "use_orig_params": False}),
    "offload, write after evaluating": (
        write_after_evaluating,
        {"cpu_offload": CPUOffload(True), "use_orig_params": False, "limit_all_gathers": False},
    ),
    "step twice in backward": (
        step_twice_in_backward,
        {"net": {"around": "reentrant"}, "limit_all_gathers": False, "mixed_precision": BF16},
    ),
    "offload, step in backward": (step_in_backward, {"cpu_offload": CPUOffload(True)}),
    "step in backward": (step_in_backward, {"limit_all_gathers": False}),
}


HYBRID_SCENARIOS = ["accumulate", "reduce fp32", "raise in backward", "step in backward", "offload"]


def record(rank: int, name: str, **more: Any) -> Recorder:
    body, arguments = SCENARIOS[name]
    environment = pytest.MonkeyPatch()
    with environment.context() as patched, recording() as recorder:
        if "full precision" in name:
            patched.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        body(Trainer(rank, **(arguments | more)))
    return recorder


def assert_ordered(trace: list[Entry]) -> None:
    found = unordered(trace)
    assert not found, "\n".join([f"{len(found)} in {len(trace)} entries", *found[:5]])


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2)
def test_every_access_of_a_step_is_ordered(rank: int, world_size: int, name: str) -> None:
    recorder = record(rank, name)
    assert len(recorder.trace) > 200
    assert_ordered(recorder.trace)


def record_hybrid(rank: int, name: str, strategy: str = "HYBRID_SHARD") -> Recorder:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    return record(rank, name, strategy=strategy, device_mesh=mesh)


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
