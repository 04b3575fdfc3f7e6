"""Mistakes of scripts that torch's FSDP1 takes without a word are told, and what looks like them is not."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks

both_views = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])


def wrapped(kind: Any = FSDP, net: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(5)
    policy = ModuleWrapPolicy({Block})
    return kind(net or Net(), **({"auto_wrap_policy": policy, "device_id": device()} | options))


def backward(model: nn.Module, rank: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator(device()).manual_seed(rank))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def mode(chosen: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, FSDP_C_MISUSE=chosen):
        yield


@contextlib.contextmanager
def nothing_told() -> Iterator[None]:
    with mode("error"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ----------------------------------------------------------------- parameters outside every unit


def replace_head(model: Any, rank: int) -> nn.Linear:
    torch.manual_seed(7)
    head = nn.Linear(WIDTH, 3, device=device())
    model.module.head = head
    return head


@on_ranks(2)
def test_torch_trains_a_head_that_was_replaced_apart(rank: int, world_size: int) -> None:
    model = wrapped(TorchFSDP, use_orig_params=True)
    head = replace_head(model, rank)
    backward(model, rank)
    grads = [torch.empty_like(head.weight) for _ in range(world_size)]
    dist.all_gather(grads, head.weight.grad)
    assert not torch.equal(*grads)


@both_views
@on_ranks(2)
def test_a_head_that_was_replaced_before_the_first_step_is_refused(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    replace_head(model, rank)
    with pytest.raises(RuntimeError, match=rf"rank {rank}, unit Net: \['head.weight', 'head.bias'\] got gradients"):
        backward(model, rank)


@both_views
@on_ranks(2)
def test_a_head_that_was_replaced_between_steps_is_refused(rank: int, world_size: int, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    backward(model, rank)
    backward(model, rank)
    replace_head(model, rank)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'head.weight'.*ignored_states"):
            backward(model, rank)


@on_ranks(2)
def test_what_is_done_about_parameters_outside_can_be_chosen(rank: int, world_size: int) -> None:
    with mode("warn"):
        model = wrapped()
        replace_head(model, rank)
        with pytest.warns(UserWarning, match="'head.weight'") as record:
            backward(model, rank)
    assert record[0].filename == __file__
    with mode("off"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrapped()
        replace_head(model, rank)
        backward(model, rank)
    with mode("no"), pytest.raises(ValueError, match="FSDP_C_MISUSE is 'no': set it to error, warn or off"):
        backward(wrapped(), rank)


def freeze(model: Any, rank: int) -> None:
    replace_head(model, rank).requires_grad_(False)


def reduce_by_hook(model: Any, rank: int) -> None:
    for param in replace_head(model, rank).parameters():
        param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG))


def wrap_again(model: Any, rank: int) -> None:
    model.module.head = FSDP(replace_head(model, rank), device_id=device())


def put_ddp_around(model: Any, rank: int) -> None:
    model.module.head = nn.parallel.DistributedDataParallel(replace_head(model, rank))


@pytest.mark.parametrize("done", [freeze, reduce_by_hook, wrap_again, put_ddp_around])
@on_ranks(2)
def test_a_head_that_is_frozen_or_reduced_may_be_replaced(
    rank: int, world_size: int, done: Callable[[Any, int], None]
) -> None:
    model = wrapped()
    done(model, rank)
    with nothing_told():
        backward(model, rank)


@pytest.mark.parametrize("by_module", [True, False], ids=["module", "parameters"])
@on_ranks(2)
def test_what_is_ignored_may_train_outside_of_units(rank: int, world_size: int, by_module: bool) -> None:
    net = Net().to(device())
    model = wrapped(net=net, ignored_states=[net.head] if by_module else list(net.head.parameters()))
    with nothing_told():
        backward(model, rank)
        assert net.head.weight.grad is not None
        if by_module:
            net.head.extra = nn.Linear(3, 3)
        backward(model, rank)


@on_ranks(2)
def test_units_of_one_rank_have_nobody_to_drift_from(rank: int, world_size: int) -> None:
    groups = [dist.new_group([one]) for one in range(world_size)]
    model = wrapped(process_group=groups[rank])
    replace_head(model, rank)
    with mode("error"):
        backward(model, rank)
