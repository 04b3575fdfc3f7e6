"""Models over a part of the ranks, and units of one name over several groups: no call waits for ranks without
the model, and no group loads or saves another group's values.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_dcp_state_dict import seen_as_fsdp
from tests.pairwise import pairwise
from tests.parity.engine import same_bits
from tests.ranks import VIEWS, both_views, device, on_ranks
from tests.training import assert_same, wrap

WIDTH = 6


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(3, WIDTH, device=device())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return copies of this rank's parameters and of their optimizer state."""
    found = {f"model.{name}": param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state[param].items():
            found[f"optim.{name}.{key}"] = torch.as_tensor(value).clone()
    return found


# ----------------------------------------------------------------- an expert of each group


def groups_of_experts(rank: int, world_size: int) -> dist.ProcessGroup:
    """Ranks 0, 2, ... have one expert, ranks 1, 3, ... the other."""
    return [dist.new_group(list(range(first, world_size, 2))) for first in range(2)][rank % 2]


def trained_expert(
    rank: int,
    world_size: int,
    seed: int,
    group: Any = None,
    name: str = "expert",
    use_orig_params: bool = True,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model over all ranks with one unit over ``group``, of values by ``seed``, trained for a step."""
    group = group or groups_of_experts(rank, world_size)
    model = nn.Sequential()
    model.add_module("rest", net(7))
    model.add_module(name, wrap(net(seed), process_group=group, use_orig_params=use_orig_params))
    model = wrap(model, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, seed)
    return model, optimizer


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@both_views
@on_ranks(4)
def test_a_save_that_would_mix_experts_is_refused(
    rank: int, world_size: int, use_orig_params: bool, background: bool
) -> None:
    model, optimizer = trained_expert(rank, world_size, seed=rank % 2, use_orig_params=use_orig_params)
    path = folder_of_ranks() / "saved"
    values_differ = r"weight: ranks 0, 2 and ranks 1, 3 hold different values of it, in units of the name"
    with pytest.raises(CheckpointError, match=rf"model\.expert\.0\.{values_differ} 'expert'"):
        checkpoint.save(model, optimizer, path, background=background).wait()
    dist.barrier()
    assert [*path.parent.iterdir()] == []
    before = values(model, None)
    step(model, optimizer, seed=3)  # training continues
    after = {name: value for name, value in values(model, None).items() if value.numel()}
    assert after and not [name for name in after if same_bits(after[name], before[name])]


@on_ranks(2)
def test_experts_that_differ_in_shape_or_state_alone_are_refused(rank: int, world_size: int) -> None:
    group = groups_of_experts(rank, world_size)
    odd = nn.Sequential()
    odd.add_module("rest", net(7))
    odd.add_module("expert", wrap(nn.Linear(WIDTH, WIDTH + rank), process_group=group))
    with pytest.raises(CheckpointError, match="ranks? 0 and rank 1 hold different values"):
        checkpoint.save(wrap(odd), None, folder_of_ranks() / "saved")
    model, optimizer = trained_expert(rank, world_size, seed=0, group=group)
    for param in model.expert.parameters():
        optimizer.state[param]["exp_avg"].add_(rank)
    with pytest.raises(
        CheckpointError, match=r"optim\.state\.expert\.0\.weight\.exp_avg: rank 0 and rank 1 hold"
    ):
        checkpoint.save(model, optimizer, folder_of_ranks() / "saved")


@pairwise(use_orig_params=VIEWS, background=[False, True], equal=[True, False])
@on_ranks(4)
def test_experts_that_are_equal_or_have_names_of_their_own_are_saved(
    rank: int, world_size: int, use_orig_params: bool, background: bool, equal: bool
) -> None:
    options = {"name": "expert" if equal else f"expert{rank % 2}", "use_orig_params": use_orig_params}
    model, optimizer = trained_expert(rank, world_size, seed=5 if equal else rank % 2, **options)
    expected, path = values(model, optimizer), folder_of_ranks() / "saved"
    checkpoint.save(model, optimizer, path, background=background).wait()
    dist.barrier()
    model, optimizer = trained_expert(rank, world_size, seed=8, **options)
    checkpoint.load(model, optimizer, path, strict=equal)
    assert_same(values(model, optimizer), expected)


@on_ranks(4)
def test_experts_are_saved_each_with_its_own_group(rank: int, world_size: int) -> None:
    group = groups_of_experts(rank, world_size)
    model, _ = trained_expert(rank, world_size, seed=rank % 2, group=group)
    expected, path = values(model.expert, None), folder_of_ranks()
    for explicit in (group, None):
        checkpoint.save(model.expert, None, path / f"{explicit is None}{rank % 2}", process_group=explicit)
        other, _ = trained_expert(rank, world_size, seed=9, group=group)
        checkpoint.load(other.expert, None, path / f"{explicit is None}{rank % 2}", process_group=explicit)
        assert_same(values(other.expert, None), expected)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("views", ["flat", "original", "named apart"])
@on_ranks(4)
def test_state_dicts_of_experts_are_each_ranks_own_and_are_warned_of(
    rank: int, world_size: int, views: str, kind: str
) -> None:
    name = f"expert{rank % 2}" if views == "named apart" else "expert"
    model, optimizer = trained_expert(rank, world_size, rank % 2, None, name, views != "flat")
    expected = values(model, optimizer)
    if views == "named apart":  # rank 0 alone would lack the other expert
        whole = FullOptimStateDictConfig(rank0_only=True)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, None, whole)
        with pytest.raises(RuntimeError, match=f"by different names.*'expert{rank % 2}.0.bias'"):
            FSDP.optim_state_dict(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP.set_state_dict_type(model, StateDictType[kind])
        states = [(model.state_dict(), FSDP.optim_state_dict(model, optimizer)) for _ in range(2)]
    words = [str(one.message) for one in caught if "hold unit" in str(one.message)]
    assert len(words) == 1 and f"ranks {rank % 2}, {rank % 2 + 2} hold unit '{name}'" in words[0]
    step(model, optimizer, seed=5)
    model.load_state_dict(states[1][0])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1][1]))
    assert_same(values(model, optimizer), expected)


# ----------------------------------------------------------------- a model of two ranks of four


def of_two(
    rank: int, kind: str, use_orig_params: bool, seed: int
) -> tuple[Any, torch.optim.Optimizer] | None:
    """A model that only ranks 1 and 2 make, trained for a step; None on the other ranks."""
    pair, alone = dist.new_group([1, 2]), [dist.new_group([one]) for one in range(4)]
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "process_group": pair}
    if rank not in (1, 2):
        return None
    if kind == "replicas":
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": (alone[rank], pair)}
    if kind == "mesh":
        mesh = dist.device_mesh.DeviceMesh.from_group(pair, device().type, mesh_dim_names=("shard",))
        options |= {"device_mesh": mesh, "process_group": None}
    if kind == "expert":
        model = nn.Sequential(net(seed), wrap(net(seed), **options | {"process_group": alone[rank]}))
    else:
        model = net(seed)
    model = wrap(model, **options)
    if kind == "inside":
        model = nn.Sequential(net(2), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, seed)
    return model, optimizer


of_two_ranks = pytest.mark.parametrize("kind", ["group", "replicas", "mesh", "inside", "expert"])


@of_two_ranks
@both_views
@on_ranks(4)
def test_two_ranks_of_four_save_and_load_by_themselves(rank: int, kind: str, use_orig_params: bool) -> None:
    made, path = of_two(rank, kind, use_orig_params, 1), folder_of_ranks()
    if made is None:
        return
    model, optimizer = made
    expected = values(model, optimizer)
    checkpoint.save(model, optimizer, path / "now")
    checkpoint.save(model, optimizer, path / "then", background=True).wait()
    for saved in ("now", "then"):
        step(model, optimizer, 5)
        checkpoint.load(model, optimizer, path / saved)
        assert_same(values(model, optimizer), expected)


def convert(model: Any, optimizer: torch.optim.Optimizer, how: str) -> Any:
    """Save and convert the optimizer's state by the functions named ``how``, for ``optimizer.load_state_dict``."""
    by = fsdp_c.OptimStateKeyType
    rank0 = how in ("rank0", "scatter")
    sharded = how in ("sharded", "flatten")
    full = StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0)
    rows = StateDictType.SHARDED_STATE_DICT, None, ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, *(rows if sharded else full)):
        if how in ("full", "rank0", "sharded"):
            state = FSDP.optim_state_dict(model, optimizer)
            return FSDP.optim_state_dict_to_load(model, optimizer, state)
        if how == "flatten":
            state = FSDP.sharded_optim_state_dict(model, optimizer)
            return FSDP.flatten_sharded_optim_state_dict(state, model, optimizer)
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0)
        if how == "scatter":
            return FSDP.scatter_full_optim_state_dict(state or None, model, optim=optimizer)
        for key in (by.PARAM_ID, by.PARAM_NAME) if how == "rekey" else ():
            state = FSDP.rekey_optim_state_dict(state, key, model, optim=optimizer)
        return FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)


HOW = ["full", "rank0", "sharded", "flatten", "scatter", "shard", "rekey"]


@of_two_ranks
@both_views
@on_ranks(4)
def test_two_ranks_of_four_convert_the_optimizers_state(rank: int, kind: str, use_orig_params: bool) -> None:
    made = of_two(rank, kind, use_orig_params, 1)
    if made is None:
        return
    model, optimizer = made
    expected = values(model, optimizer)
    for how in HOW:
        if (kind == "mesh" and how == "flatten") or (how == "rekey" and not use_orig_params):
            continue  # parameters of one name each
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = copy.deepcopy(convert(model, optimizer, how))
        for param in model.parameters():
            for value in optimizer.state[param].values():
                value.fill_(7)
        optimizer.load_state_dict(state)
        assert_same(values(model, optimizer), expected)


@both_views
@on_ranks(4)
def test_two_ranks_of_four_use_dcp(rank: int, use_orig_params: bool) -> None:
    made, path = of_two(rank, "group", use_orig_params, 1), folder_of_ranks()
    if made is None:
        return
    model, optimizer = made
    expected = values(model, optimizer)
    group = model.process_group
    with warnings.catch_warnings(), seen_as_fsdp("fsdp_c"):
        warnings.simplefilter("ignore")
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.save(state, checkpoint_id=path / "saved", process_group=group)
        step(model, optimizer, 5)
        dcp.load(state, checkpoint_id=path / "saved", process_group=group)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(values(model, optimizer), expected)


@on_ranks(4)
def test_two_ranks_of_four_clip_and_scale(rank: int) -> None:
    made = of_two(rank, "group", True, 1)
    if made is None:
        return
    model, optimizer = made
    optimizer.zero_grad()
    scaler = fsdp_c.ShardedGradScaler(device().type, init_scale=4.0, growth_interval=1)
    for _ in range(2):
        loss = model(torch.full((2, WIDTH), float(rank), device=device())).sum()
        scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        assert not norm.isfinite()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    shapes = [param.shape for param in net(1).parameters()]
    with FSDP.summon_full_params(model):
        assert [param.shape for param in model.parameters()] == shapes


@on_ranks(4)
def test_two_models_of_two_ranks_each_are_not_saved_over_one_another(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, path = wrap(net(rank // 2), process_group=groups[rank // 2]), folder_of_ranks()
    expected = values(model, None)
    checkpoint.save(model, None, path / f"model-{rank // 2}")
    checkpoint.load(model, None, path / f"model-{rank // 2}")
    assert_same(values(model, None), expected)
    if rank < 2:
        checkpoint.save(model, None, path / "one")
    dist.barrier()
    if rank >= 2:
        with pytest.raises(CheckpointError, match="ranks 2 to 3 hold this model, and other ranks of the job"):
            checkpoint.save(model, None, path / "one")
    dist.barrier()
    with pytest.raises(CheckpointError, match="ranks 0 to 1 and ranks 2 to 3 hold different values"):
        checkpoint.save(model, None, path / "one", process_group=dist.group.WORLD)
    if rank < 2:
        checkpoint.load(model, None, path / "one")
        assert_same(values(model, None), expected)
