"""fsdp_c.join: ranks that ran out of batches take part with zeros until all have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH, Net
from tests.ranks import both_views, device, device_type, on_ranks
from tests.training import PER_BLOCK, wrap

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
MAX_NORM = 0.05


def plain() -> Net:
    torch.manual_seed(5)
    return Net().to(device())


def wrapped(net: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FSDP:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(device_type(), shape) if strategy == "HYBRID_SHARD" else None
    options = {"use_orig_params": False, "auto_wrap_policy": PER_BLOCK, "device_mesh": mesh} | options
    return wrap(copy.deepcopy(net), strategy=strategy, **options)


def batches_of(rank: int, numbers: Sequence[int]) -> list[Tensor]:
    """``numbers[rank]`` of them."""
    generator = torch.Generator(device()).manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(numbers[rank])]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained_plain(net: nn.Module, numbers: Sequence[int], is_synced: Any, average: str) -> nn.Module:
    """What a plain module makes of the same batches: of those that there are, divided as ``average`` says."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    batches = [batches_of(rank, numbers) for rank in range(len(numbers))]
    for step in range(max(numbers)):
        there = [own[step] for own in batches if step < len(own)]
        divisor = len(numbers) if average == "all" else len(there)
        for x in there:
            (loss_of(net, x) / divisor).backward()
        if is_synced(step):
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return net


def trained(model: FSDP, rank: int, numbers: Sequence[int], is_synced: Any, average: str) -> list[Any]:
    """The same of the sharded one: returns has_data and num_ranks of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batches = fsdp_c.join(model, batches_of(rank, numbers))
    told = []
    for step, x in enumerate(batches):
        told.append((batches.has_data, batches.num_ranks))
        with contextlib.nullcontext() if is_synced(step) else model.no_sync():
            scale = 1.0 if average == "all" else len(numbers) / batches.num_ranks
            (loss_of(model, x) * scale).backward()
        if is_synced(step):
            model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return told


def assert_same(model: FSDP, expected: nn.Module) -> None:
    for name, value in model.state_dict().items():
        if "calls" not in name:
            torch.testing.assert_close(
                value, expected.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}"
            )


def check(
    rank: int,
    numbers: Sequence[int],
    strategy: str,
    use_orig_params: bool,
    average: str,
    every: int,
) -> None:
    def is_synced(step: int) -> bool:
        return step % every == every - 1

    model = wrapped(plain(), strategy, use_orig_params=use_orig_params)
    told = trained(model, rank, numbers, is_synced, average)
    there = [sum(step < number for number in numbers) for step in range(max(numbers))]
    assert told == [(step < numbers[rank], number) for step, number in enumerate(there)]
    assert_same(model, trained_plain(plain(), numbers, is_synced, average))


@pytest.mark.parametrize("every", [1, 2], ids=["each", "no_sync"])
@pytest.mark.parametrize("average", ["all", "there"])
@both_views
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@on_ranks(2)
def test_the_values_are_those_of_the_ranks_that_had_data(
    rank: int, strategy: str, use_orig_params: bool, average: str, every: int
) -> None:
    check(rank, (2, 6), strategy, use_orig_params, average, every)


@both_views
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_the_values_are_those_of_the_ranks_that_had_data_of_four(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    check(rank, (3, 1, 6, 2), strategy, use_orig_params, "there", 1)
    check(rank, (3, 1, 6, 2), strategy, use_orig_params, "all", 2)


class Spoilt(nn.Module):
    """Its outputs are NaN once it was told so, which must not reach the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spoils = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (float("nan") if self.spoils else 1.0)
        self.auxiliary = y.sum()
        return y.detach()


@both_views
@on_ranks(2)
def test_what_a_repeated_batch_brings_is_left_out_even_where_it_is_nan_and_comes_past_the_outputs(
    rank: int, use_orig_params: bool
) -> None:
    model = FSDP(Spoilt(), use_orig_params=use_orig_params, device_id=device())
    batches = fsdp_c.join(model, batches_of(rank, (1, 2)))
    for _ in batches:
        model.module.spoils = not batches.has_data
        model(torch.ones(2, WIDTH))
        model.module.auxiliary.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads)
        model.zero_grad()
    model(torch.ones(2, WIDTH))
    model.module.auxiliary.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None and param.numel()]
    assert bool(torch.stack([grad.isnan().any() for grad in grads]).any())  # outside of join all counts again


@on_ranks(2)
def test_ignored_parameters_get_zeros_too(rank: int) -> None:
    net = plain()
    model = FSDP(net, ignored_states=[net.head], device_id=device(), use_orig_params=True)
    batches = fsdp_c.join(model, batches_of(rank, (1, 2)))
    for x in batches:
        loss_of(model, x).backward()
        assert bool(net.head.weight.grad.any()) == batches.has_data
        model.zero_grad()
    loss_of(model, x).backward()
    assert bool(net.head.weight.grad.any())


@on_ranks(2)
def test_bodies_may_take_entries_from_a_batch(rank: int) -> None:
    model = wrapped(plain())
    mine = [{"x": [x], "rank": rank} for x in batches_of(rank, (1, 3))]
    seen = 0
    for batch in fsdp_c.join(model, mine):
        loss_of(model, batch.pop("x").pop()).backward()
        assert batch == {"rank": rank}
        seen += 1
    assert seen == 3


@on_ranks(2)
def test_evaluation_and_an_early_end_work_as_well(rank: int) -> None:
    model = wrapped(plain())
    with torch.no_grad():
        assert sum(1 for x in fsdp_c.join(model, batches_of(rank, (4, 1))) if model(x) is not None) == 4
    for step, x in enumerate(fsdp_c.join(model, batches_of(rank, (4, 1)))):
        loss_of(model, x).backward()
        if step == 1:
            break
    assert not any(unit._unit.brings_zeros for unit in FSDP.fsdp_modules(model))
    assert list(fsdp_c.join(model, [])) == []


@on_ranks(2)
def test_two_models_of_one_loop_are_joined_together(rank: int, world_size: int) -> None:
    numbers = (1, 3)
    models = nn.ModuleList([wrapped(plain(), use_orig_params=True) for _ in range(2)])
    for x in fsdp_c.join(models, batches_of(rank, numbers)):
        sum(loss_of(model, x) for model in models).backward()
    expected = plain()
    for x in batches_of(0, numbers) + batches_of(1, numbers):
        (loss_of(expected, x) / world_size).backward()
    for model in models:
        with FSDP.summon_full_params(model, with_grads=True):
            for own, param in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(own.grad, param.grad)


@on_ranks(4)
def test_ranks_without_any_batch_are_named_on_every_rank(rank: int) -> None:
    model = wrapped(plain(), "HYBRID_SHARD")
    with pytest.raises(ValueError, match=rf"rank {rank}: ranks 1, 3 of join\(\) have no batch at all"):
        list(fsdp_c.join(model, batches_of(rank, (1, 0, 2, 0))))


@on_ranks(2)
def test_what_cannot_be_joined_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="this has no units"):
        list(fsdp_c.join(plain(), []))
    alone = [dist.new_group([member]) for member in range(world_size)]
    both = nn.ModuleList([wrapped(plain()), wrapped(plain(), process_group=alone[rank])])
    with pytest.raises(ValueError, match="have different process groups"):
        list(fsdp_c.join(both, []))
