"""Ranks that wrap different models hear of it before the first collective, all of them (parity 21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import agreement
from tests.models import WIDTH, Block, Net
from tests.ranks import on_ranks

X = torch.ones(3, WIDTH)
CPU = torch.device("cpu")


def wrap(module: nn.Module, **arguments: Any) -> FSDP:
    return FSDP(module, **({"device_id": CPU, "use_orig_params": True} | arguments))


def per_block(module: nn.Module | None = None, **arguments: Any) -> FSDP:
    return wrap(module or Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def net_with(change: Callable[[Net], None]) -> Net:
    net = Net()
    change(net)
    return net


def wider(net: Net) -> None:
    net.blocks[1].up = nn.Linear(WIDTH, 9)
    net.blocks[1].down = nn.Linear(9, WIDTH, bias=False)


def another_name(net: Net) -> None:
    net.last = net.head
    net.head = nn.Identity()


def without_bias(net: Net) -> None:
    net.blocks[2].up = nn.Linear(WIDTH, 7, bias=False)


DIFFERENT: dict[str, tuple[Callable[[], FSDP], str]] = {
    "shape": (
        lambda: per_block(net_with(wider)),
        "unit 2, the module 'blocks.1': shape of up.weight is (7, 5) on rank 0; (9, 5) on rank 1",
    ),
    "name": (
        lambda: per_block(net_with(another_name)),
        "unit 0, the root: parameter 2 is 'head.weight' on rank 0; 'last.weight' on rank 1",
    ),
    "one parameter fewer": (
        lambda: per_block(net_with(without_bias)),
        "unit 3, the module 'blocks.2': parameter 3 is 'up.bias' on rank 0; 'down.weight' on rank 1",
    ),
    "one unit": (lambda: wrap(Net()), "unit 0, the root: parameter 2 is 'head.weight' on rank 0; "),
    "more units": (
        lambda: per_block(Net(4)),
        "unit 4, the module 'blocks.3': module is none on rank 0; 'blocks.3' on rank 1",
    ),
    "dtype": (lambda: per_block(Net().double()), "the root: dtype is 'torch.float32' on rank 0; 'torch.float64' on"),
    "sharding strategy": (
        lambda: per_block(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "sharding_strategy is 'FULL_SHARD' on rank 0; 'SHARD_GRAD_OP' on rank 1",
    ),
    "use_orig_params": (lambda: per_block(use_orig_params=False), "use_orig_params is True on rank 0; False on rank 1"),
    "mixed precision": (
        lambda: per_block(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)),
        "mixed_precision is 'param_dtype torch.float32, reduce_dtype torch.float32' on rank 0; 'param_dtype",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(2)
def test_every_rank_is_told_the_first_difference(rank: int, world_size: int, what: str) -> None:
    build, message = DIFFERENT[what]
    model = per_block() if rank == 0 else build()
    with pytest.raises(RuntimeError, match="^ranks wrap different models") as found:
        model(X)
    assert message in str(found.value)
    dist.barrier()  # nothing is left unpaired
    per_block()(X)


@on_ranks(4)
def test_one_replica_among_four_ranks_is_named_by_all(rank: int, world_size: int) -> None:
    """Over a shard group and its replicas each rank hears of a difference in a group that it is not in."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model = per_block(net_with(wider) if rank == 2 else None, **arguments)
    with pytest.raises(RuntimeError) as found:
        model(X)
    assert "shape of up.weight is (7, 5) on ranks 0, 1, 3; (9, 5) on rank 2" in str(found.value)
    per_block(**arguments)(X)


@on_ranks(2)
def test_error_of_one_rank_is_told_to_the_others(rank: int, world_size: int) -> None:  # parity 27
    model = per_block()
    if rank == 1:
        model.blocks[1].limit_all_gathers = False
    kind = ValueError if rank == 1 else RuntimeError
    with pytest.raises(kind, match="Expects one homogeneous value for limit_all_gathers") as found:
        model(X)
    assert rank == 1 or "rank 1: " in str(found.value)
    model.blocks[1].limit_all_gathers = True
    model(X)


@on_ranks(2)
def test_units_over_part_of_the_ranks_may_differ(rank: int, world_size: int) -> None:
    """Each rank has an expert of its own size, in a group of its own."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    expert = nn.Sequential(nn.Linear(WIDTH, 3 + rank), nn.Linear(3 + rank, WIDTH))
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), wrap(expert, process_group=groups[rank])))
    model(X).sum().backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_plans_are_compared_once_and_again_when_they_have_changed(rank: int, world_size: int, strategy: str) -> None:
    with mock.patch.object(agreement, "_gather", wraps=agreement._gather) as gather:
        model = per_block(sharding_strategy=ShardingStrategy[strategy])
        assert gather.call_count == 0
        for _ in range(2):
            model(X).sum().backward()
        model._reset_lazy_init()
        model(X)
        assert gather.call_count == 1
        model.double()
        model(X.double())
        assert gather.call_count == 2


@on_ranks(2)
def test_looking_at_parameters_compares_nothing(rank: int, world_size: int) -> None:
    """Where nothing is sharded one rank alone may save; it must not wait for the others."""
    model = per_block(sharding_strategy=ShardingStrategy.NO_SHARD)
    if rank == 0:
        assert set(model.state_dict()) == set(Net().state_dict())
        with FSDP.summon_full_params(model):
            pass
    model(X)


@on_ranks(1)
def test_one_rank_compares_nothing(rank: int, world_size: int) -> None:
    with mock.patch.object(agreement, "_gather", side_effect=AssertionError):
        per_block()(X)


@on_ranks(2)
def test_group_that_sends_nothing_agrees(rank: int, world_size: int) -> None:
    model = per_block(Net(3 + rank))
    silent = lambda digest, group, device: [bytes(agreement.DIGEST_NBYTES)] * world_size  # noqa: E731
    with mock.patch.object(agreement, "_gather", silent):
        agreement.agree(model, [("", model)], None)
