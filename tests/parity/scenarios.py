"""Scenarios of the parity grid: wrapping, and the actions of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models import Block, Net
from tests.parity.engine import Run, Scenario

PER_BLOCK = ModuleWrapPolicy({Block})

# ------------------------------------------------------------------ building


def net(run: Run, **options: Any) -> Net:
    return Net(float_between=run.point.precision == "cast_inputs", **options)


def per_block(**options: Any) -> Callable[[Run], nn.Module]:
    """Return a builder of a Net with one unit per block and the root."""
    return lambda run: run.wrap(net(run, **options), auto_wrap_policy=PER_BLOCK)


def with_arguments(**changes: Any) -> Callable[[Run], nn.Module]:
    """Return a builder of such a Net with different constructor arguments, the policy included."""
    return lambda run: run.wrap(net(run), **({"auto_wrap_policy": PER_BLOCK} | changes))


def frozen_block(run: Run) -> nn.Module:
    model = net(run)
    model.blocks[1].requires_grad_(False)
    return run.wrap(model, auto_wrap_policy=PER_BLOCK)


def frozen_first_units(run: Run) -> nn.Module:
    """Freeze everything before the last block, so that no gradient reaches the first units."""
    model = net(run)
    model.inp = run.wrap(model.inp.requires_grad_(False))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = run.wrap(block.requires_grad_(index == 2))
    return run.wrap(model)


def frozen_in_unit(run: Run) -> nn.Module:
    model = net(run)
    model.blocks[0].up.requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)
    return run.wrap(model, auto_wrap_policy=PER_BLOCK)


def root_without_parameters(run: Run) -> nn.Module:
    return run.wrap(nn.Sequential(run.wrap(net(run, blocks=1)), nn.Tanh()))


def checkpoint_wrapper_inside(run: Run) -> nn.Module:
    model = net(run)
    for index in range(len(model.blocks)):
        model.blocks[index] = run.wrap(wrapper.checkpoint_wrapper(model.blocks[index]))
    return run.wrap(model)


def ignored_parameters(run: Run) -> nn.Module:
    """Ignore a module. Its gradients are not reduced, so it is frozen to keep the ranks equal."""
    model = net(run)
    model.blocks[1].requires_grad_(False)
    return run.wrap(model, auto_wrap_policy=PER_BLOCK, ignored_modules=[model.blocks[1]])


# ------------------------------------------------------------------ one step


def plain_step(run: Run) -> None:
    run.forward_backward()
    run.optimizer_step()


def no_sync_step(run: Run) -> None:
    with run.model.no_sync():
        run.forward_backward(0)
        run.forward_backward(1)
    run.forward_backward(2)
    run.optimizer_step()


def accumulate_step(run: Run) -> None:
    run.forward_backward(0)
    run.forward_backward(1)
    run.optimizer_step()


def no_sync_after_sync_step(run: Run) -> None:
    """Run a synced backward, a local one on top of it, and a synced one that reduces both."""
    run.forward_backward(0)
    with run.model.no_sync():
        run.forward_backward(1)
    run.forward_backward(2)
    run.optimizer_step()


def unused_block_step(run: Run) -> None:
    """Leave out a different block in each step, and none in the third step."""
    run.model.module.skip = frozenset({run.step % 4} if run.step % 4 < 3 else ())
    plain_step(run)


def fed_back_step(run: Run) -> None:
    """Feed the output back into the model: every unit runs twice in one graph."""
    output = run.model(run.model(run.batch()))
    loss = run.loss(output)
    run.record("loss", loss)
    loss.backward()
    run.record_grads("after backward")
    run.optimizer_step()


def evaluate_between_step(run: Run) -> None:
    plain_step(run)
    run.model.eval()
    with torch.no_grad():
        run.forward_loss(3, "evaluation loss")
    with torch.inference_mode():
        run.record("inference loss", run.loss(run.model(run.batch(4))).clone())
    run.model.train()


def forward_without_backward_step(run: Run) -> None:
    run.forward_loss(5, "thrown away")
    plain_step(run)


def clip_step(norm_type: float) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        run.forward_backward()
        run.record("total norm", run.model.clip_grad_norm_(0.05, norm_type))
        run.record_grads("after clip")
        run.optimizer_step()

    return step


def input_gradient_step(run: Run) -> None:
    x = run.batch().requires_grad_()
    loss = run.loss(run.model(x))
    loss.backward()
    run.record("loss", loss)
    run.record("gradient of the input", x.grad)
    run.record_grads("after backward")
    run.optimizer_step()


# ------------------------------------------------------------------ the tables

CORE: dict[str, Scenario] = {  # with every strategy, use_orig_params and precision: see test_parity.py
    "plain": Scenario(per_block(), plain_step),
    "no_sync": Scenario(per_block(), no_sync_step),
    "checkpoint_around_nonreentrant": Scenario(per_block(around="nonreentrant"), plain_step),
    "checkpoint_inside_reentrant": Scenario(per_block(checkpoint_mode="reentrant"), plain_step),
    "shared": Scenario(per_block(tied=True, tied_head=True), plain_step),
    "frozen": Scenario(frozen_block, plain_step),
    "unused": Scenario(per_block(extra=True), unused_block_step),
}

WIDE: dict[str, Scenario] = {  # pairs of strategy, use_orig_params, fp32 or bf16
    "no_sync_after_sync": Scenario(per_block(), no_sync_after_sync_step),
    "checkpoint_around_reentrant": Scenario(per_block(around="reentrant"), plain_step),
    "checkpoint_inside_nonreentrant": Scenario(per_block(checkpoint_mode="nonreentrant"), plain_step),
    "frozen_first": Scenario(frozen_first_units, plain_step),
    "frozen_in_unit": Scenario(frozen_in_unit, plain_step),
    "fed_back": Scenario(per_block(), fed_back_step),
    "evaluate_between": Scenario(per_block(), evaluate_between_step),
    "forward_without_backward": Scenario(per_block(), forward_without_backward_step),
    "clip_unused": Scenario(per_block(extra=True), clip_step(2.0)),
}

NARROW: dict[str, Scenario] = {  # pairs of FULL_SHARD or SHARD_GRAD_OP, and use_orig_params, in fp32
    "one_unit": Scenario(with_arguments(auto_wrap_policy=None), plain_step),
    "root_without_parameters": Scenario(root_without_parameters, plain_step),
    "checkpoint_wrapper_inside": Scenario(checkpoint_wrapper_inside, plain_step),
    "ignored": Scenario(ignored_parameters, plain_step),
    "prefetch_post": Scenario(with_arguments(backward_prefetch=BackwardPrefetch.BACKWARD_POST), plain_step),
    "prefetch_forward": Scenario(with_arguments(forward_prefetch=True), evaluate_between_step),
    "no_rate_limit": Scenario(with_arguments(limit_all_gathers=False), plain_step),
    "input_gradient": Scenario(per_block(), input_gradient_step),
}

SCENARIOS = CORE | WIDE | NARROW
