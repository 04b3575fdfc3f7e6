"""torch's own FSDP1 and its checkpoints meet units of fsdp_c without install(): they work, or the error names
a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_c
from tests.distributed.test_dcp_state_dict import assert_same_state
from tests.models import WIDTH
from tests.ranks import both_views, device, on_ranks
from tests.training import assert_same, full_state

FULL = StateDictOptions(full_state_dict=True)
FSDP = fsdp_c.FullyShardedDataParallel


class Trained:
    """A model with an inner unit and its optimizer, before or after a step."""

    def __init__(self, use_orig_params: bool, stepped: bool) -> None:
        self.arguments = {"use_orig_params": use_orig_params, "device_id": device()}
        inner = FSDP(nn.Linear(WIDTH, WIDTH), **self.arguments)
        self.model = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), **self.arguments)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        if stepped:
            self.step(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self, model: nn.Module) -> None:
        model(torch.ones(2, WIDTH)).sum().backward()


def summon(trained: Trained) -> None:
    with TorchFSDP.summon_full_params(trained.model):
        pass


def around(trained: Trained) -> None:
    outer = TorchFSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), trained.model), **trained.arguments)
    trained.step(outer)


REFUSED: dict[str, Callable[[Trained], Any]] = {
    "get_state_dict": lambda t: get_state_dict(t.model, t.optimizer),
    "get_state_dict, full": lambda t: get_state_dict(t.model, t.optimizer, options=FULL),
    "get_model_state_dict": lambda t: get_model_state_dict(t.model),
    "get_optimizer_state_dict": lambda t: get_optimizer_state_dict(t.model, t.optimizer),
    "set_model_state_dict": lambda t: set_model_state_dict(t.model, t.model.state_dict(), options=FULL),
    "set_optimizer_state_dict": lambda t: set_optimizer_state_dict(
        t.model, t.optimizer, FSDP.optim_state_dict(t.model, t.optimizer), options=FULL
    ),
    "set_state_dict": lambda t: set_state_dict(
        t.model,
        t.optimizer,
        model_state_dict=t.model.state_dict(),
        optim_state_dict=FSDP.optim_state_dict(t.model, t.optimizer),
        options=FULL,
    ),
    "summon_full_params": summon,
    "clip_grad_norm_": lambda t: TorchFSDP.clip_grad_norm_(t.model, 1.0),
    "apply": lambda t: TorchFSDP.apply(t.model, lambda module: None),
    "a unit of torch's around ours": around,
}
BEFORE_A_STEP = [
    "get_state_dict",
    "summon_full_params",
    "clip_grad_norm_",
    "apply",
    "a unit of torch's around ours",
]


@both_views
@on_ranks(2)
def test_torchs_functions_on_our_units_name_install(use_orig_params: bool) -> None:
    for what, stepped in [*((what, True) for what in REFUSED), *((what, False) for what in BEFORE_A_STEP)]:
        trained = Trained(use_orig_params, stepped)
        with pytest.raises(RuntimeError, match=r"unit (Sequential|Linear).*Call fsdp_c\.install\(\)"):
            REFUSED[what](trained)
        trained.step(trained.model)  # nothing is left half done
        trained.model.clip_grad_norm_(1.0)


@on_ranks(2)
def test_torchs_state_dict_type_sets_that_of_our_units() -> None:
    trained = Trained(use_orig_params=True, stepped=True)
    model = trained.model
    assert TorchFSDP.fsdp_modules(model) == FSDP.fsdp_modules(model)
    with TorchFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert FSDP.get_state_dict_type(model) == TorchFSDP.get_state_dict_type(model)
        assert {type(value).__name__ for value in model.state_dict().values()} == {"ShardedTensor"}
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}


@both_views
@on_ranks(2)
def test_torchs_optimizer_state_is_ours(use_orig_params: bool) -> None:
    trained = Trained(use_orig_params, stepped=True)
    # torch confuses the states with offload_to_cpu=True
    settings = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
    with FSDP.state_dict_type(trained.model, StateDictType.FULL_STATE_DICT, None, settings):
        of_both = trained.model, trained.optimizer
        given, expected = (one.optim_state_dict(*of_both) for one in (TorchFSDP, FSDP))
        assert_same_state((), expected, given)
        assert devices(given) == devices(expected)
        given, expected = (one.optim_state_dict_to_load(*of_both, expected) for one in (TorchFSDP, FSDP))
        assert_same_state((), expected, given)


def devices(saved: dict[str, Any]) -> list[torch.device]:
    return [value.device for state in saved["state"].values() for _, value in sorted(state.items())]


@on_ranks(2, label="installs")  # refused where other tests have live units of torch
def test_torchs_functions_on_our_units_work_after_install() -> None:
    fsdp_c.install()
    try:
        for what, call in REFUSED.items():
            if what == "a unit of torch's around ours":  # a root already
                continue
            trained = Trained(use_orig_params=True, stepped=True)
            before = full_state(trained.model)
            found = call(trained)
            assert_same(before, trained.model.state_dict())
            if what == "get_state_dict, full":
                assert_same(before, found[0])
                assert found[1]["state"].keys() == before.keys()
            trained.step(trained.model)
            trained.optimizer.step()
            after = trained.model.state_dict()
            # training continues
            assert not any(torch.equal(after[name], before[name]) for name in before), what
    finally:
        fsdp_c.uninstall()
