"""Calls of the CUDA driver that sharding adds to a training step, per unit: FSDP1, FSDP2 and fsdp_c.

python -m benchmarks.driver_calls
python -m benchmarks.driver_calls --program "bf16 mixed" --impl fsdp_c
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from typing import Any

BLOCKS, PARAMS, WIDTH, WORLD_SIZE = 8, 4, 640, 8
PROGRAMS = ("FULL_SHARD fp32", "FULL_SHARD bf16 mixed", "FULL_SHARD CPU offload", "HYBRID_SHARD fp32")
COUNTS = ("records", "stream_waits", "events_created", "launches", "allocations")
WARMUP, STEPS = 4, 4
ABOUT = """\
Each cell is a process of the simulated GPU (docs/testing.md), which is rank 0 of 8, computes nothing, and counts events
created, records, waits of a stream for an event, launches (kernels, copies, collectives) and blocks taken from the
allocator, those inside torch's operators and process group included. The plain model's counts are subtracted, and the
rest is divided by the number of units: 8 blocks of 4 parameters and a root. A step is a forward, a backward and
zero_grad(), without an optimizer; 4 steps are counted after 4 that warm up.
"""


# ---- in a process of the simulated GPU


def shard(implementation: str, program: str, model: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import (
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from benchmarks import common

    strategy, offloads = program.split()[0], program.endswith("CPU offload")
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if "bf16" in program else {}
    mesh = None
    if strategy == "HYBRID_SHARD":
        names = ("replicate", "shard")
        mesh = dist.device_mesh.init_device_mesh("cuda", (2, WORLD_SIZE // 2), mesh_dim_names=names)
    if implementation == "torch.fsdp2":
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        policy = MixedPrecisionPolicy(**precision)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return common.fsdp_class(implementation)(
            model,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({common.Block}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(**precision) if precision else None,
            cpu_offload=CPUOffload(offloads),
            use_orig_params=True,
            device_id=torch.device("cuda", 0),
        )


def count_steps(implementation: str, program: str) -> dict[str, int]:
    """Return the calls of STEPS steps."""
    import simulated_gpu
    import torch
    import torch._meta_registrations  # shapes of the operators that have them in Python alone
    import torch.distributed as dist

    from benchmarks import common

    torch.set_num_threads(1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)
    model: Any = common.Stack(BLOCKS, PARAMS, WIDTH).cuda()
    if implementation != "plain":
        model = shard(implementation, program, model)
    elif "bf16" in program:
        model = model.bfloat16()
    x = torch.zeros(2, WIDTH, device="cuda", dtype=next(model.parameters()).dtype)
    before: dict[str, int] = {}
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            before = simulated_gpu.driver_calls()
        model(x).sum().backward()
        model.zero_grad()
    after = simulated_gpu.driver_calls()
    return {name: after[name] - before[name] for name in COUNTS}


# ---- the table


def count_in_a_process(implementation: str, program: str) -> dict[str, int]:
    from benchmarks.timeline import measure

    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.driver_calls", "--count", implementation]
    command += ["--program", program]
    environment = os.environ | measure.environment()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{implementation}, {program} failed:\n{done.stderr[-3000:]}")
    counts: dict[str, int] = json.loads(lines[-1])
    return counts


def table(implementations: list[str], programs: list[str]) -> str:
    names = ("records", "waits", "events created", "launches", "allocations")
    lines = [f"| program | implementation | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for program in programs:
        plain = count_in_a_process("plain", program)
        for implementation in implementations:
            counts = count_in_a_process(implementation, program)
            added = [(counts[name] - plain[name]) / STEPS / (BLOCKS + 1) for name in COUNTS]
            lines.append(f"| {program} | {implementation} | " + " | ".join(f"{n:.1f}" for n in added) + " |")
    return "\n".join(lines)


def main() -> None:
    from benchmarks.timeline.row import IMPLEMENTATIONS

    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--program", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--count", metavar="IMPL", help="count one implementation in this process")
    given = parser.parse_args()
    if given.count:
        print(json.dumps(count_steps(given.count, given.program[0])), flush=True)
        os._exit(0)  # threads of autograd may still be there
    print(table(given.impl, given.program))


if __name__ == "__main__":
    main()
