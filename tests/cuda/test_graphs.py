"""Steps of a model whose units stay gathered, in a CUDA graph: replays give what the same steps give without
one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

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
    """Of steps without reduction, which leave the gradients of all of them on each rank."""
    inputs, losses = batch(0), []

    def step() -> Tensor:
        loss: Tensor = model(inputs).square().sum()
        loss.backward()
        return loss

    with model.no_sync():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # makes what is made once, as before every capture
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


@on_ranks(1, TIMEOUT_S)
def test_a_model_may_be_collected_while_a_graph_is_captured() -> None:
    """torch gives back no pool then: it ends the process."""
    torch.cuda.set_device(0)
    inputs = batch(0)
    model = wrapped(ShardingStrategy.NO_SHARD, True)
    model(inputs).sum().backward()
    gone = weakref.ref(model)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = inputs * 2
        del model
        gc.collect()
    assert gone() is None
    graph.replay()
    assert torch.equal(doubled, inputs * 2)
