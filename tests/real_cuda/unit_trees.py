"""The random trees of tests/simulated_gpu/unit_trees.py under torch's own allocator: plan's peak beside the
pool's.

python -m tests.real_cuda.unit_trees FIRST LAST [HOW], with FAKE_NCCL_ALONE=1. Prints a line for each seed
that differs, and at the end how many trees there were, and how much their pools had reserved, in percent of
what was planned. HOW:

pool      what fsdp_c's pool holds is planned to the block: the usual one
nested    the same amid a pool of the script's own, which has none of it
no pool   with an allocator that has no pools, what the process holds is bytes of tensors: trees whose
parameters are
          frozen but for one element in a root around them, so that nothing else is of their size; no casts,
          no uploads
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu import unit_trees

PAGE = 4096  # in which the device gives memory
SMALL = 256 * 2**10  # activations and gradients of a few elements, of a page each
highest = {"allocated": 0, "reserved": 0}
scripts_own: list[tuple[int, int]] = []  # pools
leave_pool = torch._C._cuda_endAllocateToPool


def look_and_leave(device: int, pool: tuple[int, int]) -> None:
    """Looks at the pool as it is left."""
    leave_pool(device, pool)
    if pool in scripts_own:
        return
    segments = torch.cuda.memory_snapshot(pool)
    blocks = [block for segment in segments for block in segment["blocks"]]
    taken = sum(block["size"] for block in blocks if block["state"] != "inactive")
    highest["allocated"] = max(highest["allocated"], taken)
    highest["reserved"] = max(highest["reserved"], sum(segment["total_size"] for segment in segments))


torch._C._cuda_endAllocateToPool = look_and_leave  # before fsdp_c takes it
import fsdp_c  # noqa: E402, F401


def step(model: Any) -> None:
    model(torch.empty(4, device="cuda")).float().sum().backward()


def measured(model: Any) -> tuple[int, int]:
    """The peaks of a step, and of an accumulation over three."""
    step(model)  # which has no order to follow
    unit_trees.clear(model)
    highest["allocated"] = 0
    step(model)
    plain, highest["allocated"] = highest["allocated"], 0
    unit_trees.clear(model)
    with model.no_sync():
        step(model)
        step(model)
    step(model)
    return plain, highest["allocated"]


def measured_amid_a_pool(model: Any) -> tuple[int, int]:
    """The same inside torch.cuda.use_mem_pool."""
    pool = torch.cuda.MemPool()
    scripts_own.append(pool.id)
    with torch.cuda.use_mem_pool(pool):
        return measured(model)


def held(model: Any) -> int:
    """What the process holds at most in a step beyond what it holds before."""
    driver = ctypes.CDLL(str(Path(os.environ["FAKE_CUDA"]) / "libcuda.so.1"))
    driver.fake_cuda_peak_nbytes.restype = ctypes.c_size_t
    is_counted = torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    for _ in range(2):
        step(model)
        unit_trees.clear(model)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    driver.fake_cuda_peak_nbytes(0)
    before = torch.cuda.memory_allocated() if is_counted else driver.fake_cuda_peak_nbytes(0)
    step(model)
    return (torch.cuda.max_memory_allocated() if is_counted else driver.fake_cuda_peak_nbytes(0)) - before


def main_without_pool(first: int, last: int) -> None:
    trees = differ = 0
    for seed in range(first, last):
        case = unit_trees.Case(seed)
        if any(
            unit.settings["mixed_precision"] or unit.settings["cpu_offload"].offload_params
            for unit in units(case)
        ):
            continue
        settings = case.root.requires_grad_(False).settings
        case.root = unit_trees.Node([torch.nn.Parameter(torch.empty(1))], [case.root], settings)
        planned = case.plan()
        model = case.wrap()
        seen, least = held(model), planned.peak_unsharded_nbytes
        if not least <= seen <= least + len(planned.units) * PAGE + SMALL:
            print(f"seed {seed}: {least} were planned, {seen} were taken")
            differ += 1
        trees += 1
        del case, model
        gc.collect()
    print({"trees": trees, "differ": differ}, flush=True)


def units(case: unit_trees.Case) -> list[unit_trees.Node]:
    return [module for module in case.root.modules() if isinstance(module, unit_trees.Node)]


def main(first: int, last: int, measured: Any) -> None:
    trees = differ = planned_nbytes = reserved_nbytes = 0
    for seed in range(first, last):
        case = unit_trees.Case(seed)
        if not case.trains:
            continue
        planned, highest["reserved"] = case.plan(), 0
        model = case.wrap()
        seen = measured(model)
        expected = planned.peak_allocated_nbytes, planned.no_sync_peak_allocated_nbytes
        if seen != expected:
            print(f"seed {seed}: {expected} were planned, {seen} were taken")
            differ += 1
        trees += 1
        planned_nbytes += expected[1]
        reserved_nbytes += highest["reserved"]
        del case, model
        gc.collect()
        torch.cuda.empty_cache()
    print(
        {"trees": trees, "differ": differ, "reserved": round(100 * reserved_nbytes / planned_nbytes)},
        flush=True,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=unit_trees.WORLD_SIZE)
    seeds, how = (int(sys.argv[1]), int(sys.argv[2])), " ".join(sys.argv[3:])
    if how == "no pool":
        main_without_pool(*seeds)
    else:
        main(*seeds, measured_amid_a_pool if how == "nested" else measured)
    os._exit(0)
