"""A backward inside the forward of the root: bitwise equal to torch through inner units, refused through the
root itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import WIDTH
from tests.pairwise import pairwise
from tests.parity.engine import Point, Scenario, compare
from tests.parity.scenarios import plain_step
from tests.ranks import STRATEGIES, VIEWS, on_ranks
from tests.training import batch, wrap


class Inside(nn.Module):
    """Two units, and parameters of the root. ``step`` is the body of its forward."""

    def __init__(
        self, wrap: Callable[[nn.Module], nn.Module], step: Callable[[Inside, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.before, self.own = wrap(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = wrap(nn.Linear(WIDTH, WIDTH)), wrap(nn.Linear(WIDTH, WIDTH))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def auxiliary_loss(model: Inside, x: Tensor) -> Tensor:
    x = model.before(x)
    model.first(x.detach()).square().mean().backward()
    return model.second(model.own(x))


def unit_used_again(model: Inside, x: Tensor) -> Tensor:
    x = model.before(x)
    model.first(x.detach()).square().mean().backward()
    return model.second(model.first(model.own(x)))


def gradient_of_the_input(model: Inside, x: Tensor) -> Tensor:
    """Run a backward inside the forward, as models of energies do to return forces."""
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(model.first(x).square().sum(), x)
    return model.second(model.own(model.before(x) + force))


def two_backwards(model: Inside, x: Tensor) -> Tensor:
    for unit in (model.first, model.second):
        unit(x).square().mean().backward()
    return model.own(model.before(x))


def own_parameters(model: Inside, x: Tensor) -> Tensor:
    model.first(model.own(x)).square().mean().backward()
    return model.second(x)


STEPS = {
    step.__name__: step for step in (auxiliary_loss, unit_used_again, gradient_of_the_input, two_backwards)
}


def build(which: str, step: Callable[[Inside, Tensor], Tensor], **arguments: Any) -> Any:
    torch.manual_seed(3)
    unit = functools.partial(wrap, which=which, **arguments)
    return unit(Inside(unit, step))


@pairwise(use_orig_params=VIEWS, strategy=STRATEGIES, name=tuple(STEPS))
@on_ranks(2)
def test_training_with_a_backward_inside_the_forward_equals_torchs(
    rank: int, world_size: int, name: str, strategy: str, use_orig_params: bool
) -> None:
    if use_orig_params and strategy == "NO_SHARD" and name == "gradient_of_the_input":
        pytest.skip("torch no longer lists the parameters of such a unit; see the next test")
    scenario = Scenario(lambda run: run.wrap(Inside(run.wrap, STEPS[name])), plain_step)
    compare(Point(name, strategy, use_orig_params, optimizer="sgd"), scenario, rank, world_size)


@on_ranks(2)
def test_parameters_of_a_unit_are_listed_after_such_a_backward(rank: int) -> None:
    listed = {}
    for which in ("torch", "fsdp_c"):
        model = build(which, gradient_of_the_input, strategy="NO_SHARD")
        model(batch(rank, 0)).sum().backward()
        listed[which] = any(".first." in f".{name}" for name, _ in model.named_parameters())
    assert listed == {"torch": False, "fsdp_c": True}


@on_ranks(2)
def test_units_after_the_backward_inside_are_freed_and_prefetched_as_before(rank: int) -> None:
    """Without a backward of the whole model, the parameters unsharded for the inner backward must not become
    stale.
    """
    model = build("fsdp_c", gradient_of_the_input)
    for _ in range(2):
        before = model(batch(rank, 0)).detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(model(batch(rank, 0)), before)
    model(batch(rank, 0)).sum().backward()
    assert all(handle.unsharded_nbytes == 0 for handle in model._all_handles)


@on_ranks(2)
def test_backward_through_the_unit_inside_its_forward_is_refused_by_name(rank: int) -> None:
    for which in ("torch", "fsdp_c"):
        model = build(which, own_parameters)
        with pytest.raises((AssertionError, RuntimeError)) as found:
            model(batch(rank, 0))
        if which == "torch":
            assert "BACKWARD_POST" in str(found.value) and "wrap" not in str(found.value)
            continue
        for part in (f"rank {rank}, unit Inside", "from FORWARD to BACKWARD_POST", "as units of their own"):
            assert part in str(found.value)
        model.module.step = auxiliary_loss
        model(batch(rank, 0)).sum().backward()
