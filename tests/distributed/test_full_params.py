"""iter_full_params: whole parameters, one unit at a time."""

from __future__ import annotations

import time
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
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_c import _C, iter_full_params
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.state import full_params, redistribution
from tests import tensor_parallel as tp
from tests.distributed.test_hybrid import groups
from tests.distributed.test_sharded_state_dict import FULL, odd, saved, train, wrap
from tests.parity.engine import same_bits
from tests.ranks import all_strategies, both_views, device, on_ranks


@contextmanager
def watched_gathers() -> Iterator[list[tuple[int, int, int]]]:
    """Of each bucket how many units, collectives and bytes."""
    seen: list[tuple[int, int, int]] = []
    start = full_params.start_gather

    def watched(shards, ranges, wholes, *args):
        works = start(shards, ranges, wholes, *args)
        seen.append((len(shards), len(works), sum(whole.nbytes for whole in wholes)))
        return works

    with mock.patch.object(full_params, "start_gather", watched):
        yield seen


@all_strategies
@both_views
@on_ranks(2)
def test_names_and_values_are_those_of_the_full_state_dict(rank, use_orig_params, strategy):
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
def test_other_ranks_get_nothing_with_rank0_only(rank, use_orig_params):
    model = wrap(odd(), use_orig_params)
    found = dict(iter_full_params(model, rank0_only=True, offload_to_cpu=True))
    assert len(found) == (0 if rank else len(dict(iter_full_params(odd()))))
    dict(iter_full_params(model))


def test_plain_model_gives_its_parameters():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    found = dict(iter_full_params(module))
    assert list(found) == list(module.state_dict())
    for copies in (found, dict(iter_full_params(module, offload_to_cpu=True))):
        assert copies["0.weight"].data_ptr() != module[0].weight.data_ptr()


@on_ranks(2)
def test_parameters_outside_units_come_too():
    module = nn.Sequential(nn.Linear(2, 3), wrap(nn.Linear(3, 1), True, auto_wrap_policy=None))
    found = dict(iter_full_params(module))
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@on_ranks(2)
def test_one_unit_is_gathered_at_a_time(rank):
    model = wrap(odd(), True)
    train(model, rank)
    largest = max(unit._handle.layout.padded_numel for unit in type(model).fsdp_modules(model))
    before = _C.live_unsharded_nbytes()
    _C.peak_unsharded_nbytes(reset=True)
    with watched_gathers() as seen:
        for _ in iter_full_params(model):
            pass
    assert _C.peak_unsharded_nbytes() <= before
    assert len(seen) == len(type(model).fsdp_modules(model))
    assert max(nbytes for *_, nbytes in seen) <= 4 * largest


@on_ranks(2)
def test_a_summoned_model_is_refused():
    model = wrap(odd(), True)
    with (
        type(model).summon_full_params(model),
        pytest.raises(AssertionError, match="Expects the handle training to be IDLE"),
    ):
        dict(iter_full_params(model))


@on_ranks(2)
def test_edits_between_steps_are_seen():
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
def test_next_units_are_gathered_beside_this_one(use_orig_params, prefetch):
    torch.manual_seed(0)
    model = stack(use_orig_params=use_orig_params)
    expected, seen = saved(model, FULL), {}
    with watched_gathers() as begun:
        for number, (name, value) in enumerate(iter_full_params(model, prefetch=prefetch)):
            seen[name] = value
            unit, is_first = number // 2, number % 2 == 0
            held_back = prefetch > 0 and unit > 0 and is_first  # until the loop has let go of the unit before
            assert len(begun) == min(5, unit + 1 + prefetch - held_back)
            if number % 3 == 0:  # other collectives amid these
                dist.barrier()
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        assert same_bits(value, expected[name]), name


@on_ranks(2)
def test_what_is_sent_has_the_dtype_that_is_asked_for():
    model = stack(use_orig_params=True)
    found, seen = gathers(model, dtype=torch.bfloat16)
    for name, value in saved(model, FULL).items():
        assert same_bits(found[name], value.bfloat16()), name
    numel = sum(value.numel() for value in found.values())
    assert 2 * numel <= sum(nbytes for *_, nbytes in seen) <= 2 * numel + 64 * len(seen)


@on_ranks(2)
def test_only_units_with_a_name_that_is_wanted_are_gathered():
    model = stack(use_orig_params=False)
    expected = saved(model, FULL)
    found = dict(iter_full_params(model, only="[13].weight"))
    assert list(found) == ["1.weight", "3.weight"]
    assert all(same_bits(value, expected[name]) for name, value in found.items())
    by_function = dict(iter_full_params(model, only=lambda name: name.endswith("bias"), offload_to_cpu=True))
    assert sorted(by_function) == [f"{i}.bias" for i in range(5)]
    assert all(value.is_cpu for value in by_function.values())


@on_ranks(2)
def test_a_loop_may_be_left_and_training_goes_on():
    model = stack(use_orig_params=True)
    for name, _ in iter_full_params(model, prefetch=2):
        if name == "1.weight":
            break
    with pytest.raises(KeyError):
        for _ in iter_full_params(model):
            raise KeyError
    model(torch.ones(2, 600, device=device())).sum().backward()
    assert dict(iter_full_params(model)).keys() == saved(model, FULL).keys()
    with pytest.raises(ValueError, match="prefetch is a number of buckets, 0 or more, not -1"):
        dict(iter_full_params(model, prefetch=-1))


# ------------------------------------------------------------------ buckets


def gathers(model: nn.Module, **options: Any) -> tuple[dict[str, torch.Tensor], list[tuple[int, int, int]]]:
    """What is yielded, and of each bucket how many units, collectives and bytes."""
    with watched_gathers() as seen:
        return dict(iter_full_params(model, **options)), seen


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("buckets", [1, "0.2KB", "1 KiB", "1GB"])
@on_ranks(4)
def test_buckets_of_any_size_give_the_full_state_dict(rank, buckets, dtype, strategy):
    options = {"process_group": groups(2, 2)} if strategy == "HYBRID_SHARD" else {}
    model = wrap(odd(), True, sharding_strategy=ShardingStrategy[strategy], **options)
    train(model, rank)
    expected = saved(model, FULL)
    found, _ = gathers(model, buckets=buckets, dtype=dtype)
    assert sorted(found) == sorted(set(expected) - {name for name, _ in odd().named_buffers()})
    for name, value in found.items():
        assert same_bits(value, expected[name].to(dtype)), name


@on_ranks(2)
def test_units_go_in_few_collectives_and_a_large_one_in_parts(world_size):
    model = stack(use_orig_params=True)
    unit = (600 * 600 + 600) * 4
    each = world_size if device().type == "cpu" else 1  # without gloo's copies large units are broadcast
    _, alone = gathers(model)
    assert [(units, works) for units, works, _ in alone] == [(1, 1)] + [(1, each)] * 4
    _, seen = gathers(model, buckets=2 * unit + 10_000)  # the last layer, which is small, comes first
    assert [(units, works) for units, works, _ in seen] == [(3, 1), (2, 2 * each if each > 1 else 1)]
    assert max(nbytes for *_, nbytes in seen) <= 2 * unit + 10_000
    _, seen = gathers(model, buckets=unit - 2000)  # the weight without the bias
    assert [units for units, *_ in seen] == [1] * 9
    assert [nbytes for *_, nbytes in seen][1:] == [600 * 600 * 4, 600 * 4] * 4
    found, seen = gathers(model, buckets=unit - 2000, only="2.bias")
    assert list(found) == ["2.bias"] and [nbytes for *_, nbytes in seen] == [600 * 4]


@on_ranks(2)
def test_gloo_copies_few_small_units_at_a_time():
    options = {"use_orig_params": True, "device_id": device()}
    model = FSDP(nn.Sequential(*(FSDP(nn.Linear(64, 64), **options) for _ in range(9))), **options)
    expected = dict(iter_full_params(model))
    of_two = 2 * 4 * (64 * 64 + 64) + 1000  # padding included
    with mock.patch.object(redistribution, "_COPIED_NBYTES", of_two):
        found, seen = gathers(model, buckets="1MB")
    assert [(units, works) for units, works, _ in seen] == [(9, 5 if device().type == "cpu" else 1)]
    assert all(same_bits(value, expected[name]) for name, value in found.items())


@on_ranks(2)
def test_memory_that_was_let_go_of_is_used_again_and_no_other():
    if device().type != "cpu":
        pytest.skip("a GPU's allocator does it")
    model, places = stack(use_orig_params=True), set()
    expected, held = saved(model, FULL), []
    with mock.patch.object(_C, "prefer_large_pages") as taken:  # what is done to fresh memory
        for name, value in iter_full_params(model, only="[0123].*"):
            assert same_bits(value, expected[name])
            places.add(value.untyped_storage().data_ptr())
            held.append(StorageWeakRef(value.untyped_storage()))
            for _ in range(10_000):  # gloo's threads let go of what they sent some time after its wait
                if all(lent == held[-1] or lent.expired() for lent in held):
                    break
                time.sleep(0.001)
    assert len(places) == taken.call_count == 2
    kept = dict(iter_full_params(model, only="[0123].*"))
    assert len({value.untyped_storage().data_ptr() for value in kept.values()}) == 4
    parts = [value[:1] for _, value in iter_full_params(model, only="[0123].bias")]  # views keep it too
    for name, value in [*kept.items(), *((f"{i}.bias", part) for i, part in enumerate(parts))]:
        assert same_bits(value, expected[name][: len(value)]), name


def test_sizes_and_receivers_that_make_no_sense_are_refused():
    for size in ("512", "MB", "-1MB", 0, -5, True, 1.5, "0MB"):
        with pytest.raises(
            ValueError, match=r'buckets is a size such as "512MB", "1GiB" or a number of bytes'
        ):
            next(iter_full_params(nn.Linear(2, 2), buckets=size))
    with pytest.raises(ValueError, match="rank0_only and ranks both say who gets tensors"):
        next(iter_full_params(nn.Linear(2, 2), rank0_only=True, ranks=[0]))


# ------------------------------------------------------------------ receivers


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("buckets", [None, 200, "1MB"])
@pytest.mark.parametrize("receivers", [{"ranks": [1, 3]}, {"ranks": [0]}, {"rank0_only": True}], ids=str)
@on_ranks(4)
def test_only_receivers_get_tensors_and_take_memory(rank, receivers, buckets, strategy):
    options = {"process_group": groups(2, 2)} if strategy == "HYBRID_SHARD" else {}
    inner = wrap(odd(), True, sharding_strategy=ShardingStrategy[strategy], **options)
    model = nn.ModuleDict({"inner": inner, "apart": nn.Linear(2, 2).to(device())})
    expected = dict(iter_full_params(model))
    taken = []
    take = full_params._Memory.take
    with mock.patch.object(
        full_params._Memory, "take", lambda *args: (taken.append(args[1]), take(*args))[1]
    ):
        found = dict(iter_full_params(model, buckets=buckets, prefetch=2, **receivers))
    of_group = rank % 2 if strategy == "HYBRID_SHARD" else rank
    gets = rank in receivers["ranks"] if "ranks" in receivers else of_group == 0
    assert bool(taken) == gets
    assert found.keys() == (expected.keys() if gets else set())
    for name, value in found.items():
        assert same_bits(value, expected[name]), name


@pytest.mark.parametrize("receivers", [{}, {"ranks": [1]}, {"rank0_only": True}], ids=str)
@pytest.mark.parametrize("buckets", [None, 300, "1MB"])
@pytest.mark.parametrize("plan", ["mlp", "sequence"])
@on_ranks(4)
def test_tensors_are_whole_under_tensor_parallelism(rank, plan, buckets, receivers):
    torch.manual_seed(3)
    plain = tp.Language()
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = FSDP(
        tp.parallelized(plain, plan),
        device_mesh=tp.mesh()["dp"],
        device_id=device(),
        use_orig_params=plan == "mlp",
        auto_wrap_policy=ModuleWrapPolicy({tp.Layer}),
    )
    found = dict(iter_full_params(model, buckets=buckets, dtype=torch.bfloat16, **receivers))
    gets = rank in receivers["ranks"] if "ranks" in receivers else not receivers or rank < 2
    assert found.keys() == (expected.keys() if gets else set())
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert same_bits(value, expected[name].to(device(), torch.bfloat16)), name


@on_ranks(4)
def test_parameters_outside_units_are_whole_under_tensor_parallelism(rank):
    torch.manual_seed(3)
    plain = tp.Language()
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    found = dict(iter_full_params(tp.parallelized(plain, "sequence"), ranks=[2]))
    assert found.keys() == (expected.keys() if rank == 2 else set())
    assert all(same_bits(value, expected[name].to(device())) for name, value in found.items())
