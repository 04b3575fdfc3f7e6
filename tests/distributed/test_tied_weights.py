"""A parameter that modules of several units share: auto wrapping leaves it to the lowest unit around all of
them. tests/parity/plain_programs.py trains such models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import StateDictType
from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy
from tests.ranks import both_views, device, on_ranks
from tests.training import FULL, LOCAL, SHARDED, assert_same, full_state, wrap

WIDTH = 8


class Pair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight


class Model(nn.Module):
    """Embedding and head share a weight across the model, the layers of each pair share one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.pairs = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight


POLICIES: dict[str, Any] = {
    "all layers": ModuleWrapPolicy({nn.Linear, nn.Embedding, Pair}),
    "layers": ModuleWrapPolicy({nn.Linear, nn.Embedding}),
    "a callable": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, (nn.Linear, Pair)),
    "half": CustomPolicy(lambda module: isinstance(module, nn.Linear) and module.bias is not None),
}
all_policies = pytest.mark.parametrize("policy", POLICIES)


def plain() -> Model:
    torch.manual_seed(0)
    return Model().to(device())


def wrapped(policy: Any, use_orig_params: bool) -> FSDP:
    return wrap(plain(), use_orig_params=use_orig_params, auto_wrap_policy=policy)


@all_policies
@both_views
@on_ranks(2)
def test_names_and_full_params(policy: str, use_orig_params: bool) -> None:
    model, expected = wrapped(POLICIES[policy], use_orig_params), dict(plain().named_parameters())
    assert len(FSDP.fsdp_modules(model)) > 2
    if use_orig_params:
        assert {clean(name) for name, _ in model.named_parameters()} == expected.keys()
    with FSDP.summon_full_params(model):
        found = {clean(name): param for name, param in model.named_parameters()}
        assert_same(found, expected)
        assert model.module.head.weight is model.module.embed.weight
        with torch.no_grad():
            model.module.head.weight.fill_(2.0)
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(full_state(model)[name], torch.full((WIDTH, WIDTH), 2.0))


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


class Whole(nn.Module):
    """A weight of the body is the head's, too, so that the root holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Pair()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.body.second.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def whole(use_orig_params: bool) -> tuple[Whole, FSDP]:
    torch.manual_seed(0)
    plain_model = Whole().to(device())
    options = {"auto_wrap_policy": ModuleWrapPolicy({Pair}), "use_orig_params": use_orig_params}
    return plain_model, wrap(copy.deepcopy(plain_model), **options)


@both_views
@on_ranks(2)
def test_full_params_of_a_unit_have_those_that_a_unit_around_it_holds(use_orig_params: bool) -> None:
    expected, model = whole(use_orig_params)
    body = model.module.body
    for _ in range(2):
        with FSDP.summon_full_params(body):
            assert_same(dict(body.module.named_parameters()), dict(expected.body.named_parameters()))
            with torch.no_grad():
                body.second.weight.mul_(2)
                expected.body.second.weight.mul_(2)
    assert_same(full_state(model), expected.state_dict())


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=lambda kind: kind.name)
@both_views
@on_ranks(2)
def test_state_dicts_of_a_unit_lack_nothing_that_a_unit_around_it_holds(
    use_orig_params: bool, kind: StateDictType
) -> None:
    expected, model = whole(use_orig_params)
    with (
        FSDP.state_dict_type(model, kind),
        pytest.raises(RuntimeError, match="body.second.weight'] of Whole"),
    ):
        model.module.body.state_dict()
    with FSDP.summon_full_params(model):
        assert_same(model.module.body.state_dict(), expected.body.state_dict())
    assert_same(full_state(model), expected.state_dict())


@all_policies
@both_views
@on_ranks(2)
def test_summary_lists_tied_parameters(policy: str, use_orig_params: bool) -> None:
    model = wrapped(POLICIES[policy], use_orig_params)
    whole = fsdp_c.summary(model)
    root = whole.units[0]
    assert "embed.weight" in root.names and "head.weight = embed.weight" in root.tied
    assert "embed.weight, " in str(whole) and "head.weight = embed.weight" in str(whole)
    assert "head.weight = embed.weight" in repr(model)
    held = {unit.path: unit for unit in whole.units}
    if policy == "all layers":
        assert held["pairs.0"].names == ("first.weight",) and held["pairs.0.second"].names == ("bias",)
        assert held["pairs.0"].tied == ("second.weight = first.weight",)


@on_ranks(2)
def test_a_tied_weight_of_units_wrapped_by_hand_is_refused() -> None:
    model = plain()
    model.embed = wrap(model.embed)
    with pytest.raises(ValueError, match="one parameter belongs to one unit"):
        model.head = wrap(model.head)
    with pytest.raises(RuntimeError, match="broken policy"):  # a failed wrapping leaves no trace
        wrapped(CustomPolicy(broken), True)
    other = Pair().to(device())
    other.first = wrap(other.first)
    assert len(other.first._handle.flat_param._fqns) == 2


def broken(module: nn.Module) -> bool:
    raise RuntimeError("broken policy")
