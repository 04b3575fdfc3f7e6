"""FlatAdamW over bfloat16 parameters that keep what rounding takes from them: on ranks the bits of one process,
and state that is saved by original names."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import CPUOffload, checkpoint
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import FlatAdamW, param_groups
from fsdp_c.sharding.tensor_parallel import local
from tests import tensor_parallel as tp
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks

KINDS: dict[str, dict[str, Any]] = {
    "master": {"master_dtype": torch.float32, "amsgrad": True},
    "stochastic": {"rounding": "stochastic", "amsgrad": True, "seed": 7},
}
IN_8_BITS: dict[str, dict[str, Any]] = {
    "8 bits": {"state_dtype": torch.uint8, "amsgrad": True},
    "8 bits, stochastic": {"state_dtype": torch.uint8, "rounding": "stochastic", "seed": 7},
    "8 bits, master": {"state_dtype": torch.uint8, "master_dtype": torch.float32},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
every_kind = pytest.mark.parametrize("kind", [*KINDS, *IN_8_BITS])
both_views = pytest.mark.parametrize("use_orig_params", [True, False])
pytestmark = pytest.mark.filterwarnings("ignore")


def net() -> Net:
    torch.manual_seed(3)
    return Net(2).to(device(), torch.bfloat16)


def wrapped(use_orig_params: bool, module: nn.Module | None = None, **options: Any) -> Any:
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block})} | options
    return FSDP(module or net(), use_orig_params=use_orig_params, device_id=device(), **options)


def optimizer_of(model: nn.Module, kind: str) -> FlatAdamW:
    return FlatAdamW(model.parameters(), lr=1e-2, **(KINDS | IN_8_BITS)[kind])


def train(model: nn.Module, optimizer: FlatAdamW, steps: int = 3, seed: int = 0, width: int = WIDTH) -> None:
    """On the same inputs everywhere: the mean over 2 or 4 ranks is then the gradient of one, to the bit."""
    generator = torch.Generator(device()).manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(3, width, generator=generator).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states_of(model: nn.Module, optimizer: FlatAdamW) -> dict[str, Any]:
    config = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
    with warnings.catch_warnings(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return FSDP.optim_state_dict(model, optimizer)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


def assert_same(model: nn.Module, optimizer: FlatAdamW, expected: nn.Module, by: FlatAdamW) -> None:
    """Parameters and state by original names, those of ``expected`` being whole or sharded."""
    values, states = values_of(model), states_of(model, optimizer)["state"]
    is_plain = not isinstance(expected, FSDP)
    wanted = dict(expected.state_dict()) if is_plain else values_of(expected)
    named = dict(expected.named_parameters())
    wholes = (
        {name: by.state[named[name]] for name in states} if is_plain else states_of(expected, by)["state"]
    )
    assert any((value["exp_avg"] != 0).any() for value in states.values())
    for name, value in wanted.items():
        assert torch.equal(local(values[name]), local(value).to(values[name].device)), name
    for name, state in wholes.items():
        assert set(state) == set(states[name])
        for key, value in state.items():
            assert states[name][key].dtype == value.dtype
            assert torch.equal(local(states[name][key]).cpu(), local(value).cpu()), (name, key)


def steps_as_one_process(kind: str, use_orig_params: bool, strategy: str) -> None:
    mesh = init_device_mesh(device().type, (2, 2)) if "HYBRID" in strategy else None
    model = wrapped(use_orig_params, sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
    # whose draws, without original parameters, are those of whole flat parameters
    is_flat = kind == "stochastic" and not use_orig_params
    plain = wrapped(False, sharding_strategy=ShardingStrategy.NO_SHARD) if is_flat else net()
    optimizer, alone = optimizer_of(model, kind), optimizer_of(plain, kind)
    train(model, optimizer)
    train(plain, alone)
    assert_same(model, optimizer, plain, alone)


@each_kind
@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_2_ranks_step_with_the_bits_of_one_process(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, kind: str
) -> None:
    steps_as_one_process(kind, use_orig_params, strategy)


@each_kind
@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_4_ranks_step_with_the_bits_of_one_process(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, kind: str
) -> None:
    steps_as_one_process(kind, use_orig_params, strategy)


@each_kind
@both_views
@on_ranks(4)
def test_shards_of_tensor_parallel_parameters_step_with_the_bits_of_whole_local_ones(
    rank: int, world_size: int, use_orig_params: bool, kind: str
) -> None:
    pairs = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        torch.manual_seed(3)
        model = wrapped(
            use_orig_params,
            module=tp.parallelized(tp.Language().to(device(), torch.bfloat16), "mlp"),
            auto_wrap_policy=ModuleWrapPolicy({tp.Layer}),
            sharding_strategy=strategy,
            device_mesh=tp.mesh()["dp"],
        )
        optimizer = optimizer_of(model, kind)
        for step in range(3):
            model(tp.tokens(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs += [model, optimizer]
    assert_same(*pairs)


@every_kind
@on_ranks(4)
def test_tensor_parallel_state_goes_on_to_the_bit(
    rank: int, world_size: int, kind: str, tmp_path: Path
) -> None:
    def made() -> tuple[Any, FlatAdamW]:
        torch.manual_seed(3)
        module = tp.parallelized(tp.Language().to(device(), torch.bfloat16), "mlp")
        policy = ModuleWrapPolicy({tp.Layer})
        model = wrapped(True, module=module, auto_wrap_policy=policy, device_mesh=tp.mesh()["dp"])
        return model, optimizer_of(model, kind)

    def go_on(model: Any, optimizer: FlatAdamW) -> None:
        for step in range(2):
            model(tp.tokens(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = made(), made()
    go_on(*first)
    checkpoint.save(*first, tmp_path / "saved")
    checkpoint.load(*second, tmp_path / "saved")
    assert_same(*second, *first)
    for each in (first, second):
        go_on(*each)
    assert_same(*second, *first)


@on_ranks(2)
def test_averages_in_8_bits_of_ranges_of_flat_parameters_go_on_to_the_bit(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model, again = wrapped(False), wrapped(False)
    optimizer, resumed = (
        FlatAdamW(
            param_groups(one, lambda name, shape: {"weight_decay": 0.1 * (len(shape) > 1)}),
            lr=1e-2,
            **IN_8_BITS["8 bits"],
        )
        for one in (model, again)
    )
    train(model, optimizer)
    checkpoint.save(model, optimizer, tmp_path / "saved")
    checkpoint.load(again, resumed, tmp_path / "saved")
    for one, other in ((model, optimizer), (again, resumed)):
        train(one, other, steps=2, seed=1)
    assert_same(again, resumed, model, optimizer)


@on_ranks(2)
def test_ranges_of_flat_parameters_draw_as_whole_ones(rank: int, world_size: int) -> None:
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    models = [wrapped(False, sharding_strategy=strategy) for strategy in strategies]
    optimizers = []
    for model in models:
        groups = param_groups(model, lambda name, shape: {"weight_decay": 0.1 * (len(shape) > 1)})
        assert sum(len(group["params"]) for group in groups) == len(list(net().parameters()))
        optimizers.append(FlatAdamW(groups, lr=1e-2, **KINDS["stochastic"]))
        train(model, optimizers[-1])
    assert_same(models[0], optimizers[0], models[1], optimizers[1])


@pytest.mark.parametrize("kind", IN_8_BITS)
@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_averages_in_8_bits_have_the_bits_of_one_process_where_no_block_is_divided(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, kind: str
) -> None:
    """Each rank's shard of a matrix is a block, or two."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2))).to(device(), torch.bfloat16)
    mesh = init_device_mesh(device().type, (2, 2)) if strategy == "HYBRID_SHARD" else None
    model = FSDP(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        device_id=device(),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
    )
    optimizer, alone = optimizer_of(model, kind), optimizer_of(plain, kind)
    train(model, optimizer, width=32)
    train(plain, alone, width=32)
    expected = {name: alone.state_dict()["state"][index] for index, name in enumerate(plain.state_dict())}
    states = states_of(model, optimizer)["state"]
    for name, value in plain.state_dict().items():
        assert torch.equal(values_of(model)[name], value)
        for key, one in expected[name].items():
            assert states[name][key].dtype == one.dtype
            assert torch.equal(states[name][key].reshape(-1).cpu(), one.reshape(-1).cpu()), (name, key)


@both_views
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_averages_in_8_bits_of_divided_blocks_are_near_those_of_one_process(
    rank: int, world_size: int, offload: bool, use_orig_params: bool
) -> None:
    model = wrapped(use_orig_params, cpu_offload=CPUOffload(offload))
    plain = net()
    optimizer, alone = optimizer_of(model, "8 bits, master"), optimizer_of(plain, "8 bits, master")
    train(model, optimizer, steps=1)
    train(plain, alone, steps=1)
    states = states_of(model, optimizer)["state"]
    exact = alone.state_dict()["state"]
    for key, rtol in (("exp_avg", 0.45 / 64), ("exp_avg_sq", 0.45 / 128)):
        bound = 2 * rtol * max(state[key].abs().max() for state in exact.values())  # rounded here and there
        for index, name in enumerate(dict(plain.named_parameters())):
            assert ((states[name][key].cpu() - exact[index][key].cpu()).abs() <= bound.cpu()).all(), name
    assert any(state["exp_avg"].any() for state in states.values())


@every_kind
@both_views
@pytest.mark.parametrize("how", ["full", "sharded", "checkpoint"])
@on_ranks(2)
def test_what_is_saved_goes_on_to_the_bit(
    rank: int, world_size: int, how: str, use_orig_params: bool, kind: str, tmp_path: Path
) -> None:
    model = wrapped(use_orig_params)
    optimizer = optimizer_of(model, kind)
    train(model, optimizer)
    again = wrapped(use_orig_params)
    resumed = optimizer_of(again, kind)
    if how == "checkpoint":
        checkpoint.save(model, optimizer, tmp_path / "saved")
        checkpoint.load(again, resumed, tmp_path / "saved")
    else:
        form = StateDictType.FULL_STATE_DICT if how == "full" else StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(model, form), FSDP.state_dict_type(again, form):
            again.load_state_dict(model.state_dict())
            saved = FSDP.optim_state_dict(model, optimizer)
            resumed.load_state_dict(FSDP.optim_state_dict_to_load(again, resumed, saved))
    if kind not in KINDS and how == "checkpoint":  # at once, and not at the first step
        averages = [(param.device, state["exp_avg"]) for param, state in resumed.state.items() if state]
        assert averages and all(each.dtype == torch.uint8 and each.device == at for at, each in averages)
    assert_same(again, resumed, model, optimizer)
    for one, other in ((model, optimizer), (again, resumed)):
        train(one, other, steps=2, seed=1)
    assert kind in KINDS or all("exp_avg_scale" in state for state in resumed.state.values())
    assert_same(again, resumed, model, optimizer)


@on_ranks(2)
def test_how_state_is_kept_is_the_optimizers_own_whatever_a_checkpoint_says(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    saving, loading = wrapped(True), wrapped(True)
    saved, resumed = FlatAdamW(saving.parameters(), lr=1e-3), optimizer_of(loading, "8 bits, master")
    train(saving, saved)
    checkpoint.save(saving, saved, tmp_path / "saved")
    checkpoint.load(loading, resumed, tmp_path / "saved")
    (group,) = resumed.param_groups
    assert (group["state_dtype"], group["master_dtype"], group["lr"]) == (torch.uint8, torch.float32, 1e-3)
    train(loading, resumed)
    assert all(state["exp_avg"].dtype == torch.uint8 for state in resumed.state.values())


@on_ranks(2)
def test_masters_go_into_another_wrapping_and_out_of_torchs_state(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = wrapped(False)
    optimizer = optimizer_of(model, "master")
    train(model, optimizer)
    checkpoint.save(model, optimizer, tmp_path / "saved")
    again = wrapped(True, auto_wrap_policy=None)
    resumed = optimizer_of(again, "master")
    checkpoint.load(again, resumed, tmp_path / "saved")
    assert_same(again, resumed, model, optimizer)
    theirs = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, theirs)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(again, resumed, states_of(model, theirs)))
    assert all("master_low" not in state for state in resumed.state.values())
    train(again, resumed, steps=1)
    lows = [state["master_low"] for state in resumed.state.values() if state["master_low"].numel()]
    assert any(low.any() for low in lows)
