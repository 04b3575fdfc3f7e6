"""CUDA graphs of steps whose units stay unsharded. Replays must equal the same steps without a graph."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_c import FullyShardedDataParallel
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.ranks import both_views, on_ranks

TIMEOUT_S = 180.0
REPLAYS = 3


def wrapped(strategy: ShardingStrategy, use_orig_params: bool) -> Any:
    torch.manual_seed(4)
    return FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda(),
        process_group=nccl_group(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()


def losses_and_gradients(model: Any, graphed: bool) -> list[Tensor]:
    """Return losses and gradients of steps without reduction, which accumulate unsharded gradients."""
    inputs, losses = batch(0), []

    def step() -> Tensor:
        loss: Tensor = model(inputs).square().sum()
        loss.backward()
        return loss

    with model.no_sync():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up before the capture
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                loss = step()
        for number in range(1, REPLAYS + 1):
            inputs.copy_(batch(number))
            if graphed:
                graph.replay()
            else:
                loss = step()
            losses.append(loss.detach().clone())
    return losses + [param.grad.clone() for param in model.parameters() if param.grad is not None]


@both_views
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=lambda one: one.name
)
@on_ranks(1, TIMEOUT_S)
def test_a_graph_of_forward_and_backward(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    torch.cuda.set_device(0)
    expected = losses_and_gradients(wrapped(strategy, use_orig_params), graphed=False)
    actual = losses_and_gradients(wrapped(strategy, use_orig_params), graphed=True)
    assert len(expected) == len(actual) > REPLAYS
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def used_and_in_a_cycle(strategy: ShardingStrategy) -> tuple[Any, Any]:
    """Return a used model in a reference cycle, so that only the garbage collector frees it, and a weak
    reference to it.
    """
    model = wrapped(strategy, True)
    model(batch(0)).sum().backward()
    model.itself = [model]
    return model, weakref.ref(model)


@pytest.mark.parametrize("builtins", [True, False], ids=["", "without_builtins"])
@on_ranks(1, TIMEOUT_S)
def test_a_model_may_be_collected_while_a_graph_is_captured(builtins: bool) -> None:
    """torch's allocator aborts the process if one of its pools is freed during a capture. The collector may run in
    a named tuple's __new__, whose globals have no builtins, so that imports fail.
    """
    torch.cuda.set_device(0)
    inputs = batch(0)
    model, gone = used_and_in_a_cycle(ShardingStrategy.NO_SHARD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = inputs * 2
        del model
        if builtins:
            gc.collect()
        else:
            eval("collect()", {"__builtins__": {}, "collect": gc.collect})
    assert gone() is None
    graph.replay()
    assert torch.equal(doubled, inputs * 2)


@contextlib.contextmanager
def collected_as_a_pool_is_entered() -> Iterator[Any]:
    """Collect a used model at the moment the body enters its first pool. Yields a weak reference to it."""
    begin = torch._C._cuda_beginAllocateCurrentThreadToPool
    model, gone = used_and_in_a_cycle(ShardingStrategy.FULL_SHARD)
    held = [model]
    del model

    def begin_and_collect(*args: Any) -> None:
        begin(*args)
        held.clear()
        gc.collect()

    with mock.patch.object(torch._C, "_cuda_beginAllocateCurrentThreadToPool", begin_and_collect):
        yield gone


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_model_may_be_collected_while_another_takes_memory() -> None:
    """The garbage collector may run anywhere in a step, here where another model enters its pool."""
    torch.cuda.set_device(0)
    other = wrapped(ShardingStrategy.FULL_SHARD, True)
    with collected_as_a_pool_is_entered() as gone:
        other(batch(0)).sum().backward()
    assert gone() is None


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_error_on_leaving_a_pool_is_raised_while_another_pool_waits() -> None:
    torch.cuda.set_device(0)
    other = wrapped(ShardingStrategy.FULL_SHARD, True)
    release = torch._C._cuda_releasePool

    def release_and_raise(*args: Any) -> None:
        release(*args)
        raise ValueError("of torch")

    with collected_as_a_pool_is_entered() as gone:
        with mock.patch.object(torch._C, "_cuda_releasePool", release_and_raise):
            with pytest.raises(ValueError, match="of torch"):
                other(batch(0))
        assert gone() is None
