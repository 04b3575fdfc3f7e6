"""iter_full_params: whole parameters, one unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_c import _C, iter_full_params
from fsdp_c.state import redistribution
from tests.distributed.test_sharded_state_dict import FULL, odd, saved, train, wrap
from tests.parity.engine import same_bits
from tests.ranks import on_ranks

both_views = pytest.mark.parametrize("use_orig_params", [True, False])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@both_views
@on_ranks(2)
def test_names_and_values_are_those_of_the_full_state_dict(rank, world_size, use_orig_params, strategy):
    model = wrap(odd(), use_orig_params, sharding_strategy=ShardingStrategy[strategy])
    train(model, rank)
    expected = saved(model, FULL)
    found = dict(iter_full_params(model))
    assert sorted(found) == sorted(set(expected) - {name for name, _ in odd().named_buffers()})
    for name, value in found.items():
        assert same_bits(value, expected[name]), name
        assert not value.requires_grad


@both_views
@on_ranks(2)
def test_other_ranks_get_nothing_with_rank0_only(rank, world_size, use_orig_params):
    model = wrap(odd(), use_orig_params)
    found = dict(iter_full_params(model, rank0_only=True, offload_to_cpu=True))
    assert len(found) == (0 if rank else len(dict(iter_full_params(odd()))))
    dict(iter_full_params(model))


def test_plain_model_gives_its_parameters():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    found = dict(iter_full_params(module))
    assert list(found) == list(module.state_dict())
    assert found["0.weight"].data_ptr() != module[0].weight.data_ptr()


@on_ranks(2)
def test_parameters_outside_units_come_too(rank, world_size):
    module = nn.Sequential(nn.Linear(2, 3), wrap(nn.Linear(3, 1), True, auto_wrap_policy=None))
    found = dict(iter_full_params(module))
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@on_ranks(2)
def test_one_unit_is_gathered_at_a_time(rank, world_size):
    model = wrap(odd(), True)
    train(model, rank)
    largest = max(unit._handle.layout.padded_numel for unit in type(model).fsdp_modules(model))
    received = []
    all_gather = redistribution._all_gather_single

    def watched(output, *args, **kwargs):
        received.append(output.numel())
        return all_gather(output, *args, **kwargs)

    before = _C.live_unsharded_nbytes()
    _C.peak_unsharded_nbytes(reset=True)
    redistribution._all_gather_single = watched
    try:
        for _ in iter_full_params(model):
            pass
    finally:
        redistribution._all_gather_single = all_gather
    assert _C.peak_unsharded_nbytes() <= before
    assert len(received) == len(type(model).fsdp_modules(model))
    assert max(received) <= largest


@on_ranks(2)
def test_a_summoned_model_is_refused(rank, world_size):
    model = wrap(odd(), True)
    with (
        type(model).summon_full_params(model),
        pytest.raises(AssertionError, match="Expects the handle training to be IDLE"),
    ):
        dict(iter_full_params(model))


@on_ranks(2)
def test_edits_between_steps_are_seen(rank, world_size):
    model = wrap(nn.Linear(3, 4), True, auto_wrap_policy=None)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(5.0)
    assert all(value.eq(5.0).all() for _, value in iter_full_params(model))
