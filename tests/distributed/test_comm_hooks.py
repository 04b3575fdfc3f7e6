"""register_comm_hook: bitwise equal to torch's FSDP1, and its refusals.

torch's low-precision hooks end in an operation that the CPU lacks; where torch runs them here, that one is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.fsdp import MixedPrecision

from tests.models import WIDTH, Net
from tests.pairwise import pairwise
from tests.parity.engine import Point, Run, Scenario, compare
from tests.parity.scenarios import PER_BLOCK, accumulate_step, no_sync_after_sync_step, plain_step
from tests.ranks import STRATEGIES, all_strategies, on_ranks
from tests.training import sharded

LOW_PRECISION = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
STEPS = {"accumulate": accumulate_step, "no_sync_after_sync": no_sync_after_sync_step}
Hook = Callable[..., None]


def sum_hook(state: list[int], grad: Tensor, shard: Tensor | None = None) -> None:
    """Sums without averaging, counts its calls, and doubles what it sends."""
    assert not torch.is_grad_enabled()
    state.append(grad.numel())
    grad.mul_(2)
    if shard is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(shard, grad)


def own_shard_hook(state: object, grad: Tensor, shard: Tensor | None = None) -> None:
    """Set the shard to this rank's part of its own gradient, in new data of another dtype, without sending."""
    if shard is None:
        grad.data = grad.data.double()
    else:
        shard.data = grad.chunk(dist.get_world_size())[dist.get_rank()].double()


def default_hook(state: DefaultState, grad: Tensor, shard: Tensor | None = None) -> None:
    """torch's hook for the strategy at hand."""
    if shard is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, shard)


CUSTOM: dict[str, tuple[Hook, Callable[[], object]]] = {
    "default": (default_hook, lambda: DefaultState(dist.group.WORLD)),
    "sum": (sum_hook, list),
    "own_shard": (own_shard_hook, lambda: None),
}


@contextmanager
def without_record_stream() -> Iterator[None]:
    """Replace the last step of torch's low-precision hooks, which uses an operation without a CPU kernel."""

    def decompress(state: LowPrecisionState, grad: Tensor) -> None:
        grad.data = grad.data.to(state.parameter_type)

    with mock.patch.object(default_hooks, "_decompress", decompress):
        yield


def hooked(hook: Hook, state: Callable[[], object], late: bool = False) -> Callable[[Run], nn.Module]:
    def build(run: Run) -> nn.Module:
        model = run.wrap(Net(), auto_wrap_policy=PER_BLOCK)
        if late:
            model(torch.zeros(1, WIDTH)).sum().backward()
            model.zero_grad()
        model.register_comm_hook(state(), hook)
        return model

    return build


# ------------------------------------------------------------------ equal to torch


@pairwise(strategy=STRATEGIES, precision=["fp32", "bf16_reduce_fp32"], name=tuple(CUSTOM))
@on_ranks(2)
def test_custom_hooks_equal_torch(
    rank: int, world_size: int, strategy: str, precision: str, name: str
) -> None:
    point = Point(name, strategy, use_orig_params=precision == "fp32", precision=precision)
    compare(point, Scenario(hooked(*CUSTOM[name]), accumulate_step), rank, world_size)


CASES = [
    ("fp32", "plain"),
    ("fp32", "registered after a step"),
    ("fp32", "no_sync_after_sync"),
    ("bf16", "accumulate"),
    ("keep_low", "plain"),
]


@pairwise(
    hook=[*LOW_PRECISION], strategy=STRATEGIES, case=[pytest.param(one, id="-".join(one)) for one in CASES]
)
@on_ranks(2)
def test_low_precision_hooks_equal_torch(
    rank: int, world_size: int, hook: str, strategy: str, case: tuple[str, str]
) -> None:
    precision, step = case
    point = Point(step, strategy, use_orig_params=step != "plain", precision=precision)
    late = step == "registered after a step"
    build = hooked(LOW_PRECISION[hook], lambda: LowPrecisionState(dist.group.WORLD), late)
    with without_record_stream():
        compare(point, Scenario(build, STEPS.get(step, plain_step)), rank, world_size)


@all_strategies
@pytest.mark.parametrize("hook", [None, "default"])
@on_ranks(2)
def test_kept_low_precision_gradients_equal_torch_in_another_reduce_dtype(
    rank: int, world_size: int, hook: str | None, strategy: str
) -> None:
    """Sharded strategies hand gradients over in the compute dtype, NO_SHARD in that of the reduction."""
    keep = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_low_precision_grads=True
    )

    def build(run: Run) -> nn.Module:
        model = run.wrap(Net(), auto_wrap_policy=PER_BLOCK, mixed_precision=keep)
        if hook:
            model.register_comm_hook(DefaultState(dist.group.WORLD), CUSTOM[hook][0])
        return model

    point = Point("keep", strategy, use_orig_params=False)
    compare(point, Scenario(build, plain_step), rank, world_size)


@on_ranks(3)
def test_a_changed_state_changes_the_next_reduction(rank: int, world_size: int) -> None:
    """On three ranks both factors are above one (2 and 1.5). The state overrides them from the second step on."""

    def build(run: Run) -> nn.Module:
        run.state = LowPrecisionState(dist.group.WORLD)  # type: ignore[attr-defined]
        return hooked(bf16_compress_hook, lambda: run.state)(run)  # type: ignore[attr-defined]

    def step(run: Run) -> None:
        if run.step == 2:
            run.state.gradient_predivide_factor, run.state.gradient_postdivide_factor = 0.25, 7  # type: ignore[attr-defined]
        plain_step(run)

    with without_record_stream():
        compare(Point("state"), Scenario(build, step), rank, world_size)


# ------------------------------------------------------------------ errors of hooks


def wrapped(name: str = "fsdp_c", strategy: str = "FULL_SHARD", **changes: Any) -> Any:
    return sharded(name, strategy, {"blocks": 1}, **({"use_orig_params": False} | changes))


def backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, WIDTH).repeat(2, 1)).square().sum().backward()


@on_ranks(2)
def test_a_hook_that_raises_is_followed_by_a_clean_step() -> None:
    fail = [True]

    def hook(state: object, grad: Tensor, shard: Tensor) -> None:
        if fail:
            fail.pop()
            raise ValueError("no network")
        shard.fill_(3)

    model = wrapped(use_orig_params=True)
    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="no network"):
        backward(model)
    backward(model)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads and all(bool((grad == 3).all()) for grad in grads)


@on_ranks(2)
def test_a_hook_that_leaves_another_size_is_refused_by_name(rank: int) -> None:
    def hook(state: object, grad: Tensor, shard: Tensor) -> None:
        shard.data = shard.new_zeros(3)

    model = wrapped()
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=f"rank {rank}, unit .*communication hook left"):
        backward(model)


# ------------------------------------------------------------------ refusals


@on_ranks(2)
def test_a_hook_is_not_registered_inside_a_backward() -> None:
    model = wrapped()
    output = model(torch.ones(1, WIDTH))
    output.register_hook(lambda grad: model.register_comm_hook([], sum_hook))
    with pytest.raises(RuntimeError, match="before a backward"):
        output.sum().backward()
