"""Flat parameters that are moved off the device between steps and back, and units that are used layer by
layer.

Libraries for reinforcement learning do both around a rollout. On the CPU a copy replaces the move; tests/cuda
has real moves.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c._runtime_utils import _lazy_init
from tests.models import WIDTH
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, both_views, device, on_ranks
from tests.training import batch, sharded


def build(use_orig_params: bool = True, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    return sharded("fsdp_c", strategy, {"tied": True}, use_orig_params=use_orig_params, **arguments)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def move(model: Any) -> None:
    """Move the flat parameters, with the checks of such a library."""
    _lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        flat_param = handle.flat_param
        before = flat_param.data_ptr()
        assert before == flat_param._local_shard.data_ptr() and flat_param.data is not flat_param._local_shard
        assert flat_param.size() == flat_param._local_shard.size()
        handle.flat_param_to(device(), non_blocking=True, copy=True)
        flat_param._local_shard = flat_param.data
        assert flat_param.data_ptr() != before
    model.to(device()).float()  # no move


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, mixed=[False, True])
@on_ranks(2)
def test_moved_model_trains_as_an_unmoved_one(
    rank: int, use_orig_params: bool, strategy: str, mixed: bool
) -> None:
    """Moves before the first step, between steps, between forward and backward, after an evaluation."""
    seen = []
    for moves in (False, True):
        options = {"mixed_precision": MixedPrecision(torch.bfloat16)} if mixed else {}
        model = build(use_orig_params, strategy, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        results = []
        for step in range(4):
            if moves:
                move(model)
            loss = loss_of(model, rank, step)
            if moves and step % 2:
                move(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                results += [loss.detach(), loss_of(model, rank, step)]
        results += model.state_dict().values()
        seen.append(results)
    assert all(map(torch.equal, *seen)) and len(seen[0]) > 8


@both_views
@on_ranks(2)
def test_writes_to_a_moved_flat_parameter_are_all_gathered(use_orig_params: bool) -> None:
    model = build(use_orig_params)
    for handle in model._all_handles:
        handle.flat_param_to(device(), copy=True)
        handle.flat_param.data.fill_(0.5)
    with FSDP.summon_full_params(model):
        assert all(bool((param == 0.5).all()) for param in model.parameters())


@on_ranks(2)
def test_original_parameters_move_with_their_edits(rank: int) -> None:
    model = build()
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    param = next(param for param in model.parameters() if param.numel())
    param.data = torch.full_like(param, 2.0)  # not written back yet
    handle = next(
        handle for handle in model._all_handles if any(param is one for one in handle.flat_param._params)
    )
    handle.flat_param_to(device(), copy=True)
    assert bool((param == 2.0).all())
    assert param.untyped_storage().data_ptr() == handle.flat_param.untyped_storage().data_ptr()


@on_ranks(2)
def test_moving_is_refused_while_parameters_are_in_use(rank: int) -> None:
    model = build()
    refused = r"rank \d.*cannot be moved in state SUMMON"
    with FSDP.summon_full_params(model), pytest.raises(AssertionError, match=refused):
        model._handle.flat_param_to(device(), copy=True)
    model.module.register_forward_pre_hook(lambda *_: model._handle.flat_param_to(device(), copy=True))
    with pytest.raises(AssertionError, match="cannot be moved in state FORWARD"):
        loss_of(model, rank, 0)


@both_views
@on_ranks(2)
def test_move_that_fails_leaves_everything_where_it_was(rank: int, use_orig_params: bool) -> None:
    model = build(use_orig_params)
    expected = loss_of(model, rank, 0).detach()
    narrow, failures = Tensor.narrow, iter([True])

    def narrow_later(*args: Any) -> Tensor:
        if next(failures, False):
            raise RuntimeError("not this time")
        return narrow(*args)

    before = model._flat_param.data_ptr()
    with pytest.raises(RuntimeError):  # torch's own refusal
        model._handle.flat_param_to("meta")
    with (
        mock.patch.object(Tensor, "narrow", narrow_later),
        pytest.raises(RuntimeError, match="not this time"),
    ):
        model._handle.flat_param_to(torch.float64)
    assert (model._flat_param.data_ptr(), model._flat_param.dtype) == (before, torch.float32)
    assert torch.equal(loss_of(model, rank, 0).detach(), expected)


# ----------------------------------------------------------------- gradients


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def backward(model: Any, rank: int, step: int, sync: bool = True) -> None:
    x = batch(rank, step, next(model.parameters()).dtype)
    with contextlib.nullcontext() if sync else model.no_sync():
        model(x).square().mean().backward()


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, sync=[True, False])
@on_ranks(2)
def test_gradients_go_to_another_dtype_with_the_parameters(
    rank: int, use_orig_params: bool, strategy: str, sync: bool
) -> None:
    """Like nn.Module. Later gradients are added to the converted ones."""
    model = build(use_orig_params, strategy)
    backward(model, rank, 0, sync)
    before = gradients_of(model)
    model.double()
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.dtype == torch.float64
        assert (param.grad is None) == (grad is None)
        if grad is not None:
            assert param.grad is not None and torch.equal(param.grad, grad.double())
    model.float().double()
    first, other = build(use_orig_params, strategy), build(use_orig_params, strategy).double()
    backward(first, rank, 0)
    for step in (1, 2):
        backward(model, rank, step, sync=sync or step == 2)
        backward(other, rank, step, sync=sync or step == 2)
    for grad, early, late in zip(*map(gradients_of, (model, first, other)), strict=True):
        expected = None if late is None else early.double() + late
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_replaced_and_cleared_gradients_move_with_the_parameters(rank: int, strategy: str) -> None:
    model = build(strategy=strategy)
    backward(model, rank, 0)
    cleared, replaced, *_ = [param for param in model.parameters() if param.grad is not None]
    cleared.grad, replaced.grad = None, torch.full_like(replaced, 3.0)
    for move in (model.double, model.float, model.double):
        move()
        assert cleared.grad is None
        assert replaced.grad is not None and replaced.grad.dtype == replaced.dtype
        assert bool((replaced.grad == 3.0).all())
    replaced.grad.fill_(4.0)
    handles = [
        handle for handle in model._all_handles if any(replaced is one for one in handle.flat_param._params)
    ]
    assert bool((handles[0].flat_param.grad == 4.0).any())
    model.zero_grad()
    assert all(handle.flat_param.grad is None for handle in model._all_handles)


# ----------------------------------------------------------------- layer by layer


@on_ranks(2)
def test_unit_that_ran_alone_joins_a_tree_after_is_root_is_set_to_false(rank: int) -> None:
    model = build()
    inner = FSDP.fsdp_modules(model)[1]
    inner(torch.ones(2, WIDTH))
    assert inner._is_root
    with pytest.raises(AssertionError, match="`_is_root` should not have been set yet"):
        loss_of(model, rank, 0)
    inner._is_root = False
    assert inner._is_root is False and not inner.check_is_root()
    loss_of(model, rank, 0).backward()
    assert (model._is_root, inner._is_root) == (True, False)
    expected = loss_of(model, rank, 0).detach()
    model._is_root = None  # determined again
    assert [unit._is_root for unit in FSDP.fsdp_modules(model)] == [None] * len(FSDP.fsdp_modules(model))
    assert torch.equal(loss_of(model, rank, 0).detach(), expected) and model._is_root
    model._is_root = False  # stored, without an effect on a root
    assert model._is_root is False and torch.equal(loss_of(model, rank, 0).detach(), expected)
