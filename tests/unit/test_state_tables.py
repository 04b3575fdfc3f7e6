"""The two state tables: an illegal transition raises, names the unit and both states, and changes nothing."""

import re

import pytest
import torch
from torch import nn

from fsdp_c import _C, FullyShardedDataParallel
from tests.collectives import fake_ranks

_group = fake_ranks(0, 2)


@pytest.fixture
def model():
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)


def test_unit_state_table_refuses_to_summon_twice(model):
    model._unit.set_summoning(True)
    with pytest.raises(
        RuntimeError, match=re.escape("illegal transition from SUMMON_FULL_PARAMS to SUMMON_FULL_PARAMS")
    ):
        model._unit.set_summoning(True)
    model._unit.set_summoning(False)
    assert model._unit.training_state == _C.USE_IDLE


def test_states_follow_a_step(model):
    seen = []
    model.module.register_forward_hook(
        lambda *_: seen.append(
            (model._handle.training_state, model._handle.param_state, model._unit.training_state)
        )
    )
    x = torch.randn(2, 4, requires_grad=True)
    output = model(x)
    assert seen == [(_C.USE_FORWARD, _C.PARAM_UNSHARDED, _C.USE_FORWARD)]
    output.register_hook(lambda _: seen.append((model._handle.training_state, model._handle.param_state)))
    output.sum().backward()
    assert seen[1] == (_C.USE_BACKWARD_PRE, _C.PARAM_UNSHARDED)
    assert (model._handle.training_state, model._handle.param_state) == (_C.USE_IDLE, _C.PARAM_SHARDED)
