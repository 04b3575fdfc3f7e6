"""Sharded training equals training of the plain model on the batches of all ranks together.

The tolerance is that of summing gradients in another order: 1e-10 relative in fp64, 2e-4 in fp32, over ten
steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models import WIDTH, Block, Net
from tests.parity.engine import implementation
from tests.ranks import device, on_ranks

STEPS = 10
BATCH = 4
TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-12}, torch.float32: {"rtol": 2e-4, "atol": 2e-6}}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint_reentrant": {"around": "reentrant"},
    "checkpoint_nonreentrant": {"checkpoint_mode": "nonreentrant"},
    "shared": {"tied": True, "tied_head": True},
    "unused": {"extra": True},
}


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).to(dtype)


def shard(
    model: nn.Module, strategy: str = "FULL_SHARD", use_orig_params: bool = True, **arguments: Any
) -> Any:
    return implementation("fsdp_c")(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=device(),
        **arguments,
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(step: int, world_size: int, dtype: torch.dtype, index: int = 0) -> Tensor:
    """The inputs of all ranks, one after the other."""
    generator = torch.Generator(device()).manual_seed(100 * step + index)
    return torch.randn(world_size * BATCH, WIDTH, generator=generator, dtype=dtype)


def own(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def full_state(model: Any) -> dict[str, Tensor]:
    with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def assert_same_state(plain: nn.Module, sharded: Any, tolerance: dict[str, float]) -> None:
    expected, actual = plain.state_dict(), full_state(sharded)
    assert set(expected) == set(actual)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


Step = Callable[[nn.Module, Callable[[int], Tensor]], None]


def train(
    model: nn.Module, step: Step, batch: Callable[[int, int], Tensor], steps: range = range(STEPS)
) -> None:
    optimizer = sgd(model)
    for number in steps:
        step(model, lambda index, number=number: batch(number, index))
        optimizer.step()
        optimizer.zero_grad()


def train_both(plain: nn.Module, sharded: Any, step: Step, world_size: int, dtype: torch.dtype) -> None:
    train(plain, step, lambda number, index: batches(number, world_size, dtype, index))
    train(sharded, step, lambda number, index: own(batches(number, world_size, dtype, index)))


def one_backward(model: nn.Module, batch: Callable[[int], Tensor]) -> None:
    loss_of(model, batch(0)).backward()


def accumulate_without_sync(model: nn.Module, batch: Callable[[int], Tensor]) -> None:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            loss_of(model, batch(0)).backward()
            loss_of(model, batch(1)).backward()
    else:
        loss_of(model, batch(0)).backward()
        loss_of(model, batch(1)).backward()
    loss_of(model, batch(2)).backward()


def two_forwards(model: nn.Module, batch: Callable[[int], Tensor]) -> None:
    (loss_of(model, batch(0)) + loss_of(model, batch(1))).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_training_equals_the_unsharded_model(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool, dtype: torch.dtype
) -> None:
    plain = build(dtype, **MODELS[model])
    sharded = shard(copy.deepcopy(plain), strategy, use_orig_params)
    train_both(plain, sharded, one_backward, world_size, dtype)
    assert_same_state(plain, sharded, TOLERANCE[dtype])


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", [accumulate_without_sync, two_forwards])
@on_ranks(2)
def test_accumulation_equals_the_unsharded_model(
    rank: int, world_size: int, step: Step, strategy: str, use_orig_params: bool
) -> None:
    plain = build()
    sharded = shard(copy.deepcopy(plain), strategy, use_orig_params)
    train_both(plain, sharded, step, world_size, torch.float64)
    assert_same_state(plain, sharded, TOLERANCE[torch.float64])


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_four_ranks_equal_the_unsharded_model(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    plain = build()
    sharded = shard(copy.deepcopy(plain), strategy, use_orig_params)
    train_both(plain, sharded, one_backward, world_size, torch.float64)
    assert_same_state(plain, sharded, TOLERANCE[torch.float64])


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_frozen_unit_stays_and_the_others_train_like_the_unsharded_model(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    plain = build()
    plain.blocks[1].requires_grad_(False)
    before = copy.deepcopy(plain.blocks[1].state_dict())
    sharded = shard(copy.deepcopy(plain), strategy, use_orig_params)
    train_both(plain, sharded, one_backward, world_size, torch.float64)
    assert_same_state(plain, sharded, TOLERANCE[torch.float64])
    after = full_state(sharded)
    assert all(torch.equal(value, after[f"blocks.1.{name}"]) for name, value in before.items())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_clipping_scales_by_the_norm_of_the_unsharded_gradients(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, norm_type: float
) -> None:
    plain = build(torch.float32)
    sharded = shard(copy.deepcopy(plain), strategy, use_orig_params)
    batch = batches(0, world_size, torch.float32)
    loss_of(plain, batch).backward()
    loss_of(sharded, own(batch)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    torch.testing.assert_close(sharded.clip_grad_norm_(0.01, norm_type), expected, rtol=1e-5, atol=0.0)
    for model in (plain, sharded):
        sgd(model).step()
    assert_same_state(plain, sharded, TOLERANCE[torch.float32])


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_training_resumed_from_a_full_state_dict_equals_uninterrupted_training(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    def batch(number: int, index: int) -> Tensor:
        return own(batches(number, world_size, torch.float32, index))

    def fresh() -> Any:
        return shard(build(torch.float32), strategy, use_orig_params)

    straight = fresh()
    train(straight, one_backward, batch, range(5))
    saved = {name: value.clone() for name, value in full_state(straight).items()}
    train(straight, one_backward, batch, range(5, STEPS))
    resumed = fresh()
    with type(resumed).state_dict_type(resumed, StateDictType.FULL_STATE_DICT):
        resumed.load_state_dict(saved)
    train(resumed, one_backward, batch, range(5, STEPS))
    for (name, expected), actual in zip(
        full_state(straight).items(), full_state(resumed).values(), strict=True
    ):
        assert torch.equal(expected, actual), name


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@on_ranks(2)
def test_full_state_dict_loads_into_the_plain_model(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    sharded = shard(build(tied=True), use_orig_params=use_orig_params)
    train(
        sharded,
        one_backward,
        lambda number, index: own(batches(number, world_size, torch.float64, index)),
        range(3),
    )
    plain = build(tied=True)
    plain.load_state_dict(full_state(sharded), strict=True)
    batch = own(batches(9, world_size, torch.float64))
    torch.testing.assert_close(sharded(batch), plain(batch), rtol=0.0, atol=0.0)
