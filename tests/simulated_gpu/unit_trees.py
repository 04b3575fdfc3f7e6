"""Random trees of units: the peak of unsharded parameters that fsdp_c plans, beside the one that the
allocator shows.

python -m tests.simulated_gpu.unit_trees FIRST LAST, in a process that computes nothing
(``timeline.environment()``). Prints a line for each seed that differs, and at the end how many trees of what
kind there were.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch._meta_registrations  # shapes of the operators that have them in Python alone
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_c
from fsdp_c import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import CustomPolicy
from tests.simulated_gpu.timeline import Memory, memory

WORLD_SIZE = 4
PREFETCHES = (
    None,
    BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.BACKWARD_POST,
)
STRATEGIES = (ShardingStrategy.FULL_SHARD,) * 3 + (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


class Node(nn.Module):
    """A unit: parameters of its own, perhaps, and then the units inside."""

    def __init__(self, params: list[nn.Parameter], inner: list[Node], settings: dict[str, Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)
        self.inner = nn.ModuleList(inner)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight.sum()
        for node in self.inner:
            x = node(x)
        return x


def settings_of_unit(draw: random.Random) -> dict[str, Any]:
    return {
        "sharding_strategy": draw.choice(STRATEGIES),
        "backward_prefetch": draw.choice(PREFETCHES),
        "forward_prefetch": draw.random() < 0.5,
        "mixed_precision": draw.choice([None, MixedPrecision(param_dtype=torch.bfloat16)]),
    }


def tree(
    draw: random.Random, depth: int, common: dict[str, Any], frozen: float, mixed: bool, further: float
) -> Node:
    """``frozen``, ``further``: how likely a unit is, or has segments. ``mixed``: each has settings of its
    own."""
    least = 2 if depth > 1 else 0
    count = draw.randint(least, 3) if depth else 0
    inner = [tree(draw, depth - 1, common, frozen, mixed, further) for _ in range(count)]
    sizes = [draw.randint(1, most) for most in (2_000, 400_000, 6_000_000)]
    numel = 0 if inner and draw.random() < 0.3 else draw.choice(sizes)
    settings = common | settings_of_unit(draw) if mixed else common
    params = [nn.Parameter(torch.empty(numel), requires_grad=draw.random() >= frozen)] if numel else []
    if numel and draw.random() < further:
        dtype, trains = draw.choice([(torch.float32, False), (torch.bfloat16, True), (torch.float64, False)])
        params.append(nn.Parameter(torch.empty(draw.choice(sizes), dtype=dtype), requires_grad=trains))
    return Node(params, inner, settings)


class Case:
    """A tree and its settings, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.common = settings_of_unit(draw) | {"cpu_offload": CPUOffload(draw.random() < 0.3)}
        self.use_orig_params = draw.random() < 0.5
        self.frozen, self.mixed = draw.choice([0, 0, 0.3, 0.6]), draw.random() < 0.3
        self.limits = {
            "backward_prefetch_limit": draw.choice([1, 1, 0, 2, 3]),
            "forward_prefetch_limit": draw.choice([1, 1, 2, 3]),
        }
        self.further = draw.choice([0, 0, 0.3])
        self.root = tree(draw, draw.choice([1, 2, 3]), self.common, self.frozen, self.mixed, self.further)

    @property
    def trains(self) -> bool:
        return any(param.requires_grad for param in self.root.parameters())

    def arguments(self) -> dict[str, Any]:
        """Of FullyShardedDataParallel and of plan, which call the strategy otherwise."""
        policy = CustomPolicy(
            lambda module: isinstance(module, Node) and module is not self.root and module.settings
        )
        arguments = {
            **self.root.settings,
            "auto_wrap_policy": policy,
            "use_orig_params": self.use_orig_params,
        }
        return {name: value for name, value in arguments.items() if name != "sharding_strategy"}

    def plan(self) -> fsdp_c.Summary:
        strategy = self.root.settings["sharding_strategy"]
        return fsdp_c.plan(
            self.root,
            world_size=WORLD_SIZE,
            strategy=strategy,
            device_type="cuda",
            **self.arguments(),
            **self.limits,
        )

    def wrap(self) -> FSDP:
        strategy = self.root.settings["sharding_strategy"]
        model = FSDP(self.root, sharding_strategy=strategy, device_id=0, **self.arguments())
        for name, limit in self.limits.items():
            setattr(model._exec_order_data, f"_{name}", limit)
        return model


def step(model: FSDP) -> Memory:
    with memory() as taken:
        model(torch.empty(4, device="cuda")).float().sum().backward()
    return taken


def peak(*steps: Memory) -> int:
    """Of the blocks of pools: fsdp_c's, as nobody else has one."""
    highest = 0
    for taken in steps:
        nbytes = 0
        for _, block, is_taken in taken.changes:
            if block.in_pool:
                nbytes += block.nbytes if is_taken else -block.nbytes
                highest = max(highest, nbytes)
    return highest


def measured(model: FSDP) -> tuple[int, int]:
    """The peaks of a step, and of an accumulation over three."""
    step(model)  # which has no order to follow
    clear(model)
    plain = peak(step(model))
    clear(model)
    with model.no_sync():
        parts = [step(model), step(model)]
    return plain, peak(*parts, step(model))


def clear(model: FSDP) -> None:
    for param in model.parameters():
        param.grad = None


def main(first: int, last: int) -> None:
    """Compare the trees of these seeds."""
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        case = Case(seed)
        if not case.trains:
            continue
        planned = case.plan()
        model = case.wrap()
        if fsdp_c.summary(model) != planned:
            print(f"seed {seed}: {planned.units} were planned, and {fsdp_c.summary(model).units} came out")
        expected = planned.peak_allocated_nbytes, planned.no_sync_peak_allocated_nbytes
        seen = measured(model)
        if seen != expected:
            print(f"seed {seed}: {expected} were planned, {seen} were taken")
        counts["trees"] += 1
        counts["rounded"] += expected[0] > planned.peak_unsharded_nbytes
        counts["more under no_sync"] += expected[1] > expected[0]
        counts["with segments"] += any(unit.is_segment for unit in planned.units)
        counts["less than all at once"] += 0 < expected[0] < planned.unsharded_nbytes
        del case, model
        gc.collect()
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
