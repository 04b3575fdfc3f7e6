"""The warning about a trained unit that gets no gradient: once per unit, and not where that is on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH, Block, Net
from tests.ranks import both_views, on_ranks
from tests.training import wrap


class Stage(nn.Module):
    """A checkpoint with nothing around it, unlike that of a Block."""

    def __init__(self, impl: CheckpointImpl) -> None:
        super().__init__()
        self.inner = checkpoint_wrapper(nn.Linear(WIDTH, WIDTH), checkpoint_impl=impl)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Embedding(nn.Linear):
    pass


class Checkpointed(nn.Sequential):
    """Runs each of its modules in a reentrant checkpoint, as libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        for stage in self:
            x = checkpoint(stage, x, use_reentrant=True)
        return x


class Stages(nn.Module):
    """Embeddings, two checkpointed stages and a head."""

    def __init__(self, impl: CheckpointImpl = CheckpointImpl.REENTRANT) -> None:
        super().__init__()
        self.embedding = Embedding(WIDTH, WIDTH)
        self.stages = nn.Sequential(Stage(impl), Stage(impl))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embedding.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.embedding(x)))


def per_block(net: nn.Module, **arguments: Any) -> Any:
    return wrap(net, **({"auto_wrap_policy": ModuleWrapPolicy({Block, Stage})} | arguments))


def warned(step: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    found = [one for one in caught if "no gradient has come to" in str(one.message)]
    assert {one.filename for one in found} <= {__file__}
    return [str(one.message) for one in found]


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).sum().backward()


@both_views
@on_ranks(2)
def test_units_behind_frozen_embeddings_are_named_with_the_remedy(rank: int, use_orig_params: bool) -> None:
    kinds = {Stage} if use_orig_params else {Stage, Embedding}  # a flat parameter is frozen as a whole
    model = per_block(Stages(), use_orig_params=use_orig_params, auto_wrap_policy=ModuleWrapPolicy(kinds))
    assert not warned(lambda: train(model))
    (message,) = warned(lambda: train(model))
    assert f"rank {rank}, unit Stages: no gradient has come to the units " in message
    assert """["Stage at 'stages.0'", "Stage at 'stages.1'"], which""" in message
    assert "use_reentrant=False" in message and "enable_input_require_grads()" in message


@on_ranks(2)
def test_units_that_a_backward_left_out_are_named_at_the_next_forward(rank: int) -> None:
    model = wrap(Pair())

    def train_first() -> None:
        first, second = model(torch.ones(2, WIDTH))
        (first.sum() + second.detach().sum()).backward()

    assert not warned(train_first)  # another backward could follow
    (message,) = warned(train_first)
    assert (
        f"""rank {rank}, unit Pair: no gradient has come to the units ["Linear at 'second'"], which"""
        in message
    )
    assert "detached" in message
    assert not warned(train_first)


@on_ranks(2)
def test_a_warning_that_is_an_error_leaves_the_gradients_in_order() -> None:
    model = per_block(Stages())
    warned(lambda: train(model))
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        with pytest.raises(UserWarning, match="no gradient has come to"):
            train(model)
    model.zero_grad()
    train(model)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(before) == len(after) and all(map(torch.equal, before, after))


# ---- cases without a warning


def with_a_non_reentrant_checkpoint() -> None:
    check_gradients(per_block(Stages(CheckpointImpl.NO_REENTRANT)))


def with_an_input_that_requires_gradients() -> None:
    net = Stages()
    net.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    check_gradients(per_block(net))


def check_gradients(model: Any) -> None:
    train(model, steps=2)
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def in_a_checkpoint_around_units() -> None:
    """The unit's forward runs without gradients, and again in the backward."""
    net = Stages(CheckpointImpl.NO_REENTRANT)
    net.embedding.requires_grad_(True)
    model = per_block(net)
    net.stages = Checkpointed(*net.stages)
    train(model, steps=2)


def evaluated_before_training() -> None:
    model = per_block(Net())
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    train(model, steps=2)


def in_another_backward_of_the_same_forward() -> None:
    """Each of two losses of a forward has its own backward, as in a GAN."""
    model = wrap(Pair())
    for _ in range(3):
        first, second = model(torch.ones(2, WIDTH))
        first.sum().backward(retain_graph=True)
        second.sum().backward()


def trained_in_a_step_before() -> None:
    """Heads of tasks that take turns."""
    model = wrap(Pair())
    sum(each.sum() for each in model(torch.ones(2, WIDTH))).backward()
    for step in range(4):
        model(torch.ones(2, WIDTH))[step % 2].sum().backward()


def under_no_grad() -> None:
    """The first block extracts features."""
    net = Net()
    model = per_block(net)
    first = net.blocks[0].forward

    def without_gradients(x: Tensor) -> Tensor:
        with torch.no_grad():
            return first(x)

    net.blocks[0].forward = without_gradients
    train(model, steps=2)


def unused() -> None:
    net = Net()
    model = per_block(net)
    net.skip = frozenset({1})
    train(model, steps=2)


def frozen() -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.inp.requires_grad_(False)
    model = per_block(net)
    train(model, steps=2)


def evaluated() -> None:
    model = per_block(Stages())
    model.eval()
    train(model, steps=2)


def sampled_before_training() -> None:
    """A forward with integers for outputs, gradients enabled, before the forward that is trained."""
    net = Pair()
    model = wrap(net)
    net.second.module.register_forward_hook(
        lambda module, args, output: output.argmax(-1) if net.samples else output
    )
    net.samples = True
    model(torch.ones(2, WIDTH))
    net.samples = False
    sum(model(torch.ones(2, WIDTH))).sum().backward()
    model(torch.ones(2, WIDTH))


def output_kept_by_a_hook() -> None:
    net = Pair()
    model = wrap(net)
    kept: list[Tensor] = []
    net.second.module.register_forward_hook(lambda module, args, output: kept.append(output) or len(kept))
    first, _ = model(torch.ones(2, WIDTH))
    (first.sum() + kept[0].sum()).backward()
    model(torch.ones(2, WIDTH))


def none_from_a_function() -> None:
    net = Pair()
    model, linear = wrap(net), net.second.module
    linear.forward = lambda x: WithoutGradient.apply(linear.weight)
    for _ in range(2):
        sum(each.sum() for each in model(torch.ones(2, WIDTH))).backward()
    assert all(param.grad is None for param in net.second.parameters())


class WithoutGradient(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> None:
        return None


class Pair(nn.Module):
    """Two units side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (wrap(nn.Linear(WIDTH, WIDTH)) for _ in "12")
        self.samples = False

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.first(x), self.second(x)


SILENT = (
    with_a_non_reentrant_checkpoint,
    with_an_input_that_requires_gradients,
    in_a_checkpoint_around_units,
    evaluated_before_training,
    in_another_backward_of_the_same_forward,
    trained_in_a_step_before,
    under_no_grad,
    unused,
    frozen,
    evaluated,
    sampled_before_training,
    output_kept_by_a_hook,
    none_from_a_function,
)


@pytest.mark.parametrize("case", SILENT)
@on_ranks(2)
def test_missing_gradients_on_purpose_are_not_warned_of(case: Callable[[], None]) -> None:
    assert not warned(case)
