"""HYBRID_SHARD and _HYBRID_SHARD_ZERO2 on four ranks: shards inside a pair of ranks, replicas across the
pairs.

Results are bitwise torch's FSDP1's, however the groups are passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from tests.models import Net
from tests.parity.engine import Point, Run, Scenario, assert_same_record, compare, record_run
from tests.parity.scenarios import (
    accumulate_step,
    clip_step,
    no_sync_after_sync_step,
    no_sync_step,
    plain_step,
    with_arguments,
)
from tests.ranks import both_views, device, on_ranks

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STEPS: dict[str, Callable[[Run], None]] = {
    "plain": plain_step,
    "accumulate": accumulate_step,
    "no_sync": no_sync_step,
    "no_sync_after_sync": no_sync_after_sync_step,
    "clip": clip_step(2.0),
    "clip by the largest": clip_step(float("inf")),
}


@functools.cache
def mesh(replicas: int, shards: int) -> DeviceMesh:
    """Return this process' mesh. Created once, since groups live as long as the ranks."""
    return DeviceMesh(
        device().type,
        torch.arange(replicas * shards, device="cpu").view(replicas, shards),
        mesh_dim_names=("replicate", "shard"),
    )


def groups(replicas: int, shards: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's (shard, replicate) pair of groups."""
    return mesh(replicas, shards).get_group(1), mesh(replicas, shards).get_group(0)


def hybrid(**changes: Any) -> Callable[[Run], nn.Module]:
    """Return a builder of a Net with one unit per block over (shard, replicate) groups of two ranks each."""
    return with_arguments(**(changes or {"process_group": groups(2, 2)}))


# ------------------------------------------------------------------ equal to torch


@pytest.mark.parametrize(
    ("precision", "step"),
    [*(("fp32", step) for step in STEPS)]
    + [
        (precision, "no_sync_after_sync")
        for precision in ("bf16_reduce_fp32", "reduce_bf16", "bf16", "keep_low")
    ],
)
@pytest.mark.parametrize("strategy", HYBRID)
@on_ranks(4)
def test_hybrid_training_equals_torch(
    rank: int, world_size: int, strategy: str, precision: str, step: str
) -> None:
    use_orig_params = precision in ("fp32", "bf16")
    point = Point(step, strategy, use_orig_params=use_orig_params, precision=precision)
    compare(point, Scenario(hybrid(), STEPS[step]), rank, world_size)


@on_ranks(4)
def test_groups_by_node_equal_the_explicit_pair(rank: int, world_size: int) -> None:
    """On the CPU a node has LOCAL_WORLD_SIZE ranks. torch assumes one device per node there."""
    point = Point("by_node", "HYBRID_SHARD")
    expected = record_run(point, Scenario(hybrid(), plain_step), "torch", rank, world_size)
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        actual = record_run(
            point, Scenario(hybrid(process_group=None), plain_step), "fsdp_c", rank, world_size
        )
    assert_same_record(point, expected, actual)


@on_ranks(4)
def test_a_replicate_group_of_one_equals_torch(rank: int, world_size: int) -> None:
    """(1, 4) is plain sharding in torch too. For shard groups of one see tests/parity/test_differences.py."""
    point = Point("degenerate", "HYBRID_SHARD", use_orig_params=False)
    compare(point, Scenario(hybrid(process_group=groups(1, world_size)), plain_step), rank, world_size)


def mixed(run: Run) -> nn.Module:
    """Wrap a hybrid root around units that are sharded over all ranks, over a pair, and not at all."""
    model = Net()
    others = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for index, name in enumerate(others):
        model.blocks[index] = run.wrap(model.blocks[index], sharding_strategy=ShardingStrategy[name])
    return run.wrap(model, process_group=groups(2, 2))


@both_views
@on_ranks(4)
def test_mixed_strategies_equal_torch(rank: int, world_size: int, use_orig_params: bool) -> None:
    point = Point("mixed", "HYBRID_SHARD", use_orig_params=use_orig_params)
    compare(point, Scenario(mixed, no_sync_step), rank, world_size)
