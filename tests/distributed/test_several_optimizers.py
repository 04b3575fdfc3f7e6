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
from torch.distributed.fsdp import StateDictType

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_dcp_state_dict import seen_as_fsdp
from tests.distributed.test_optim_state_dict import saved, to_load
from tests.models import WIDTH, Net
from tests.parity.engine import different_paths
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import FULL, PER_BLOCK, SHARDED, wrap

pytestmark = pytest.mark.filterwarnings("ignore")
both_kinds = pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])


def built(seed: int, use_orig_params: bool | None, **options: Any) -> Any:
    """Return a unit tree, or a plain module if ``use_orig_params`` is None."""
    torch.manual_seed(seed)
    module = Net(2, tied_head=False).to(device())
    if use_orig_params is None:
        return module
    return wrap(module, use_orig_params=use_orig_params, auto_wrap_policy=PER_BLOCK, **options)


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


def own_state(*optimizers: torch.optim.Optimizer) -> list[Any]:
    """Return copies of the state of parameters with elements on this rank, and learning rates."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    states = [opt.state.get(param, {}) for opt, group in groups for param in group["params"] if param.numel()]
    return [copy.deepcopy(states), [group["lr"] for _, group in groups]]


def assert_same_own(optimizers: list[torch.optim.Optimizer], expected: list[Any]) -> None:
    assert not different_paths(expected, own_state(*optimizers))


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
    plain, model = built(0, None), built(0, True, strategy=strategy)
    ours, theirs = two_optimizers(model), two_optimizers(plain)
    train(model, *ours)
    train(plain, *theirs)
    for one, other in zip(ours, theirs, strict=True):
        found, names = saved(model, one), {param: name for name, param in plain.named_parameters()}
        assert not different_paths({names[param]: own for param, own in other.state.items()}, found["state"])
        groups = [[names[param] for param in group["params"]] for group in other.param_groups]
        assert [sorted(group["params"]) for group in found["param_groups"]] == [*map(sorted, groups)]


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
    assert_same_own(optimizers, expected)


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
    assert_same_own(optimizers, expected)
    fresh = two_optimizers(model)
    checkpoint.load(model, fresh, path)  # saved by DCP
    assert_same_own(fresh, expected)


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@both_views
@on_ranks(2)
def test_a_checkpoint_takes_several_optimizers(use_orig_params: bool, background: bool) -> None:
    model = built(0, use_orig_params)
    optimizers, path = two_optimizers(model), folder_of_ranks() / "saved"
    train(model, *optimizers)
    expected = own_state(*optimizers)
    checkpoint.save(model, optimizers, path, background=background).wait()
    fresh = built(1, use_orig_params)
    loaded = two_optimizers(fresh)
    spoil(*loaded)
    checkpoint.load(fresh, loaded, path)
    assert_same_own(loaded, expected)
    for one, wanted in zip(two_optimizers(fresh), (own_state(each) for each in loaded), strict=True):
        with pytest.raises(
            CheckpointError, match="has optimizer state of .*, which this optimizer does not hold"
        ):
            checkpoint.load(fresh, one, path)
        checkpoint.load(fresh, one, path, strict=False)
        assert_same_own([one], wanted)
    train(fresh, *loaded, steps=1)
    train(model, *optimizers, steps=1)
    assert_same_own(loaded, own_state(*optimizers))


@on_ranks(2)
def test_one_parameter_of_two_optimizers_is_refused_by_name(rank: int) -> None:
    model = built(0, True)
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params[:1], lr=0.1)]
    with pytest.raises(ValueError, match=r"\['inp.weight'\] are parameters of several optimizers"):
        checkpoint.save(model, optimizers, folder_of_ranks() / "saved")


# ----------------------------------------------------------------- unfrozen parameters before their first step


def unfrozen(use_orig_params: bool) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model trained while a part was frozen: biases, or a block if units are frozen as a whole."""
    model = built(0, use_orig_params)
    frozen = list(model.module.blocks[0].parameters())
    if use_orig_params:
        frozen = [param for name, param in model.named_parameters() if "bias" in name]
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
    assert_same_own([optimizer], expected)
    path = folder_of_ranks() / "saved"
    checkpoint.save(model, optimizer, path)
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load(model, fresh, path)
    assert_same_own([fresh], expected)
    train(model, optimizer)  # has state from now on
    assert sorted(saved(model, optimizer, kind)["state"]) == sorted(names_of(built(0, None)))
