"""iter_full_params: whole parameters, one unit at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_c import _C, iter_full_params
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.state import redistribution
from tests.distributed.test_sharded_state_dict import FULL, odd, saved, train, wrap
from tests.parity.engine import same_bits
from tests.ranks import device, on_ranks

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


class Stack(nn.Sequential):
    """Units above 1 MiB, and one outside of them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(600, 600) for _ in range(4)), nn.Linear(600, 3))


def stack(**options):
    return FSDP(
        Stack(),
        auto_wrap_policy=CustomPolicy(lambda module: getattr(module, "out_features", 0) == 600),
        device_id=device(),
        **options,
    )


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@both_views
@on_ranks(2)
def test_next_units_are_gathered_beside_this_one(rank, world_size, use_orig_params, prefetch):
    torch.manual_seed(0)
    model = stack(use_orig_params=use_orig_params)
    begun = []
    all_gather = redistribution._all_gather_single

    def watched(output, *args, **kwargs):
        begun.append(output.numel())
        return all_gather(output, *args, **kwargs)

    expected, seen = saved(model, FULL), {}
    redistribution._all_gather_single = watched
    try:
        for number, (name, value) in enumerate(iter_full_params(model, prefetch=prefetch)):
            seen[name] = value
            assert len(begun) == min(5, number // 2 + 1 + prefetch)
            if number % 3 == 0:  # other collectives amid these
                dist.barrier()
    finally:
        redistribution._all_gather_single = all_gather
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        assert same_bits(value, expected[name]), name


@on_ranks(2)
def test_what_is_sent_has_the_dtype_that_is_asked_for(rank, world_size):
    model = stack(use_orig_params=True)
    sent = []
    all_gather = redistribution._all_gather_single
    redistribution._all_gather_single = lambda output, *args, **kwargs: (
        sent.append(output.nbytes),
        all_gather(output, *args, **kwargs),
    )[1]
    try:
        found = dict(iter_full_params(model, dtype=torch.bfloat16))
    finally:
        redistribution._all_gather_single = all_gather
    for name, value in saved(model, FULL).items():
        assert same_bits(found[name], value.bfloat16()), name
    numel = sum(value.numel() for value in found.values())
    assert 2 * numel <= sum(sent) <= 2 * numel + 64 * len(sent)


@on_ranks(2)
def test_only_units_with_a_name_that_is_wanted_are_gathered(rank, world_size):
    model = stack(use_orig_params=False)
    expected = saved(model, FULL)
    found = dict(iter_full_params(model, only="[13].weight"))
    assert list(found) == ["1.weight", "3.weight"]
    assert all(same_bits(value, expected[name]) for name, value in found.items())
    by_function = dict(iter_full_params(model, only=lambda name: name.endswith("bias"), offload_to_cpu=True))
    assert sorted(by_function) == [f"{i}.bias" for i in range(5)]
    assert all(value.is_cpu for value in by_function.values())


@on_ranks(2)
def test_a_loop_may_be_left_and_training_goes_on(rank, world_size):
    model = stack(use_orig_params=True)
    for name, _ in iter_full_params(model, prefetch=2):
        if name == "1.weight":
            break
    with pytest.raises(KeyError):
        for _ in iter_full_params(model):
            raise KeyError
    model(torch.ones(2, 600, device=device())).sum().backward()
    assert dict(iter_full_params(model)).keys() == saved(model, FULL).keys()
    with pytest.raises(ValueError, match="prefetch is a number of units, 0 or more, not -1"):
        dict(iter_full_params(model, prefetch=-1))
