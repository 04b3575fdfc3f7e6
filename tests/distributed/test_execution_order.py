"""The order of forwards: validated under TORCH_DISTRIBUTED_DEBUG=DETAIL; and the final callback, whenever it
is called.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c.compat._runtime_utils import _post_backward_final_callback
from tests.collectives import ALL_GATHER
from tests.distributed.test_collectives import calls
from tests.models import WIDTH
from tests.ranks import all_strategies, both_views, on_ranks
from tests.training import assert_same, batch, debug_level, full_state, sharded, train, wrap

UNIT = 34  # elements of a Linear(5, 5) on two ranks: weight and bias, each aligned, and one of right padding


class Choice(nn.Module):
    """Two layers of one kind, called in the order of ``order``."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.order: tuple[str, ...] = ("left", "right")

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def choice() -> Any:
    """Return a root without parameters over two units."""
    torch.manual_seed(6)
    return wrap(Choice(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def checked() -> Any:
    with debug_level(dist.DebugLevel.DETAIL):
        return choice()


def step(model: Any, *order: str) -> None:
    model.module.order = order
    model(torch.ones(1, WIDTH)).sum().backward()


def gathered(seen: list[Any]) -> list[int]:
    """Return the sizes of the all-gathers, in the order in which they were called."""
    return [numel for kind, numel in seen if kind == "AG"]


# ------------------------------------------------------------------ across ranks


@on_ranks(2)
def test_forward_order_that_differs_across_ranks_is_an_error_naming_both(rank: int) -> None:
    model = checked()
    with pytest.raises(
        RuntimeError,
        match=r"^Forward order differs across ranks: rank 0 is all-gathering parameters for "
        r"\['left.weight', 'left.bias'\] while rank 1 is all-gathering parameters for "
        r"\['right.weight', 'right.bias'\]",
    ):
        step(model, *(("left", "right") if rank == 0 else ("right", "left")))
    step(model, "left", "right")  # the error was raised before the all-gather, so the model still works
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.INFO])
@on_ranks(2)
def test_nothing_is_checked_below_detail_and_in_an_evaluation(level: dist.DebugLevel) -> None:
    model = checked().eval()
    with calls() as seen, torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert gathered(seen) == [UNIT, UNIT]
    with debug_level(level):
        model = choice()
    with calls() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, "left", "right")
        step(model, "right", "left")
    assert gathered(seen) == [UNIT] * 8  # twice forward and twice backward in each step


@on_ranks(2)
def test_the_first_iteration_compares_each_unit_before_its_gather(world_size: int) -> None:
    model = checked()
    with calls() as seen:
        step(model, "left", "right")
        first = gathered(seen)
        step(model, "left", "right")
    assert first == [world_size, world_size, UNIT, world_size, world_size, UNIT, UNIT, UNIT]
    assert world_size not in gathered(seen)[len(first) :]


@on_ranks(2)
def test_replaced_all_gather_that_fills_nothing_raises_no_order_error() -> None:
    def send_nothing(output: Tensor, *args: Any, **kwargs: Any) -> None:
        if output.is_floating_point():
            output.zero_()

    model = checked()
    with mock.patch.object(dist, ALL_GATHER, send_nothing):
        step(model, "left", "right")


# ------------------------------------------------------------------ against the first iteration


def warnings_of(model: Any, *order: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, *order)
    return [
        str(one.message)
        for one in caught
        if one.category is UserWarning and "Forward order" in str(one.message)
    ]


@on_ranks(2)
def test_a_later_deviation_is_warned_of_once(rank: int) -> None:
    model = checked()
    assert warnings_of(model, "left", "right") == []
    assert warnings_of(model, "left", "right") == []
    (text,) = warnings_of(model, "right", "left")
    assert text.startswith(f"Forward order differs from that of the first iteration on rank {rank}")
    assert "Collectives are unchecked and may give incorrect results or hang" in text
    assert text.endswith("had ['left.weight', 'left.bias'] next, but ['right.weight', 'right.bias'] was run")
    assert warnings_of(model, "right", "left") == []
    model = checked()
    assert warnings_of(model, "left") == []
    (text,) = warnings_of(model, "left", "right")
    assert "The first iteration had no more units, but ['right.weight', 'right.bias'] was run" in text


@on_ranks(2)
def test_inner_units_that_become_roots_have_orders_of_their_own() -> None:
    first, second = checked(), checked()
    with debug_level(dist.DebugLevel.DETAIL):
        outer = wrap(nn.Sequential(first, second))
    outer(torch.ones(1, WIDTH)).sum().backward()
    outer.double().float()
    for _ in range(3):
        assert warnings_of(first, "left", "right") == warnings_of(second, "left") == []
    assert len(warnings_of(first, "right", "left")) == len(warnings_of(second, "right")) == 1


@on_ranks(2)
def test_a_unit_that_runs_twice_in_every_iteration_is_no_deviation() -> None:
    """Upstream records first uses only, and takes each further one for a deviation."""
    model = checked()
    for _ in range(3):
        assert warnings_of(model, "left", "right", "left") == []
    assert len(warnings_of(model, "left", "left", "right")) == 1


@on_ranks(2)
def test_a_warning_that_is_an_error_stops_the_forward() -> None:
    model = checked()
    step(model, "left", "right")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Forward order differs"):
            step(model, "right", "left")
    step(model, "left", "right")


# ------------------------------------------------------------------ the final callback


@both_views
@all_strategies
@on_ranks(2)
def test_a_step_after_a_failed_backward_and_the_final_callback_is_right(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    """Composer calls it after an out-of-memory error. Here the backward raises between the two contributions to
    each gradient.
    """

    def fail(grad: Tensor) -> None:
        raise MemoryError("out of memory")

    states = []
    for fails in (False, True):
        model = sharded(strategy=strategy, use_orig_params=use_orig_params)
        if fails:
            output = model(batch(rank, 1))
            output.register_hook(fail)
            with pytest.raises(MemoryError):
                model(output).sum().backward()
            _post_backward_final_callback(model, model)
            model.zero_grad()
        train(model, torch.optim.AdamW(model.parameters(), lr=0.1), seed=rank)
        states.append(full_state(model))
    assert_same(*states)
