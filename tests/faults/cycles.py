"""Leaks in cycles of building, using and dropping models: ``python -m tests.faults.cycles NAME=TOTAL ...``.

Each cycle is run TOTAL times in its own process, forked from one that has only run a first step, and prints
one line of JSON. A run is divided into windows of equal numbers of cycles. A leak shows in every window, so
the least growth of a window counts: caches and tables grow in leaps.

Blocks are Python's allocator's: our objects and arrays. Bytes are malloc's: tensors and layouts. With tcache
and several arenas malloc counts free memory as used, so the environment must disable both.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_c import _C, StateDictType
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.collectives import init_fake_group

WINDOWS = 3
COLLECT_EVERY = 25


class Trouble(Exception):
    """An exception in user code."""


def unit(**arguments: Any) -> FSDP:
    """Return a tree of two units, each with two parameters."""
    arguments = {"device_id": torch.device("cpu"), "use_orig_params": True} | arguments
    return FSDP(nn.Sequential(FSDP(nn.Linear(3, 3), **arguments), nn.Linear(3, 2)), **arguments)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()


# ----------------------------------------------------------------- cycles


def layouts() -> Callable[[], Any]:
    bad = [([], 4, 3, 1, True), ([-1], 4, 3, 1, True), ([2**62] * 2, 0, 2, 0, True), ([1], 0, 2, 5, True), ()]

    def cycle() -> None:
        layout = _C.FlatLayout([7, 3, 64], 4, 3, 1, True)
        layout.shard_ranges(2), layout.param_offsets, layout.numels_with_padding, layout.is_padding_mask
        for arguments in bad:
            with suppress(TypeError, ValueError, OverflowError):
                _C.FlatLayout(*arguments)
        _C.flat_range_boxes((3, 4, 5), 7, 51)
        _C.partition_overlaps((100, 30, 0), (100, 7, 3), 1)
        _C.partition_bounds((100, 30, 0), 1)
        _C.exchange_plan([((100, 30, 0), (100, 7, 3), 4)], 1, 15, False)
        _C.cpu_capabilities()

    return cycle


def handles() -> Callable[[], Any]:
    model = unit()

    def cycle() -> None:
        handle = FSDP(nn.Linear(3, 2), device_id=torch.device("cpu"))._handle
        handle.unshard()
        handle.reshard(True)
        handle.summon_enter(False)
        handle.summon_exit()
        used = model._handle
        for one in (used, _C.Handle.__new__(_C.Handle)):
            with suppress(RuntimeError, TypeError):
                _C.Handle.__init__(one, used._config, layout=used.layout, flat_param=used.flat_param)
        module = nn.Identity()
        module.unit = _C.Unit(module, None, model._config, "nothing", ())

    return cycle


def built() -> Callable[[], Any]:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def cycle() -> None:
        step(unit())
        step(unit(use_orig_params=False, mixed_precision=low))
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        net[1].requires_grad_(False)
        net.order = nn.Parameter(torch.arange(5), requires_grad=False)
        model = FSDP(net, device_id=torch.device("cpu"))
        step(model)
        model.state_dict()

    return cycle


def released_runtime() -> Callable[[], Any]:
    model = unit()

    def cycle() -> None:
        step(model)
        model._unit.runtime.release()

    return cycle


def trained() -> Callable[[], Any]:
    model, hooked = (
        unit(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
        unit(use_orig_params=False),
    )
    hooked.register_comm_hook(None, lambda state, full, shard: shard.copy_(full[: shard.numel()]))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def cycle() -> None:
        model(torch.ones(2, 3))  # without a backward
        with model.no_sync():
            step(model)
        model(torch.ones(2, 3)).float().sum().backward()
        model.clip_grad_norm_(1.0)
        adam.step()
        adam.zero_grad()
        step(hooked)

    return cycle


def raising() -> Callable[[], Any]:
    model, raised = unit(), [False]

    def stop(*_: Any) -> None:
        raised[0] = not raised[0]
        if raised[0]:
            raise Trouble

    model.module[1].register_forward_hook(stop)
    inner = unit()
    inner.module[0].module.register_full_backward_hook(stop)

    def cycle() -> None:
        for one in (model, model, inner, inner):
            with suppress(Trouble):
                step(one)

    return cycle


def summoned() -> Callable[[], Any]:
    model = unit()

    def cycle() -> None:
        model(torch.ones(2, 3)).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            pass
        model.zero_grad()

    return cycle


def state_dicts() -> Callable[[], Any]:
    model = unit()

    def cycle() -> None:
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
            with FSDP.state_dict_type(model, kind):
                model.load_state_dict(model.state_dict())

    return cycle


CYCLES = {
    function.__name__: function
    for function in (layouts, handles, built, released_runtime, trained, raising, summoned, state_dicts)
}


# ----------------------------------------------------------------- measuring


class MallInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


LIBC = ctypes.CDLL(None)


def used_nbytes() -> int:
    """Return the bytes that malloc has handed out in this process and that are not freed."""
    info = LIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def objects() -> Counter[str]:
    """Count the objects known to Python's garbage collector, by type."""
    return Counter(type(one).__qualname__ for one in gc.get_objects())


def run_window(cycle: Callable[[], Any], count: int) -> tuple[int, int, Counter[str]]:
    for number in range(count):
        cycle()
        if number % COLLECT_EVERY == 0:
            gc.collect()
    for _ in range(2):  # a freed root releases its units, which the second round collects
        gc.collect()
    return used_nbytes(), sys.getallocatedblocks(), objects()


def measure(cycle: Callable[[], Any], total: int) -> dict[str, Any]:
    """Return the number of cycles per window, the least growth of a window in bytes and blocks, and the types
    of which each cycle leaves an object.
    """
    count = max(1, total // WINDOWS)
    gc.freeze()  # exclude imported objects from collections
    run_window(cycle, max(count // 2, COLLECT_EVERY))
    gc.freeze()
    ends = [run_window(cycle, count) for _ in range(WINDOWS + 1)]
    windows = list(zip(ends, ends[1:], strict=False))
    kinds = set().union(*(end[2] for end in ends))
    grown = {kind: min(after[2][kind] - before[2][kind] for before, after in windows) for kind in kinds}
    return {
        "cycles": count,
        "nbytes": min(after[0] - before[0] for before, after in windows),
        "blocks": min(after[1] - before[1] for before, after in windows),
        "objects": {kind: number for kind, number in grown.items() if number >= count},
    }


def run_forked(name: str, total: int) -> None:
    """Measure one cycle in a child process, which prints the result."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    status = 1
    try:
        result = measure(CYCLES[name](), total)
        print(json.dumps({"name": name, **result}), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(runs: list[str]) -> None:
    LIBC.mallinfo2.restype = MallInfo
    torch.set_num_threads(1)
    init_fake_group(rank=0, world_size=2)
    step(unit())  # imports torch's lazily imported modules
    for run in runs:
        name, _, total = run.partition("=")
        run_forked(name, int(total))


if __name__ == "__main__":
    main(sys.argv[1:])
