"""After an exception inside a step nothing stays unsharded, and once the gradients are zeroed the next steps are
bitwise those of a run without the failed step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.collectives import ALL_GATHER
from tests.models import WIDTH
from tests.parity.engine import different_paths
from tests.ranks import all_strategies, both_views, on_ranks
from tests.storage import live_nbytes_after_a_failure, settled_nbytes
from tests.training import PER_BLOCK, assert_same, batch, plain, wrap

STEPS_BEFORE = 2
STEPS_AFTER = 3


class Trouble(Exception):
    """An exception of user code."""


class RaiseInBackward(torch.autograd.Function):
    """The identity, whose backward calls ``run.in_backward`` and raises Trouble if ``run.fails``."""

    @staticmethod
    def forward(context: Any, value: Tensor, run: Trained) -> Tensor:
        context.run = run
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.run.in_backward()
        if context.run.fails:
            raise Trouble
        return gradient, None


class Trained:
    """A model, its optimizer, and the record of its steps."""

    def __init__(
        self, rank: int, strategy: str = "FULL_SHARD", use_orig_params: bool = True, **arguments: Any
    ) -> None:
        net = plain()
        self.rank = rank
        self.fails = False
        self.in_backward: Callable[[], Any] = lambda: None
        net.blocks[1].norm.register_forward_hook(
            lambda module, args, output: RaiseInBackward.apply(output, self)
        )
        options = {"use_orig_params": use_orig_params, "auto_wrap_policy": PER_BLOCK}
        self.model = wrap(net, strategy=strategy, **options, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[Tensor] = []

    def loss(self, number: int) -> Tensor:
        return self.model(batch(self.rank, number)).float().square().mean()

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.loss(len(self.losses))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach().clone())

    def failing_step(self) -> None:
        self.fails = True
        with pytest.raises(Trouble):
            self.loss(99).backward()
        self.fails = False


def assert_same_run(expected: Trained, actual: Trained) -> None:
    assert not different_paths(expected.losses, actual.losses)
    assert_same(*(dict(one.model.named_parameters()) for one in (expected, actual)))


def uninterrupted(rank: int, *arguments: Any, **options: Any) -> Trained:
    run = Trained(rank, *arguments, **options)
    run.steps(STEPS_BEFORE + STEPS_AFTER)
    return run


@pytest.mark.parametrize(
    ("strategy", "limit"),
    [("FULL_SHARD", 1_000), ("FULL_SHARD", 10_000), ("SHARD_GRAD_OP", 1_000), ("NO_SHARD", 1_000)],
)
@both_views
@on_ranks(2)
def test_infinite_recursion_of_units_raises_recursion_error(
    rank: int, use_orig_params: bool, strategy: str, limit: int
) -> None:
    """With a deep stack, too. Nothing stays unsharded, and the next steps are clean."""
    expected = uninterrupted(rank, strategy, use_orig_params)
    before = settled_nbytes()
    run = Trained(rank, strategy, use_orig_params)
    run.steps(STEPS_BEFORE)
    norm = run.model.module.blocks[0].module.norm
    hook = norm.register_forward_pre_hook(lambda module, args: run.model(args[0]) and None)
    default = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    with pytest.raises(RecursionError, match="maximum recursion depth"):
        run.loss(99)
    sys.setrecursionlimit(default)
    hook.remove()
    assert live_nbytes_after_a_failure(before) == before
    run.steps(STEPS_AFTER)
    assert_same_run(expected, run)


@all_strategies
@on_ranks(2)
def test_a_failed_backward_freed_late_leaves_the_next_one_alone(rank: int, strategy: str) -> None:
    """On a GPU autograd's thread frees a failed backward some time later: its queued callback lives until then."""
    expected, run = uninterrupted(rank, strategy), Trained(rank, strategy)
    run.steps(STEPS_BEFORE)
    held: list[Any] = []
    run.in_backward = lambda: held.extend(one for one in gc.get_objects() if type(one).__name__ == "Hook")
    run.failing_step()
    assert held
    run.in_backward = held.clear
    run.optimizer.zero_grad()
    run.steps(STEPS_AFTER)
    assert not held
    assert_same_run(expected, run)


# ----------------------------------------------------------------- a collective fails


class BrokenWork:
    """A collective that has been sent, and then fails."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        raise Trouble("while waiting")


@both_views
@on_ranks(2)
def test_all_units_are_reset_when_a_prefetch_failed(use_orig_params: bool) -> None:
    """Two units are prefetched when the first layer raises, and the first prefetch has failed."""
    before = settled_nbytes()
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    options = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": use_orig_params}
    model = wrap(net, forward_prefetch=True, **options)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    model._exec_order_data._forward_prefetch_limit = 2
    gather, calls = getattr(dist, ALL_GATHER), []

    def second_fails(*arguments: Any, **options: Any) -> Any:
        calls.append(gather(*arguments, **options))
        return BrokenWork(calls[-1]) if len(calls) == 2 else calls[-1]

    def stop(*arguments: Any) -> None:
        raise Trouble("in the first layer")

    hook = model.module[0].module.register_forward_pre_hook(stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, ALL_GATHER, second_fails)
        with pytest.raises(Trouble, match="in the first layer"):
            model(x)
    hook.remove()
    assert len(calls) == 3
    assert live_nbytes_after_a_failure(before) == before
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not model(x).any()  # the zeros, not the values from before


# ----------------------------------------------------------------- errors of the library


@on_ranks(2)
def test_sparse_gradient_is_refused_with_rank_unit_parameter_and_remedy(rank: int) -> None:
    model = wrap(nn.Embedding(7, WIDTH, sparse=True))
    with pytest.raises(
        RuntimeError, match=rf"rank {rank}, unit Embedding.*gradient of weight.*ignored_modules, give all"
    ):
        model(torch.arange(3)).sum().backward()
