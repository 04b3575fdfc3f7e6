"""iter_full_params: full parameters, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import iter_full_params
from fsdp_c.state import full_params
from tests import tensor_parallel as tp
from tests.distributed.test_hybrid import groups
from tests.distributed.test_sharded_state_dict import FULL, odd, saved, train, wrap
from tests.pairwise import pairwise
from tests.parity.engine import same_bits
from tests.ranks import both_views, device, on_ranks


@contextmanager
def watched_gathers() -> Iterator[list[int]]:
    """Record the bytes that this rank receives in each all-gather, in order; -1 until it has been waited for."""
    seen: list[int] = []
    start = full_params.start_exchange

    def watched(*args):
        wait, index = start(*args), len(seen)
        seen.append(-1)

        def watched_wait():
            (whole,) = wait()
            seen[index] = whole.nbytes
            return [whole]

        return watched_wait

    with mock.patch.object(full_params, "start_exchange", watched):
        yield seen


def test_plain_model_gives_its_parameters():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    found = dict(iter_full_params(module))
    assert list(found) == list(module.state_dict())
    assert found["0.weight"].data_ptr() != module[0].weight.data_ptr()


@on_ranks(2)
def test_a_summoned_model_is_refused():
    model = wrap(odd(), True)
    with (
        type(model).summon_full_params(model),
        pytest.raises(AssertionError, match="Expects the handle training to be IDLE"),
    ):
        dict(iter_full_params(model))


def stack(**options):
    """A model with units larger than 1 MiB, and a layer outside of them."""
    return FSDP(
        nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)), nn.Linear(600, 3)),
        auto_wrap_policy=CustomPolicy(lambda module: getattr(module, "out_features", 0) == 600),
        device_id=device(),
        **options,
    )


@both_views
@on_ranks(2)
def test_the_next_unit_is_gathered_beside_this_one(use_orig_params):
    torch.manual_seed(0)
    model = stack(use_orig_params=use_orig_params)
    expected, seen = saved(model, FULL), {}
    with watched_gathers() as begun:
        for number, (name, value) in enumerate(iter_full_params(model)):
            seen[name] = value
            unit, is_first = divmod(number, 2)[0], number % 2 == 0
            # the next all-gather begins when the loop is done with a tensor of this unit
            assert len(begun) == min(5, unit + 2 - is_first)
            if number % 3 == 0:  # other collectives between the all-gathers
                dist.barrier()
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        assert same_bits(value, expected[name]), name


@on_ranks(2)
def test_what_is_sent_has_the_dtype_that_is_asked_for():
    model = stack(use_orig_params=True)
    before = saved(model, FULL)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)  # edits between steps are seen
    found, seen = gathers(model, dtype=torch.bfloat16)
    for name, value in before.items():
        assert same_bits(found[name], (value + 1.0).bfloat16()), name
    numel = sum(value.numel() for value in found.values())
    assert 2 * numel <= sum(seen) <= 2 * numel + 64 * len(seen)


@on_ranks(2)
def test_only_units_with_a_name_that_is_wanted_are_gathered():
    model = stack(use_orig_params=False)
    expected = saved(model, FULL)
    found = dict(iter_full_params(model, only="[13].weight"))
    assert list(found) == ["1.weight", "3.weight"]
    assert all(same_bits(value, expected[name]) for name, value in found.items())
    by_function = dict(iter_full_params(model, only=lambda name: name.endswith("bias")))
    assert sorted(by_function) == [f"{i}.bias" for i in range(5)]


@on_ranks(2)
def test_a_loop_may_be_left_and_training_goes_on():
    model = stack(use_orig_params=True)
    for name, _ in iter_full_params(model):
        if name == "1.weight":
            break
    with pytest.raises(KeyError):
        for _ in iter_full_params(model):
            raise KeyError
    model(torch.ones(2, 600, device=device())).sum().backward()
    assert dict(iter_full_params(model)).keys() == saved(model, FULL).keys()
    with pytest.raises(ValueError, match="max_nbytes must be at least 1, not 0"):
        dict(iter_full_params(model, max_nbytes=0))


# ------------------------------------------------------------------ large units in parts


def gathers(model: nn.Module, **options: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the yielded tensors, and the bytes of each all-gather."""
    with watched_gathers() as seen:
        return dict(iter_full_params(model, **options)), seen


@pairwise(
    max_nbytes=[1, 200, 1024, 10**9],
    dtype=[None, torch.bfloat16],
    strategy=["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"],
)
@on_ranks(4)
def test_parts_of_any_size_give_the_full_state_dict(rank, max_nbytes, dtype, strategy):
    options = {"process_group": groups(2, 2)} if strategy == "HYBRID_SHARD" else {}
    model = wrap(odd(), True, sharding_strategy=ShardingStrategy[strategy], **options)
    train(model, rank)
    expected = saved(model, FULL)
    found, _ = gathers(model, max_nbytes=max_nbytes, dtype=dtype)
    assert sorted(found) == sorted(set(expected) - {name for name, _ in odd().named_buffers()})
    for name, value in found.items():
        assert same_bits(value, expected[name].to(dtype)), name
        assert not value.requires_grad


@on_ranks(2)
def test_a_large_unit_is_gathered_in_parts():
    model = stack(use_orig_params=True)
    unit = (600 * 600 + 600) * 4
    _, alone = gathers(model)
    assert len(alone) == 5
    assert alone[1:] == [unit] * 4
    _, seen = gathers(model, max_nbytes=unit - 2000)  # the weight without the bias
    assert seen[1:] == [600 * 600 * 4, 600 * 4] * 4
    found, seen = gathers(model, max_nbytes=unit - 2000, only="2.bias")
    assert list(found) == ["2.bias"] and seen == [600 * 4]
    layers = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), use_orig_params=True, device_id=device())
    layer = (8 * 8 + 8) * 4
    assert gathers(layers, max_nbytes=layer)[1] == [layer] * 2  # as many parameters as fit


# ------------------------------------------------------------------ receivers


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("max_nbytes", [None, 200])
@on_ranks(4)
def test_only_rank_0_of_a_group_gets_tensors_with_rank0_only(rank, max_nbytes, strategy):
    options = {"process_group": groups(2, 2)} if strategy == "HYBRID_SHARD" else {}
    inner = wrap(odd(), True, sharding_strategy=ShardingStrategy[strategy], **options)
    model = nn.ModuleDict({"inner": inner, "apart": nn.Linear(2, 2).to(device())})
    expected = dict(iter_full_params(model))
    found, seen = gathers(model, max_nbytes=max_nbytes, rank0_only=True)
    is_receiver = (rank % 2 if strategy == "HYBRID_SHARD" else rank) == 0
    assert any(seen) == (is_receiver and strategy != "NO_SHARD")
    assert found.keys() == (expected.keys() if is_receiver else set())
    for name, value in found.items():
        assert same_bits(value, expected[name]), name


def language() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model to parallelize, and its values."""
    torch.manual_seed(3)
    plain = tp.Language()
    return plain, {name: param.detach().clone().to(device()) for name, param in plain.named_parameters()}


@pairwise(plan=["mlp", "sequence"], max_nbytes=[None, 300], rank0_only=[False, True])
@on_ranks(4)
def test_tensors_are_whole_under_tensor_parallelism(rank, plan, max_nbytes, rank0_only):
    plain, expected = language()
    model = FSDP(
        tp.parallelized(plain, plan),
        device_mesh=tp.mesh()["dp"],
        device_id=device(),
        use_orig_params=plan == "mlp",
        auto_wrap_policy=ModuleWrapPolicy({tp.Layer}),
    )
    found = dict(iter_full_params(model, max_nbytes=max_nbytes, dtype=torch.bfloat16, rank0_only=rank0_only))
    assert found.keys() == (expected.keys() if not rank0_only or rank < 2 else set())
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert same_bits(value, expected[name].bfloat16()), name


@on_ranks(4)
def test_parameters_outside_units_are_whole_under_tensor_parallelism(rank):
    plain, expected = language()
    found = dict(iter_full_params(tp.parallelized(plain, "sequence")))
    assert found.keys() == expected.keys()
    assert all(same_bits(value, expected[name]) for name, value in found.items())
