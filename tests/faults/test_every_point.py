"""An exception at any point of a step leaks nothing: each point of a step raises in turn.

After each the memory is as before, and a forward and backward give the bits that they gave before any
exception; at the end some steps are compared with those of a model that met none. Both ranks raise at the
same point. Only every 11th point is tried, unless pytest has --exhaustive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.faults.points import Points, Trouble, every_call, watched_collectives
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks
from tests.settings import EXHAUSTIVE
from tests.storage import live_nbytes, live_nbytes_after_a_failure, settled_nbytes

STRIDE = 1 if EXHAUSTIVE else 11

SCENARIOS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "full_shard-flat": {"use_orig_params": False, "forward_prefetch": True, "backward_prefetch": None},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16), "limit_all_gathers": False},
    "offload": {
        "cpu_offload": CPUOffload(offload_params=True),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
    },
    "comm_hook": {"comm_hook": True},
    "frozen": {"frozen": True},
    "segments": {"segments": True, "use_orig_params": False},
    "checkpointed": {"checkpoint": True},
    "no_sync": {"no_sync": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "optional": {"optional": True, "no_sync": True},
}


class Watched:
    """A small model with points everywhere, and a constant batch."""

    def __init__(
        self,
        rank: int,
        *,
        watch: bool = True,
        frozen: bool = False,
        segments: bool = False,
        comm_hook: bool = False,
        checkpoint: bool = False,
        no_sync: bool = False,
        optional: bool = False,
        **arguments: Any,
    ) -> None:
        from fsdp_c import FullyShardedDataParallel
        from fsdp_c import optional as mark

        torch.manual_seed(5)
        plain = Net(blocks=2)
        plain.blocks[0].requires_grad_(not frozen)
        for block in plain.blocks if segments else ():
            block.up.requires_grad_(False)
            block.order = torch.nn.Parameter(torch.arange(5), requires_grad=False)
        if checkpoint:
            plain.blocks[1].up = checkpoint_wrapper(plain.blocks[1].up)
        if optional:  # block 2 does not run, the others do
            plain.blocks.append(Block())
            plain.skip = frozenset({2})
            mark(plain.blocks)
        self.points = Points()
        self.no_sync = no_sync
        self.model = FullyShardedDataParallel(
            plain,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device(),
            **({"use_orig_params": True} | arguments),
        )
        if comm_hook:
            self.model.register_comm_hook(None, self.points.comm_hook)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        if watch:
            self.watch()
        generator = torch.Generator(device()).manual_seed(rank)
        self.batch = torch.randn(3, WIDTH, generator=generator, device=device())
        self.batch.requires_grad_(frozen)

    def watch(self) -> None:
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.nn.ModuleList):
                self.points.watch_module(name or "the root", module)

    def forward_and_backward(self) -> Tensor:
        loss = self.model(self.batch).float().square().mean()
        loss.backward()
        return loss.detach()

    def whole_step(self) -> Tensor:
        if self.no_sync:
            with self.model.no_sync():
                self.forward_and_backward()
        return self.forward_and_backward()

    def result(self) -> list[Tensor]:
        """Return the loss and the gradients of a step, and clear the gradients."""
        results = [self.whole_step()]
        results += [param.grad.clone() for param in self.model.parameters() if param.grad is not None]
        self.forget()
        return results

    def forget(self) -> None:
        self.optimizer.zero_grad()
        self.batch.grad = None

    def trained(self, steps: int = 3) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            losses.append(self.whole_step())
            self.optimizer.step()
            self.forget()
        return losses + [param.detach().clone() for param in self.model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def waiting_for_a_backward(run: Watched) -> int:
    """Return the unsharded bytes between a forward and its backward, where units cannot notice an exception."""
    output = run.model(run.batch)
    nbytes = live_nbytes()
    output.sum().backward()
    run.forget()
    return nbytes


def raise_everywhere(
    run: Watched,
    step: Callable[[], Any],
    around: Callable[[Points], Any],
    error: type[BaseException],
    every: int = STRIDE,
) -> int:
    """Raise at every point of ``step`` in turn, check after each, and return the number of points."""
    points = run.points
    for _ in range(2):  # the second round runs with state that the first has initialized
        expected = run.result()
        with points.raising_at(-1), around(points):
            step()
        run.forget()
    names, before = list(points.names), live_nbytes()
    waiting = waiting_for_a_backward(run)
    kept: dict[str, Any] = {}
    for number in range(0, len(names), every):
        with (
            points.raising_at(number, error),
            pytest.raises(error, match=f"at point {number}, "),
            around(points),
        ):
            step()
        run.forget()
        if live_nbytes_after_a_failure(before, waiting) not in (before, waiting):
            kept[f"{number} {names[number]}"] = f"{live_nbytes()} bytes"
        if not same(run.result(), expected):
            kept[f"{number} {names[number]}"] = "another result"
        if live_nbytes() != before:
            kept[f"{number} {names[number]}"] = f"{live_nbytes()} bytes after the next step"
    assert kept == {}
    return len(names)


@pytest.mark.parametrize("scenario", SCENARIOS)
@on_ranks(2, label="faults")
def test_an_exception_at_any_point_of_user_code_leaves_nothing_behind(rank: int, scenario: str) -> None:
    before = settled_nbytes()
    run = Watched(rank, **SCENARIOS[scenario])
    count = raise_everywhere(run, run.whole_step, watched_collectives, Trouble)
    assert count > 60
    assert same(run.trained(), Watched(rank, watch=False, **SCENARIOS[scenario]).trained())
    del run
    assert settled_nbytes() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("scenario", ["full_shard", "frozen"])
@on_ranks(2, label="faults")
def test_an_interrupt_between_any_two_calls_of_a_step_leaves_nothing_behind(
    rank: int, scenario: str, error: type[BaseException]
) -> None:
    run = Watched(rank, watch=False, **SCENARIOS[scenario])
    gc.collect()
    gc.disable()  # callbacks of a garbage collection would be points of one rank only
    torch.set_default_device(None)  # an interrupt in the default device's handler would disable it
    try:
        count = raise_everywhere(run, run.whole_step, every_call, error, STRIDE)
    finally:
        gc.enable()
        torch.set_default_device(device())
    assert count > 100
    assert same(run.trained(), Watched(rank, watch=False, **SCENARIOS[scenario]).trained())


# ----------------------------------------------------------------- optimizers


class Stepwise(torch.optim.Optimizer):
    """Gradient descent that reaches a point before and after each parameter."""

    def __init__(self, params: Iterable[Tensor], reach: Callable[[str], None]) -> None:
        super().__init__(params, {})
        self.reach = reach

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.reach("before a parameter's update")
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
            self.reach("after a parameter's update")


class Stepped(Watched):
    """A model whose step includes the optimizer's, after the backward or inside it. ``forget`` restores the
    parameters.
    """

    def __init__(self, rank: int, in_backward: bool, strategy: ShardingStrategy) -> None:
        super().__init__(rank, watch=False, sharding_strategy=strategy)
        params = list(self.model.parameters())
        if in_backward:
            for param, everywhere in zip(params, held_everywhere(params), strict=True):
                # otherwise a point would be reached on one rank only
                reach = self.points.reach if everywhere else lambda name: None
                _apply_optimizer_in_backward(Stepwise, [param], {"reach": reach})
        else:
            self.optimizer = Stepwise(params, self.points.reach)
        self.in_backward = in_backward
        self.before = [param.detach().clone() for param in params]

    def whole_step(self) -> Tensor:
        loss = super().whole_step()
        if not self.in_backward:
            self.optimizer.step()
        return loss

    def result(self) -> list[Tensor]:
        results = [self.whole_step(), *(param.detach().clone() for param in self.model.parameters())]
        self.forget()
        return results

    @torch.no_grad()
    def forget(self) -> None:
        super().forget()
        for param, before in zip(self.model.parameters(), self.before, strict=True):
            param.copy_(before)


def held_everywhere(params: list[Tensor]) -> list[bool]:
    """Return for each parameter True if every rank has elements of it."""
    held = torch.tensor([param.numel() > 0 for param in params], dtype=torch.int32)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return held.bool().tolist()


@pytest.mark.parametrize(
    ("in_backward", "strategy"), [(False, "FULL_SHARD"), (True, "FULL_SHARD"), (True, "NO_SHARD")]
)
@on_ranks(2, label="faults")
def test_an_exception_in_an_optimizer_step_leaves_only_the_updates_made(
    rank: int, in_backward: bool, strategy: str
) -> None:
    run = Stepped(rank, in_backward, ShardingStrategy[strategy])
    undisturbed = run.result()
    count = raise_everywhere(run, run.whole_step, lambda points: nullcontext(), Trouble, every=1)
    assert count >= (4 if strategy == "FULL_SHARD" else 20)
    assert same(run.result(), undisturbed)
    assert not same(undisturbed[1:], run.before)
