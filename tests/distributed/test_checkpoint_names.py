"""Checkpoints of compiled models have names without torch.compile's prefix, as torch's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from fsdp_c.checkpoint.storage import read_checkpoint
from tests.checkpoints import ExtraState
from tests.distributed.test_checkpoint import (
    assert_same_tensors,
    folder_of_ranks,
    full_model,
    full_optim,
    whole,
)
from tests.distributed.test_sharded_state_dict import wrap
from tests.ranks import both_views, device, on_ranks
from tests.training import SHARDED


class Inner(nn.Module):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Own(ExtraState, Inner):
    """A block with extra state, which torch's get_state_dict does not find inside a unit."""


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def plain(seed: int, kind: type[Inner] = Own) -> nn.Module:
    torch.manual_seed(seed)
    block = kind()
    block.own = {"own": seed}
    return nn.Sequential(block, nn.Linear(4, 2))


def build(
    how: str, seed: int, which: str = "fsdp_c", use_orig_params: bool = True, kind: type[Inner] = Own
) -> Any:
    """Return the model compiled in one of several ways, with units around the block and the root."""
    model = plain(seed, kind)
    options: dict[str, Any] = {"auto_wrap_policy": None, "which": which}
    if how == "block inside its unit":
        model[0] = compiled(model[0])
    model[0] = wrap(model[0], use_orig_params, **options)
    if how == "block around its unit":
        model[0] = compiled(model[0])
    elif how == "layer in the block":
        model[1] = compiled(model[1])
    if how == "in place":
        model.compile(backend="eager")
    model = wrap(model, use_orig_params, **options)
    return compiled(model) if how == "whole" else model


def stepped(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the model that has state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    uncompiled(model)(torch.ones(2, 3, device=device())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def uncompiled(model: Any) -> Any:
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all values by names without torch.compile's prefix."""
    model = uncompiled(model)
    state = {name: value for name, value in full_model(model).items() if isinstance(value, torch.Tensor)}
    state |= {
        f"{fqn}.{name}": value
        for fqn, own in full_optim(model, optimizer)["state"].items()
        for name, value in own.items()
    }
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


HOW = ["not", "whole", "block inside its unit", "block around its unit", "layer in the block", "in place"]


@both_views
@on_ranks(2, timeout_s=180)
def test_a_compiled_model_is_saved_by_the_names_of_the_uncompiled_and_both_load(use_orig_params):
    folder = folder_of_ranks()
    keys = None
    for number, how in enumerate(HOW):
        path = folder / str(number)
        model = build(how, 1, use_orig_params=use_orig_params)
        optimizer = stepped(model)
        checkpoint.save(model, optimizer, path, extra={"ema": {"_orig_mod.weight": torch.ones(2)}})
        found = set(read_checkpoint(path).entries)
        keys = keys or found
        assert found == keys and "model.0._extra_state.own" in keys
        # the user's own name
        assert [key for key in keys if "_orig_mod" in key] == ["extra.ema._orig_mod.weight"]
        for other in (how, HOW[(number + 1) % len(HOW)]):
            again = build(other, 2, use_orig_params=use_orig_params)
            own = stepped(again)
            extra = checkpoint.load(again, own, path)
            assert list(extra["ema"]) == ["_orig_mod.weight"]
            assert_same_tensors(values(model, optimizer), values(again, own))
            assert [m.own for m in again.modules() if isinstance(m, Inner)] == [{"own": 1}]


@pytest.mark.parametrize("how", ["whole", "block around its unit", "block inside its unit", "not"])
@on_ranks(2, timeout_s=180)
def test_names_are_those_of_torchs_get_state_dict(how):
    folder = folder_of_ranks()
    theirs = build(how, 1, "torch", kind=Inner)
    optimizer = stepped(theirs)
    type(uncompiled(theirs)).set_state_dict_type(uncompiled(theirs), SHARDED)
    state, of_optimizer = get_state_dict(theirs, optimizer)
    dcp.save({"model": state, "optim": of_optimizer}, checkpoint_id=folder / "torch")
    # sharded states: with use_orig_params torch's FULL optimizer state has exp_avg_sq in place of exp_avg
    expected = {name.replace("_orig_mod.", ""): whole(value) for name, value in state.items()}
    expected |= {
        f"{fqn}.{n}": whole(value) for fqn, own in of_optimizer["state"].items() for n, value in own.items()
    }
    # directly inside a unit torch keeps the prefix in the model's names, but not in the optimizer's
    names = {name.replace("_orig_mod.", "") if how == "block inside its unit" else name for name in state}
    for other in ("not", how, "block in another way"):
        model = build(other, 2, kind=Inner)
        own = stepped(model)
        assert set(checkpoint.model_state(model)) == names
        assert set(checkpoint.optim_state(model, own)["state"]) <= names
        checkpoint.load(model, own, folder / "torch")
        assert_same_tensors(expected, values(model, own))
        assert (
            full_model(uncompiled(theirs)).keys() == full_model(uncompiled(build(how, 3, kind=Inner))).keys()
        )


class Holder(nn.Module):
    """A module with a child _orig_mod, and with a parameter of the same name as the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._orig_mod = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x) * self.weight


@on_ranks(2, timeout_s=180)
def test_a_users_orig_mod_that_hides_another_parameter_is_refused():
    folder = folder_of_ranks()
    model = wrap(nn.Sequential(Holder()), True, auto_wrap_policy=None)
    optimizer = stepped(model)
    for function in (
        lambda: checkpoint.save(model, optimizer, folder / "first"),
        lambda: checkpoint.model_state(model),
        lambda: checkpoint.optim_state(model, optimizer),
    ):
        with pytest.raises(
            (ValueError, CheckpointError), match=r"are named 0\.weight .* rename the module called _orig_mod"
        ):
            function()
    assert not (folder / "first" / ".metadata").exists()


def test_a_name_that_would_stand_twice_is_left_alone(tmp_path: Path) -> None:
    names = ["a.weight", "a._orig_mod.weight", "_orig_mod.b.weight"]
    state = {name: torch.full((2, 2), float(at)) for at, name in enumerate(names, 1)}
    dcp.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    checkpoint.load(model, None, tmp_path, strict=False)
    assert (model["a"].weight == 1).all() and (model["b"].weight == 3).all()
