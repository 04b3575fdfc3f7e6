"""fsdp_c.optim.param_groups: groups by the names and shapes that parameters had before wrapping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import FlatAdamW, param_groups
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks


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
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FlatAdamW])
@on_ranks(2)
def test_groups_train_as_those_of_the_model_before_wrapping(
    rank: int, world_size: int, rule: Any, use_orig_params: bool, kind: Any
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


@on_ranks(2)
def test_a_rule_that_divides_a_flat_parameter_is_refused_by_name(rank: int, world_size: int) -> None:
    model = wrapped(Net(), use_orig_params=False)
    with pytest.raises(
        ValueError, match=r"'inp.weight' other options than \['inp.bias', 'head.bias'\] of unit Net"
    ):
        param_groups(model, decay_matrices)


@on_ranks(2)
def test_ignored_parameters_are_grouped_with_their_own_shape(rank: int, world_size: int) -> None:
    net = Net().to(device())
    model = FSDP(net, ignored_states=[net.head], use_orig_params=True)
    groups = param_groups(model, decay_matrices)
    held = {id(param): group["weight_decay"] for group in groups for param in group["params"]}
    assert held[id(net.head.weight)] == 0.5 and held[id(net.head.bias)] == 0.0
    assert set(held) == {id(param) for param in model.parameters()}
