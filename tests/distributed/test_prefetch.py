"""Prefetching: how many units the limits say, and units that ``_unshard`` gathers early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from tests.distributed.test_collectives import calls
from tests.distributed.test_execution_order import gathered
from tests.parity.engine import Point, Run, Scenario, compare
from tests.parity.scenarios import per_block, plain_step
from tests.ranks import all_strategies, both_views, on_ranks
from tests.training import wrap

SIZES = (1, 2, 3, 4, 5)  # of the layers' inputs: the size of an all-gather identifies its layer
X = torch.ones(1, SIZES[0])


def chain(**changes: Any) -> Any:
    torch.manual_seed(6)
    changes = {"use_orig_params": False} | changes
    layers = (wrap(nn.Linear(size, size + 1, bias=False), **changes) for size in SIZES)
    return wrap(nn.Sequential(*layers), **changes)


def gathered_layers(sizes: list[int]) -> list[int]:
    return [[size * (size + 1) for size in SIZES].index(numel) for numel in sizes]


def traced_backward(model: Any) -> list[str]:
    """All-gathers and reduce-scatters of a backward in order, as "g2" for the gather of layer 2."""
    loss = model(X).sum()
    with calls() as seen:
        loss.backward()
    return [f"{'g' if kind == 'AG' else 'r'}{gathered_layers([numel])[0]}" for kind, numel in seen]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, "g4 r4 g3 r3 g2 r2 g1 r1 g0 r0"),
        (1, "g4 g3 r4 g2 r3 g1 r2 g0 r1 r0"),
        (2, "g4 g3 g2 r4 g1 r3 g0 r2 r1 r0"),
        (9, "g4 g3 g2 g1 g0 r4 r3 r2 r1 r0"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before_lazy_init", "after_lazy_init"])
@on_ranks(2)
def test_backward_prefetch_limit(late: bool, limit: int, expected: str) -> None:
    model = chain(backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    if late:
        traced_backward(model)
    for unit in model.fsdp_modules(model):
        unit._exec_order_data._backward_prefetch_limit = limit
    assert " ".join(traced_backward(model)) == expected
    model.double().float()  # leads to a second lazy initialisation
    assert " ".join(traced_backward(model)) == expected
    assert model._exec_order_data._backward_prefetch_limit == limit


@pytest.mark.parametrize("limit", [0, 1, 2, 9])
@on_ranks(2)
def test_forward_prefetch_limit(limit: int) -> None:
    model = chain(forward_prefetch=True)
    model._exec_order_data._forward_prefetch_limit = limit
    traced_backward(model)  # the order is that of the first iteration
    ahead: list[int] = []
    with calls() as seen:
        for layer in model.module:
            layer.module.register_forward_pre_hook(lambda *_: ahead.append(len(gathered(seen))))
        model(X)
    assert gathered_layers(gathered(seen)) == [0, 1, 2, 3, 4]
    assert ahead == [min(index + 1 + limit, len(SIZES)) for index in range(len(SIZES))]


@on_ranks(2)
def test_prefetch_limits_that_are_no_counts_are_refused() -> None:
    model = chain()
    traced_backward(model)
    with pytest.raises(ValueError, match="0 or more"):
        model._exec_order_data._forward_prefetch_limit = -1
    with pytest.raises(TypeError):
        model._exec_order_data._backward_prefetch_limit = "two"


def unshard_ahead(run: Run) -> None:
    """Each step gathers two units ahead, one of them asynchronously."""
    first, _, third = run.model.module.blocks
    if run.step > 1:  # torch needs lazy initialisation first
        assert first._unshard() is None
        work = third._unshard(async_op=True)
        run.record("shape while unsharded", tuple(first.module.up.weight.shape))
        work.wait()
        work.wait()
    plain_step(run)


@both_views
@all_strategies
@on_ranks(2)
def test_training_with_unshard_equals_torch(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    point = Point("unshard", strategy, use_orig_params=use_orig_params, precision="bf16_reduce_fp32")
    # torch's gather or cast by hand does not wait for the optimizer
    compare(point, Scenario(per_block(), unshard_ahead), rank, world_size)


@on_ranks(2)
def test_unshard_gathers_once_and_before_lazy_init_too() -> None:
    model = chain()
    inner = model.module[2]
    with calls() as seen:
        inner._unshard()
        assert inner.module.weight.shape == (4, 3)
        model(X)
    assert gathered_layers(gathered(seen)) == [2, 0, 1, 3, 4]
    assert model.check_is_root() and not inner.check_is_root()
    model._unshard()  # a unit without parameters has nothing to gather


@both_views
@on_ranks(2)
def test_unshard_gathers_parameters_again_that_changed_after_a_forward(use_orig_params: bool) -> None:
    model = chain(strategy="SHARD_GRAD_OP", use_orig_params=use_orig_params)
    params = list(model.parameters())
    before = model(X)  # without a backward, which would reshard the units
    for param in params:
        param.data.mul_(2)
    for layer in model.module:
        layer._unshard()
    assert torch.equal(model(X), before * 2 ** len(SIZES))
