"""Programs that depend on the order of streams, each run in this process as one of four ranks on the
simulated GPU.

Other ranks do not exist: a collective returns copies of this rank's data. The race detector checks accesses
only, not values.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import ranks, settings
from tests.races.scenarios import (
    BF16,
    HYBRID_SCENARIOS,
    SCENARIOS,
    Refused,
    Trainer,
    accumulate,
    plain,
    refusing,
)

WORLD_SIZE = 4
BACKEND = "nccl_alone"


_last_streams: dict[int, int] = {}  # last stream created before all programs, by priority


@contextmanager
def one_of_four() -> Iterator[None]:
    """Create a group of the simulated NCCL whose other ranks do not exist. Models and tensors are on the GPU."""
    _register_backend()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(settings.DEVICE, "cuda")
        torch.cuda.set_device(0)
        torch.set_default_device(ranks.device())
        dist.init_process_group(f"cuda:{BACKEND}", rank=0, world_size=WORLD_SIZE, store=FakeStore())
        dist.all_reduce(torch.ones(1), async_op=True).wait()  # creates the group's stream
        _last_streams.update(
            {priority: torch.cuda.Stream(priority=priority).stream_id for priority in (0, -1)}
        )
        gc.collect()
        gc.freeze()  # programs run garbage collection, which would be slow otherwise
        try:
            run("FULL_SHARD")  # one-time initialization
            yield
        finally:
            gc.unfreeze()
            dist.destroy_process_group()
            torch.set_default_device(None)


def _register_backend() -> None:
    if BACKEND in dist.Backend.backend_list:
        return
    c10d: Any = torch._C._distributed_c10d

    def create(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        return c10d.ProcessGroupNCCL.over(c10d.FakeProcessGroup._create_internal(rank, world_size))

    dist.Backend.register_backend(BACKEND, create, devices=["cuda"])


# ---- programs that need streams and memory of a GPU


def step_under_two_streams(trainer: Trainer) -> None:
    """Run each forward on a new user stream, and the backward on a third one.

    The streams continue with other work, and none waits for the others.
    """
    streams = [torch.cuda.Stream() for _ in range(3)]
    for one, other in (streams[:2], streams[1:]):
        with after_current(one):
            loss = trainer.forward()
        with after(one, other):
            loss.backward()
        take_memory_under(streams)
        torch.cuda.current_stream().wait_stream(other)
        trainer.update()


def add_up_under_two_streams(trainer: Trainer) -> None:
    """Run a backward through two forwards on streams of their own. The first reduction's packed gradients are
    of one of them.
    """
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(2):
        losses = []
        for stream in streams:
            with after_current(stream):
                losses.append(trainer.forward())
            torch.cuda.current_stream().wait_stream(stream)
        (losses[0] + losses[1]).backward()
        take_memory_under(streams)
        trainer.update()


def take_memory_under(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(64)


def evaluate_under_two_streams(trainer: Trainer) -> None:
    with torch.no_grad():
        for _ in range(2):
            with after_current(torch.cuda.Stream()):
                trainer.forward()
            trainer.forward()


@contextmanager
def after_current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on a stream that waits for the current one. The current stream waits for the body only
    through FSDP.
    """
    with after(torch.cuda.current_stream(), stream):
        yield


@contextmanager
def after(first: torch.cuda.Stream, then: torch.cuda.Stream) -> Iterator[None]:
    then.wait_stream(first)
    with torch.cuda.stream(then):
        yield


def take_freed_memory(trainer: Trainer) -> None:
    """Allocate and free memory of all sizes between units, so that freed memory is soon reused."""

    def take(*_: Any) -> None:
        for numel in (64, 256, 1024):
            torch.zeros(numel)

    for module in trainer.model.modules():
        module.register_forward_hook(take)
        module.register_full_backward_hook(take)
    plain(trainer)


def read_gradients(trainer: Trainer) -> None:
    """Read gradients on the host as soon as the backward has returned."""
    for _ in range(2):
        trainer.forward().backward()
        for param in trainer.model.parameters():
            if param.grad is not None:
                assert param.grad.isfinite().all()
        trainer.update()


def train_deterministically(trainer: Trainer) -> None:
    """Train with deterministic algorithms: torch then fills fresh memory by a kernel on the current stream."""
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        plain(trainer)
    finally:
        torch.use_deterministic_algorithms(False)


def step_under_streams_that_are_destroyed(trainer: Trainer) -> None:
    """Run steps on streams that the driver destroys, each used for one step and one read of the parameters."""
    driver = device_library()
    for _ in range(3):
        handle = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(handle), 0) == 0
        assert handle.value is not None
        stream = torch.cuda.ExternalStream(handle.value)
        with after_current(stream):
            trainer.step()
            with torch.no_grad():
                trainer.forward()
        torch.cuda.current_stream().wait_stream(stream)
        del stream
        assert driver.cuStreamDestroy_v2(handle) == 0
        trainer.step()


def step_in_a_pool(trainer: Trainer) -> None:
    """Run steps whose memory is allocated from a pool of the script."""
    gc.collect()  # torch ends the process where a dropped model's pool ends while this one is entered
    pool = torch.cuda.MemPool()
    for _ in range(2):
        with torch.cuda.use_mem_pool(pool):
            trainer.step()


def write_after_a_refusal(trainer: Trainer) -> None:
    """Write to parameters after an all-gather has failed whose input was being made from them."""
    trainer.step()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Refused):
            patched.setattr(dist, "all_gather_into_tensor", refusing(dist.all_gather_into_tensor, 1))
            trainer.forward()
        for param in trainer.model.parameters():
            param.data.mul_(0.9)


# ---- table

Body = Callable[[Trainer], None]
OWN: dict[str, tuple[Body, dict[str, Any]]] = {
    "two streams": (step_under_two_streams, {"limit_all_gathers": False}),
    "two streams, two forwards": (add_up_under_two_streams, {"limit_all_gathers": False}),
    "two streams, bf16": (step_under_two_streams, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "two streams, evaluate": (evaluate_under_two_streams, {"limit_all_gathers": False}),
    "streams that are destroyed": (step_under_streams_that_are_destroyed, {"limit_all_gathers": False}),
    "streams that are destroyed, bf16": (
        step_under_streams_that_are_destroyed,
        {"limit_all_gathers": False, "mixed_precision": BF16},
    ),
    "deterministic": (train_deterministically, {"limit_all_gathers": False}),
    "deterministic, bf16": (train_deterministically, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "in a pool, bf16": (step_in_a_pool, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "write after a refusal": (
        write_after_a_refusal,
        {"mixed_precision": BF16, "limit_all_gathers": False, "use_orig_params": False},
    ),
    "memory taken again": (take_freed_memory, {"limit_all_gathers": False, "forward_prefetch": True}),
    "memory taken again, bf16": (take_freed_memory, {"mixed_precision": BF16}),
    "offload, gradients read": (read_gradients, {"cpu_offload": CPUOffload(True)}),
}
HYBRID = {
    f"{strategy}, {name}": (SCENARIOS[name][0], SCENARIOS[name][1] | {"strategy": strategy})
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    for name in [*HYBRID_SCENARIOS, "no limit, forward prefetch, bf16"]
}
# only some units are hybrid: their reductions end on a different stream
IN_PART = {"hybrid in part": (accumulate, {})}
PROGRAMS: dict[str, tuple[Body, dict[str, Any]]] = SCENARIOS | OWN | HYBRID | IN_PART


@contextmanager
def set_up(name: str) -> Iterator[tuple[Body, dict[str, Any]]]:
    """Set up a program and yield its body and the model's arguments. Called on all ranks."""
    body, arguments = PROGRAMS[name]
    more: dict[str, Any] = {}
    if name in HYBRID:
        more = {"device_mesh": _mesh()}
    if name in IN_PART:
        more = {"hybrid_blocks": (_mesh(), [0, 2])}
    with pytest.MonkeyPatch.context() as patched:
        if "full precision" in name:
            patched.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        yield body, arguments | more


class Wait(NamedTuple):
    """A wait of a stream or of the host for an event."""

    waiting: str
    awaited: str
    orders: bool  # False if the order was already implied

    @property
    def kind(self) -> tuple[str, str]:
        return self.waiting, self.awaited


class Step(NamedTuple):
    """A launch, or an allocation."""

    what: str
    stream: str
    after: dict[str, int]  # number of earlier launches by stream, this one included


class Run(NamedTuple):
    """The results of one run of a program."""

    waits: list[Wait]
    reports: frozenset[str]  # one line each; streams are named by their roles
    order: list[Step]


def run(name: str, drop: int | None = None) -> Run:
    """Run a program inside ``one_of_four``. ``drop`` is the index of the wait to leave out."""
    import simulated_gpu

    with _begun(), _named_streams() as names, set_up(name) as (body, arguments):
        first = simulated_gpu.waits()
        simulated_gpu.drop_wait(-1 if drop is None else drop)
        try:
            body(Trainer(0, **arguments))
        finally:
            simulated_gpu.drop_wait(-1)
        last, order = simulated_gpu.waits(), simulated_gpu.ordered()
    waits = [_wait(nth, names) for nth in range(first, last)]
    return Run(waits, _in_roles(simulated_gpu.reports(), names), _named_order(order, names))


@contextmanager
def _begun() -> Iterator[None]:
    """Start with an idle device and end with one. Garbage collection runs only where programs call it."""
    import simulated_gpu

    _clean_up()
    _go_back_to_the_first_streams()
    simulated_gpu.reports()
    simulated_gpu.log_order(True)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        simulated_gpu.log_order(False)
        _clean_up()


def _in_roles(reports: list[str], names: dict[int, str]) -> frozenset[str]:
    def role(found: re.Match[str]) -> str:
        return names.get(int(found[1]), "another stream")

    lines = (report.splitlines()[0].rpartition(" (")[0] for report in reports)
    return frozenset(re.sub(r"stream (\d+)", role, line) for line in lines)


def _named_order(order: list[tuple[str, int, dict[int, int]]], names: dict[int, str]) -> list[Step]:
    """Number the user's streams in the order of their first use."""
    all_names = {0: "host"} | names
    for _, agent, _ in order:
        if agent not in all_names:
            all_names[agent] = f"compute {len(all_names) - len(names)}"
    return [
        Step(what, all_names[at], {all_names[one]: count for one, count in after.items()})
        for what, at, after in order
    ]


def lags(order: list[Step], stream: str, beside: str) -> Iterator[int]:
    """Yield for each launch on a stream the number of earlier launches on ``beside`` for which it need not
    wait.
    """
    last = 0
    for step in order:
        if step.stream == beside:
            last = step.after.get(beside, 0)
        elif step.stream == stream and step.what != "alloc":
            yield last - step.after.get(beside, 0)


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cuda", (2, 2))


def _go_back_to_the_first_streams() -> None:
    """Advance torch's 32 streams per priority to the same position, so that each program gets the same
    streams, and none of the group's.
    """
    for priority, last in _last_streams.items():
        while torch.cuda.Stream(priority=priority).stream_id != last:
            pass


def _clean_up() -> None:
    """Free all unused memory and wait for the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


ROLES = ("pre-unshard", "unshard", "post-backward", "all-reduce")


@contextmanager
def _named_streams() -> Iterator[dict[int, str]]:
    """Yield the roles of the streams created by roots, by the device's number of the stream. Roots create
    streams in the order of the roles.
    """
    names: dict[int, str] = {}

    class Stream(torch.cuda.Stream):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            made = super().__new__(cls, *arguments, **options)
            if len(arguments) == 2:  # only fsdp_c passes a device and a priority
                names[made.stream_id] = ROLES[len(names) % len(ROLES)]
            return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Stream", Stream)
        yield names


def device_library() -> ctypes.CDLL:
    return ctypes.CDLL(os.path.join(os.environ["SIMULATED_GPU"], "libcuda.so.1"))


def _wait(nth: int, names: dict[int, str]) -> Wait:
    query = device_library().simulated_gpu_wait
    query.restype = ctypes.c_bool
    waiting, awaited = ctypes.c_int(), ctypes.c_int()
    orders = query(ctypes.c_int64(nth), ctypes.byref(waiting), ctypes.byref(awaited))
    names = {0: "host"} | names
    return Wait(names.get(waiting.value, "compute"), names.get(awaited.value, "compute"), orders)
