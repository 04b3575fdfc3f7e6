"""Several optimizers, each for some of a model's parameters, and parameters without state are saved and
loaded as for the plain module.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel, checkpoint
from fsdp_c.checkpoint import CheckpointError
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_dcp_state_dict import seen_as_fsdp
from tests.distributed.test_optim_state_dict import saved, to_load
from tests.models import WIDTH, Block, Net
from tests.parity.engine import same_bits
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import FULL, SHARDED

pytestmark = pytest.mark.filterwarnings("ignore")
both_kinds = pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])


def built(seed: int, use_orig_params: bool | None, **options: Any) -> Any:
    """Return a unit tree, or a plain module if ``use_orig_params`` is None."""
    torch.manual_seed(seed)
    module = Net(2, tied_head=False).to(device())
    if use_orig_params is None:
        return module
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": device()} | options
    return FullyShardedDataParallel(module, use_orig_params=use_orig_params, **options)


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers, each of every other parameter, flat or original."""
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[2::2]}]
    return [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(params[1::2], lr=0.1, momentum=0.9)]


def train(model: Any, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train with equal data on all ranks, so that the plain module's gradients are the averages."""
    for seed in range(steps):
        torch.manual_seed(seed)
        model(torch.randn(3, WIDTH, device=device())).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names_of(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def plain_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return by name the state of torch's optimizers of a plain module."""
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: own for optimizer in optimizers for param, own in optimizer.state.items()}


def assert_same_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, own in expected.items():
        assert sorted(actual[name]) == sorted(own), name
        assert [
            key for key in own if not same_bits(torch.as_tensor(actual[name][key]), own[key].cpu())
        ] == [], name


def own_state(*optimizers: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the state of parameters with elements on this rank."""
    return [
        copy.deepcopy(optimizer.state.get(param, {}))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if param.numel()
    ]


def assert_same_own(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [sorted(own) for own in actual] == [sorted(own) for own in expected]
    for own, wanted in zip(actual, expected, strict=True):
        assert [key for key in own if not same_bits(own[key], wanted[key])] == []


def spoil(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for own in optimizer.state.values():
            for value in own.values():
                value.fill_(7)
        for group in optimizer.param_groups:
            group["lr"] = 5.0


# ----------------------------------------------------------------- two optimizers over parts of units


@all_strategies
@on_ranks(2)
def test_the_state_of_each_optimizer_is_the_plain_ones(strategy: str) -> None:
    plain, model = built(0, None), built(0, True, sharding_strategy=ShardingStrategy[strategy])
    ours, theirs = two_optimizers(model), two_optimizers(plain)
    train(model, *ours)
    train(plain, *theirs)
    for one, other in zip(ours, theirs, strict=True):
        found = saved(model, one)
        assert_same_states(found["state"], plain_state(plain, other))
        names = [
            name
            for name, param in plain.named_parameters()
            for group in other.param_groups
            for each in group["params"]
            if each is param
        ]
        assert sorted(name for group in found["param_groups"] for name in group["params"]) == sorted(names)


@both_kinds
@both_views
@on_ranks(2)
def test_each_optimizer_loads_its_own_state(use_orig_params: bool, kind: StateDictType) -> None:
    model = built(0, use_orig_params)
    optimizers = two_optimizers(model)
    train(model, *optimizers)
    expected = own_state(*optimizers)
    states = [saved(model, optimizer, kind) for optimizer in optimizers]
    spoil(*optimizers)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(to_load(model, optimizer, state, kind))
    assert_same_own(own_state(*optimizers), expected)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == [0.02, 0.01, 0.1]


@both_views
@on_ranks(2)
def test_dcp_saves_and_loads_a_list_of_optimizers(use_orig_params: bool) -> None:
    model = built(0, use_orig_params)
    optimizers, path = two_optimizers(model), folder_of_ranks() / "saved"
    train(model, *optimizers)
    expected = own_state(*optimizers)
    with seen_as_fsdp("fsdp_c"):
        of_model, of_optimizers = get_state_dict(model, optimizers)
        state = {"model": of_model, "optim": of_optimizers}
        dcp.save(state, checkpoint_id=path)
        spoil(*optimizers)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same_own(own_state(*optimizers), expected)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == [0.02, 0.01, 0.1]
    fresh = two_optimizers(model)
    checkpoint.load(model, fresh, path)  # saved by DCP
    assert_same_own(own_state(*fresh), expected)


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@both_views
@on_ranks(2)
def test_a_checkpoint_takes_several_optimizers(use_orig_params: bool, background: bool) -> None:
    model = built(0, use_orig_params)
    optimizers, path = two_optimizers(model), folder_of_ranks() / "saved"
    train(model, *optimizers)
    expected = own_state(*optimizers)
    handle = checkpoint.save(model, optimizers, path, background=background)
    handle.wait()
    fresh = built(1, use_orig_params)
    loaded = two_optimizers(fresh)
    checkpoint.load(fresh, loaded, path)
    assert_same_own(own_state(*loaded), expected)
    assert [group["lr"] for optimizer in loaded for group in optimizer.param_groups] == [0.02, 0.01, 0.1]
    for one, wanted in zip(two_optimizers(fresh), (own_state(each) for each in loaded), strict=True):
        with pytest.raises(
            CheckpointError, match="has optimizer state of .*, which this optimizer does not hold"
        ):
            checkpoint.load(fresh, one, path)
        checkpoint.load(fresh, one, path, strict=False)
        assert_same_own(own_state(one), wanted)
    train(fresh, *loaded, steps=1)
    train(model, *optimizers, steps=1)
    assert_same_own(own_state(*loaded), own_state(*optimizers))


@on_ranks(2)
def test_one_parameter_of_two_optimizers_is_refused_by_name(rank: int) -> None:
    model = built(0, True)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD([*model.parameters()][:1], lr=0.1),
    ]
    with pytest.raises(ValueError, match=r"\['inp.weight'\] are parameters of several optimizers"):
        checkpoint.save(model, optimizers, folder_of_ranks() / "saved")


# ----------------------------------------------------------------- unfrozen parameters before their first step


def unfrozen(use_orig_params: bool | None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model trained while a part was frozen: biases, or a block if units are frozen as a whole."""
    model = built(0, use_orig_params, **options)
    frozen = [
        param
        for name, param in model.named_parameters()
        if ("bias" if use_orig_params else "blocks.0") in name
    ]
    if use_orig_params is False:
        frozen = list(model.module.blocks[0].parameters())
    assert frozen
    for param in frozen:
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    for param in frozen:
        param.requires_grad_(True)
    return model, optimizer


@both_kinds
@both_views
@on_ranks(2)
def test_an_unfrozen_parameter_is_saved_without_a_state(use_orig_params: bool, kind: StateDictType) -> None:
    model, optimizer = unfrozen(use_orig_params)
    expected = own_state(optimizer)
    state = saved(model, optimizer, kind)
    missing = [name for name in names_of(built(0, None)) if name not in state["state"]]
    assert missing and all(("bias" if use_orig_params else "blocks.0") in name for name in missing)
    spoil(optimizer)
    optimizer.load_state_dict(to_load(model, optimizer, state, kind))
    assert_same_own(own_state(optimizer), expected)
    path = folder_of_ranks() / "saved"
    checkpoint.save(model, optimizer, path)
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load(model, fresh, path)
    assert_same_own(own_state(fresh), expected)
    train(model, optimizer)  # has state from now on
    assert sorted(saved(model, optimizer, kind)["state"]) == sorted(names_of(built(0, None)))
