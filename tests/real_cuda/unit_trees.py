"""The random trees of tests/simulated_gpu/unit_trees.py under torch's own allocator: plan's peak beside the pool's.

python -m tests.real_cuda.unit_trees FIRST LAST, with FAKE_NCCL_ALONE=1. Prints a line for each seed that differs, and
at the end how many trees there were, and how much their pools had reserved, in percent of what was planned.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu import unit_trees

highest = {"allocated": 0, "reserved": 0}
leave_pool = torch._C._cuda_endAllocateToPool


def look_and_leave(device: int, pool: tuple[int, int]) -> None:
    """Looks at the pool as it is left."""
    leave_pool(device, pool)
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


def main(first: int, last: int) -> None:
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=unit_trees.WORLD_SIZE)
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
    print({"trees": trees, "differ": differ, "reserved": round(100 * reserved_nbytes / planned_nbytes)}, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
