"""fsdp_c.optim.param_groups: groups by the names and shapes that parameters had before wrapping."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import CPUOffload, ShardingStrategy, StateDictType, checkpoint
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import param_groups
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks

fused_adamw = partial(torch.optim.AdamW, fused=True)


def decay_matrices(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"weight_decay": 0.5 if len(shape) > 1 else 0.0}


def by_depth(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"lr": 0.01} if "blocks.1" in name else {}


def wrapped(net: nn.Module, **options: Any) -> FSDP:
    return FSDP(copy.deepcopy(net), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device(), **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator(device()).manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rule", "use_orig_params"), [(decay_matrices, True), (by_depth, True), (by_depth, False)]
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, fused_adamw])
@on_ranks(2)
def test_groups_train_as_those_of_the_model_before_wrapping(
    rule: Any, use_orig_params: bool, kind: Any
) -> None:
    torch.manual_seed(5)
    plain = Net().to(device())
    model = wrapped(plain, use_orig_params=use_orig_params)
    optimizer = kind(param_groups(model, rule), lr=0.1)
    named = list(plain.named_parameters())
    expected = kind([{"params": [param], **rule(name, param.shape)} for name, param in named], lr=0.1)
    trained(plain, expected)
    trained(model, optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    groups = FSDP.optim_state_dict(model, optimizer)["param_groups"]
    assert len(groups) == 2
    for group in groups:
        options = {key: group[key] for key in ("lr", "weight_decay")}
        defaults = {"lr": 0.1, "weight_decay": 0.01}
        expected_names = {name for name, param in named if defaults | rule(name, param.shape) == options}
        assert set(group["params"]) == expected_names and expected_names


def optimizer_of(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind(param_groups(model, decay_matrices), lr=0.1)


def plain_groups(net: nn.Module, rule: Any) -> list[dict[str, Any]]:
    return [{"params": [param], **rule(name, param.shape)} for name, param in net.named_parameters()]


def assert_trained(model: nn.Module, plain: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(True)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, fused_adamw])
@on_ranks(2)
def test_a_rule_may_divide_flat_parameters(kind: Any, options: str) -> None:
    torch.manual_seed(5)
    plain = Net().to(device())
    model = wrapped(plain, **OPTIONS[options])
    optimizer = optimizer_of(kind, model)
    for _ in range(2):
        trained(model, optimizer)
    expected = kind(plain_groups(plain, decay_matrices), lr=0.1)
    for _ in range(2):
        trained(plain, expected)
    assert_trained(model, plain)
    assert all(param.grad is None for param in model.parameters())


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
@on_ranks(2)
def test_state_of_divided_flat_parameters_is_saved_by_original_names_and_goes_on(
    sharded: bool, strategy: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    plain = Net().to(device())
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    kind = StateDictType.SHARDED_STATE_DICT if sharded else StateDictType.FULL_STATE_DICT
    model = wrapped(plain, **options)
    optimizer = optimizer_of(fused_adamw, model)
    trained(model, optimizer)
    expected = torch.optim.AdamW(plain_groups(plain, decay_matrices), lr=0.1)
    trained(plain, expected)
    with FSDP.state_dict_type(model, kind):
        values, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    checkpoint.save(model, optimizer, tmp_path / "saved")
    names = {name: param for name, param in plain.named_parameters()}
    assert set(states["state"]) == set(names)
    for group in states["param_groups"]:
        assert {names[name].ndim > 1 for name in group["params"]} == {group["weight_decay"] > 0}
    if not sharded:
        for name, param in names.items():
            average = expected.state[param]["exp_avg"]
            torch.testing.assert_close(states["state"][name]["exp_avg"], average.cpu())
    trained(plain, expected)
    for how in ("state dict", "checkpoint", "original parameters"):
        again = wrapped(Net(), **options, use_orig_params=how == "original parameters")
        resumed = optimizer_of(fused_adamw, again)
        if how == "checkpoint":
            checkpoint.load(again, resumed, tmp_path / "saved")
        else:
            with FSDP.state_dict_type(again, kind):
                again.load_state_dict(values)
                resumed.load_state_dict(FSDP.optim_state_dict_to_load(again, resumed, states))
        trained(again, resumed)
        assert_trained(again, plain)


@on_ranks(2)
def test_ranges_follow_their_module_and_refuse_what_no_sync_has_left() -> None:
    torch.manual_seed(5)
    model = wrapped(Net())
    optimizer = torch.optim.SGD(param_groups(model, decay_matrices), lr=0.1)
    trained(model, optimizer)
    model.double()
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    optimizer.zero_grad()
    with model.no_sync():
        model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_with_no_optimizer_on_ranges_the_flat_parameters_are_known_again() -> None:
    model = wrapped(Net())
    groups = param_groups(model, decay_matrices)
    assert not {id(param) for group in groups for param in group["params"]} & set(map(id, model.parameters()))
    del groups
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    assert set(full_states(model, optimizer)["state"]) == {name for name, _ in Net().named_parameters()}


@on_ranks(2)
def test_ignored_parameters_are_grouped_with_their_own_shape() -> None:
    net = Net().to(device())
    model = FSDP(net, ignored_states=[net.head], use_orig_params=True)
    groups = param_groups(model, decay_matrices)
    held = {id(param): group["weight_decay"] for group in groups for param in group["params"]}
    assert held[id(net.head.weight)] == 0.5 and held[id(net.head.bias)] == 0.0
    assert set(held) == {id(param) for param in model.parameters()}
