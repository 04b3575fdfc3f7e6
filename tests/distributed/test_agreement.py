"""If ranks wrap different models, all ranks raise an error before the first collective."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding import agreement
from fsdp_c.sharding.sharded_module import units_with_paths
from tests.models import WIDTH, Net
from tests.ranks import device, on_ranks
from tests.training import PER_BLOCK, wrap

X = torch.ones(3, WIDTH)


def per_block(module: nn.Module | None = None, **arguments: Any) -> FSDP:
    return wrap(module or Net(), auto_wrap_policy=PER_BLOCK, **arguments)


def wider() -> Net:
    net = Net()
    net.blocks[1].up = nn.Linear(WIDTH, 9)
    net.blocks[1].down = nn.Linear(9, WIDTH, bias=False)
    return net


def wider_elsewhere() -> Net:
    net = wider()
    net.layers = net.blocks
    del net.blocks
    return net


DIFFERENT: dict[str, tuple[Callable[[], FSDP], str]] = {
    "shape": (
        lambda: per_block(wider()),
        "unit 2, the module 'blocks.1': parameter 2 is 'up.weight' of shape (7, 5) on rank 0; 'up.weight' of "
        "shape (9, 5) on rank 1",
    ),
    "more units": (
        lambda: per_block(Net(4)),
        "unit 4, the module 'blocks.3': module is none on rank 0; 'blocks.3' on rank 1",
    ),
    "shape and names": (
        lambda: per_block(wider_elsewhere()),
        "unit 2, the module 'blocks.1' on rank 0, the module 'layers.1' on rank 1: parameter 2 is "
        "'up.weight' of shape",
    ),
    "dtype": (
        lambda: per_block(Net().double()),
        "the root: dtype is 'torch.float32' on rank 0; 'torch.float64' on",
    ),
    "sharding strategy": (
        lambda: per_block(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "sharding_strategy is 'FULL_SHARD' on rank 0; 'SHARD_GRAD_OP' on rank 1",
    ),
    "use_orig_params": (
        lambda: per_block(use_orig_params=False),
        "use_orig_params is True on rank 0; False on rank 1",
    ),
    "mixed precision": (
        lambda: per_block(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)),
        "mixed_precision is 'param_dtype torch.float32, reduce_dtype torch.float32' on rank 0; 'param_dtype",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
@on_ranks(2)
def test_every_rank_names_the_first_difference(rank: int, difference: str) -> None:
    build, message = DIFFERENT[difference]
    model = per_block() if rank == 0 else build()
    with pytest.raises(RuntimeError, match="^ranks wrap different models") as found:
        model(X)
    assert message in str(found.value)
    dist.barrier()  # all collectives are paired
    per_block()(X)


@on_ranks(4)
def test_one_replica_among_four_ranks_is_named_by_all(rank: int) -> None:
    """Each rank learns of a difference in any group, also in one without it, through shard and replicate
    groups.
    """
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model = per_block(wider() if rank == 2 else None, **arguments)
    with pytest.raises(RuntimeError) as found:
        model(X)
    assert "(7, 5) on ranks 0 to 1, 3; 'up.weight' of shape (9, 5) on rank 2" in str(found.value)
    per_block(**arguments)(X)


@on_ranks(2)
def test_optimizer_state_under_names_that_differ_is_refused_on_all_ranks(rank: int) -> None:
    """Ranks that ignore different modules train, though the names of later modules differ."""
    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(rank + 1)]
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *experts, nn.Linear(WIDTH, WIDTH))
    model = wrap(layers, ignored_modules=experts)
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=f"by different names.*'{rank + 2}.weight'"):
        FSDP.optim_state_dict(model, optimizer)
    assert f"{rank + 2}.weight" in model.state_dict()


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_the_others(rank: int) -> None:
    model = per_block()
    if rank == 1:
        model.blocks[1].limit_all_gathers = False
    kind = ValueError if rank == 1 else RuntimeError
    with pytest.raises(kind, match="Expects one homogeneous value for limit_all_gathers") as found:
        model(X)
    assert rank == 1 or "rank 1: " in str(found.value)
    model.blocks[1].limit_all_gathers = True
    model(X)


@pytest.mark.parametrize("with_it", [(0,), (1, 2)], ids=["rank 0", "ranks 1 and 2"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_sync_module_states_on_some_ranks_only_is_refused(
    rank: int, strategy: str, with_it: tuple[int, ...]
) -> None:
    mesh = init_device_mesh(device().type, (2, 2)) if strategy == "HYBRID_SHARD" else None
    torch.manual_seed(1)  # only the argument differs
    with pytest.raises(RuntimeError) as found:
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "device_mesh": mesh}
        per_block(sync_module_states=rank in with_it, **arguments)(X)
    named = re.findall(r"^rank (\d): unit Net is wrapped with sync_module_states", str(found.value), re.M)
    assert named == [str(one) for one in with_it]
    model = per_block(sync_module_states=True, **arguments)
    model(X)


@on_ranks(2)
def test_units_over_part_of_the_ranks_may_differ(rank: int, world_size: int) -> None:
    """Each rank has an expert of its own size, in a group of one rank."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    expert = nn.Sequential(nn.Linear(WIDTH, 3 + rank), nn.Linear(3 + rank, WIDTH))
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), wrap(expert, process_group=groups[rank])))
    model(X).sum().backward()


@on_ranks(2)
def test_a_group_without_peers_agrees(rank: int, world_size: int) -> None:
    model, heard = (per_block(Net(3 + rank)) for _ in range(2))
    garbage = [bytes([other]) * agreement.DIGEST_NBYTES for other in range(world_size)]
    with mock.patch.object(agreement, "_gather", return_value=garbage) as gather:
        agreement.agree(model, list(units_with_paths(model)), None)
    assert gather.called
    with pytest.raises(RuntimeError, match="on rank 1"):  # the plans do differ
        agreement.agree(heard, list(units_with_paths(heard)), None)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_plans_are_compared_once_and_again_after_a_change(strategy: str) -> None:
    """Not when parameters are read: under NO_SHARD a single rank may save."""
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    with mock.patch.object(agreement, "_gather", wraps=agreement._gather) as gather:
        per_block(sync_module_states=True, **options)  # compares this argument at construction
        assert gather.call_count == 1
        model = per_block(**options)
        assert set(model.state_dict()) == set(Net().state_dict())
        with FSDP.summon_full_params(model):
            pass
        assert gather.call_count == 1
        for _ in range(2):
            model(X).sum().backward()
        model._reset_lazy_init()
        model(X)
        assert gather.call_count == 2
        model.double()
        model(X.double())
        assert gather.call_count == 3
