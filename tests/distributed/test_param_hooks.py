"""Hooks on flat parameters and on the weights of a forward: arguments, and effects of their changes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision

from tests.models import WIDTH
from tests.pairwise import pairwise
from tests.parity.engine import same_bits
from tests.ranks import STRATEGIES, both_views, on_ranks
from tests.training import batch, wrap

Trace = list[tuple[str, Any]]

PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16_reduce_fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduce_bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
}


def build(
    which: str = "fsdp_c",
    checkpointing: CheckpointImpl | None = None,
    precision: str = "fp32",
    **options: Any,
) -> Any:
    """Return two units whose sizes leave padding at the end of the last shard."""
    arguments = {"use_orig_params": False, "mixed_precision": PRECISIONS[precision]} | options
    unit = functools.partial(wrap, which=which, **arguments)
    torch.manual_seed(5)
    inner = unit(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)))
    if checkpointing:
        inner = checkpoint_wrapper(inner, checkpoint_impl=checkpointing)
    return unit(nn.Sequential(inner, nn.Linear(WIDTH, 3)))


def loss_of(model: Any, rank: int, index: int = 0) -> Tensor:
    return model(batch(rank, index)).float().square().sum()


def frozen(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def record_hooks(model: Any, trace: Trace) -> list[Any]:
    """Register both kinds of hook on all parameters. They record the gradient, ``.grad`` and the parameter."""

    def on_gradient(name: str, param: nn.Parameter, grad: Tensor) -> None:
        trace.append((f"{name} gradient", frozen(grad)))
        trace.append((f"{name} .grad before", frozen(param.grad)))
        trace.append((f"{name} parameter", frozen(param)))

    def on_accumulated(name: str, param: nn.Parameter) -> None:
        trace.append((f"{name} .grad after", frozen(param.grad)))
        trace.append((f"{name} parameter after", frozen(param)))

    handles = []
    for name, param in model.named_parameters():
        handles.append(param.register_hook(functools.partial(on_gradient, name, param)))
        handles.append(param.register_post_accumulate_grad_hook(functools.partial(on_accumulated, name)))
    return handles


def record_grads(model: Any, trace: Trace, moment: str) -> None:
    trace += [(f"{moment}: {name}", frozen(param.grad)) for name, param in model.named_parameters()]


Body = Callable[[str, int, Trace], None]


def assert_same_trace(body: Body, rank: int) -> Trace:
    """Assert that ``body`` records bitwise the same with torch's FSDP1 and fsdp_c, and return fsdp_c's
    record.

    With reduced precision and several forwards torch interleaves the units' hooks: only the order within a
    unit is compared.
    """
    expected: Trace = []
    actual: Trace = []
    body("torch", rank, expected)
    body("fsdp_c", rank, actual)
    for trace in (expected, actual):
        trace.sort(key=lambda entry: entry[0])
    assert [label for label, _ in actual] == [label for label, _ in expected]
    for (label, mine), (_, theirs) in zip(actual, expected, strict=True):
        assert same_bits(mine, theirs), f"{label}: {mine} is not {theirs}"
    return actual


# ------------------------------------------------------------ arguments of hooks


def watched_steps(
    which: str, rank: int, trace: Trace, forwards: int = 1, unsynchronised: int = 0, **options: Any
) -> None:
    model = build(which, **options)
    record_hooks(model, trace)
    for step in range(unsynchronised + 2):
        with model.no_sync() if step < unsynchronised else contextlib.nullcontext():
            sum(loss_of(model, rank, 10 * step + index) for index in range(forwards)).backward()
        record_grads(model, trace, f"step {step}")


@pairwise(
    strategy=STRATEGIES,
    precision=tuple(PRECISIONS),
    steps=[pytest.param(steps, id=f"{steps[0]}-{steps[1]}") for steps in [(1, 0), (1, 2), (2, 0), (2, 1)]],
)
@on_ranks(2)
def test_hooks_see_the_unsharded_gradient_as_often_as_torchs(
    rank: int, strategy: str, precision: str, steps: tuple[int, int]
) -> None:
    """Under no_sync they also see the gradients that earlier backwards have left."""
    forwards, unsynchronised = steps
    options = {"forwards": forwards, "unsynchronised": unsynchronised}
    body = functools.partial(watched_steps, strategy=strategy, precision=precision, **options)
    trace = assert_same_trace(body, rank)
    calls = sum(label.endswith(" gradient") for label, _ in trace)
    low = precision.startswith("bf16")  # each forward has a cast of its own, and so a hook call
    assert calls == 2 * (2 + unsynchronised) * (forwards if low else 1)


@pytest.mark.parametrize("checkpointing", list(CheckpointImpl), ids=lambda one: one.name)
@on_ranks(2)
def test_hooks_are_called_once_with_activation_checkpointing(
    rank: int, checkpointing: CheckpointImpl
) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which, checkpointing)
        record_hooks(model, trace)
        model(batch(rank).requires_grad_()).square().sum().backward()
        record_grads(model, trace, "after")

    assert sum(label.endswith(" gradient") for label, _ in assert_same_trace(body, rank)) == 2


@on_ranks(2)
def test_hooks_on_original_parameters_are_not_called_and_on_their_flat_parameter_are(rank: int) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which, use_orig_params=True)
        record_hooks(model, trace)
        flat_param = model._handle.flat_param
        flat_param.register_hook(lambda grad: trace.append(("flat", frozen(grad))))
        loss_of(model, rank).backward()
        record_grads(model, trace, "after")

    labels = [label for label, _ in assert_same_trace(body, rank)]
    assert labels.count("flat") == 1
    assert not [label for label in labels if label.endswith("gradient")]


@on_ranks(2)
def test_hooks_may_be_registered_between_forward_and_backward_and_removed(rank: int) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which)
        loss_of(model, rank).backward()
        loss = loss_of(model, rank)
        handles = record_hooks(model, trace)
        loss.backward()
        for handle in handles:
            handle.remove()
        loss_of(model, rank).backward()
        record_grads(model, trace, "after")

    assert sum(label.endswith(" gradient") for label, _ in assert_same_trace(body, rank)) == 2


# -------------------------------------------------------------- effects of hooks


def double(grad: Tensor) -> Tensor:
    return grad * 2


def zero(grad: Tensor) -> None:
    grad.zero_()


def double_accumulated(param: Tensor) -> None:
    param.grad.mul_(2)


def replace_accumulated(param: Tensor) -> None:
    param.grad = torch.full_like(param.grad, 3.0)


@pairwise(
    strategy=["FULL_SHARD", "NO_SHARD"],
    hook=[double, zero, double_accumulated, replace_accumulated],
    unsynchronised=[False, True],
)
@on_ranks(2)
def test_a_gradient_changed_by_a_hook_is_reduced(
    rank: int, strategy: str, hook: Callable[[Tensor], Tensor | None], unsynchronised: bool
) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which, strategy=strategy)
        for param in model.parameters():
            accumulated = hook in (double_accumulated, replace_accumulated)
            (param.register_post_accumulate_grad_hook if accumulated else param.register_hook)(hook)
        for step in range(3):
            with model.no_sync() if unsynchronised and step < 2 else contextlib.nullcontext():
                loss_of(model, rank, step).backward()
            record_grads(model, trace, f"step {step}")

    assert_same_trace(body, rank)


@on_ranks(2)
def test_a_gradient_that_a_hook_keeps_is_not_changed_later(rank: int) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    model = build()
    for param in model.parameters():
        param.register_hook(lambda grad: kept.append((grad, grad.clone())))
    for _ in range(2):
        loss_of(model, rank).backward()
    assert len(kept) == 4
    assert all(torch.equal(grad, then) for grad, then in kept)


@on_ranks(2)
def test_hooks_run_within_the_backward_of_their_model(rank: int) -> None:
    """Callbacks queued by hooks find reduced gradients, and a hook on several tensors runs once."""

    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which)
        first: list[None] = []

        def at_the_end(param: Tensor) -> None:
            note = lambda: trace.append(("at the end", frozen(param.grad)))  # noqa: E731
            Variable._execution_engine.queue_callback(note)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(at_the_end)
        register_multi_grad_hook(list(model.parameters()), lambda grad: first.append(None), mode="any")
        loss_of(model, rank).backward()
        trace.append(("first", len(first)))

    assert_same_trace(body, rank)


@both_views
@on_ranks(2)
def test_hooks_on_the_weight_that_a_forward_uses_are_called_in_every_step(
    rank: int, use_orig_params: bool
) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which, use_orig_params=use_orig_params)

        def hook(grad: Tensor) -> Tensor:
            trace.append(("weight", frozen(grad)))
            return grad * 2

        def hook_weight(module: nn.Module, args: Any, output: Tensor) -> None:
            module.weight.register_hook(hook)

        model.module[1].register_forward_hook(hook_weight)
        for step in range(3):
            loss_of(model, rank, step).backward()
            record_grads(model, trace, f"step {step}")

    assert sum(label == "weight" for label, _ in assert_same_trace(body, rank)) == 3


# ---------------------------------------------------------------- refusals


def raises(grad: Tensor) -> None:
    raise ValueError("mine")


BAD_GRADIENTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "size": (lambda grad: grad[:3], RuntimeError, "has changed the size of value"),
    "dtype": (lambda grad: grad.double(), RuntimeError, "has changed the type of value"),
    "no tensor": (lambda grad: 3, TypeError, "hook returned <class 'int'>"),
    "exception": (raises, ValueError, "mine"),
}


@pytest.mark.parametrize("bad", BAD_GRADIENTS)
@on_ranks(2)
def test_a_hook_that_fails_leaves_the_model_as_it_was(rank: int, bad: str) -> None:
    hook, error, text = BAD_GRADIENTS[bad]
    model, twin = build(), build()
    for one in (model, twin):
        with one.no_sync():
            loss_of(one, rank).backward()
    handles = [param.register_hook(hook) for param in model.parameters()]
    with pytest.raises(error, match=text):
        loss_of(model, rank, 1).backward()
    for handle in handles:
        handle.remove()
    for one in (model, twin):
        loss_of(one, rank, 2).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.grad, theirs.grad)


def forget_grad(param: Tensor) -> None:
    param.grad = None


@on_ranks(2)
def test_grad_set_to_none_by_a_hook_before_the_reduction_is_refused(rank: int) -> None:
    model = build()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(forget_grad)
    with pytest.raises(AssertionError, match=rf"rank {rank}, unit .* has set .grad to None"):
        loss_of(model, rank).backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_grad_set_to_none_by_a_hook_under_no_sync_stays_none(rank: int, strategy: str) -> None:
    def body(which: str, rank: int, trace: Trace) -> None:
        model = build(which, strategy=strategy)
        handles = [param.register_post_accumulate_grad_hook(forget_grad) for param in model.parameters()]
        with model.no_sync():
            loss_of(model, rank).backward()
        record_grads(model, trace, "taken away")
        for handle in handles:
            handle.remove()
        loss_of(model, rank, 1).backward()
        record_grads(model, trace, "after")

    assert_same_trace(body, rank)


@on_ranks(2)
def test_named_parameters_in_a_backward_hook_have_no_gradients(rank: int) -> None:
    """Parameters are read in a hook of the root's own layer, after the inner unit was reduced."""
    seen = {}
    for which in ("torch", "fsdp_c"):
        inner = wrap(nn.Linear(WIDTH, WIDTH), which)
        model, shown = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which), []

        def look(module: nn.Module, *grads: Any, model: Any = model, shown: list[Any] = shown) -> None:
            for name, parameter in model.named_parameters():
                has_gradient = parameter.is_leaf and parameter.grad is not None
                shown.append((name.rpartition(".")[2], parameter.is_leaf, has_gradient))

        model.module[0].register_full_backward_hook(look)
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        seen[which] = shown
    assert seen["torch"] == [("weight", True, True), ("bias", True, rank == 1)]
    assert seen["fsdp_c"] == [(name, leaf, False) for leaf in (False, True) for name in ("weight", "bias")]
