"""The scenarios of the parity grid: how the model is wrapped and what happens in one optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
)

from tests.models import Block, Containers, Net, Pair
from tests.parity.engine import Run, Scenario

PER_BLOCK = ModuleWrapPolicy({Block})

# ------------------------------------------------------------------ building


def net(run: Run, **options: Any) -> Net:
    return Net(float_between=run.point.precision == "cast_inputs", **options)


def per_block(**options: Any) -> Callable[[Run], nn.Module]:
    """A Net with one unit per block and one for the rest."""
    return lambda run: run.wrap(net(run, **options), auto_wrap_policy=PER_BLOCK)


def with_arguments(**changes: Any) -> Callable[[Run], nn.Module]:
    """The same with other constructor arguments, those of the policy included."""
    return lambda run: run.wrap(net(run), **({"auto_wrap_policy": PER_BLOCK} | changes))


def frozen_block(run: Run) -> nn.Module:
    model = net(run)
    model.blocks[1].requires_grad_(False)
    return run.wrap(model, auto_wrap_policy=PER_BLOCK)


def frozen_first_units(run: Run) -> nn.Module:
    """Everything before the last block is frozen, so that no gradient reaches the first units."""
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


def nested_by_hand(run: Run) -> nn.Module:
    """Units inside units: a block holds a unit of its own, one block is not wrapped, the root has what is
    left."""
    model = net(run)
    model.blocks[0].up = run.wrap(model.blocks[0].up)
    model.blocks[0] = run.wrap(model.blocks[0])
    model.blocks[2].down = run.wrap(model.blocks[2].down)
    model.head = run.wrap(model.head)
    return run.wrap(model)


def root_without_parameters(run: Run) -> nn.Module:
    return run.wrap(nn.Sequential(run.wrap(net(run, blocks=1)), nn.Tanh()))


def checkpoint_wrapper_inside(run: Run) -> nn.Module:
    model = net(run)
    for index in range(len(model.blocks)):
        model.blocks[index] = run.wrap(wrapper.checkpoint_wrapper(model.blocks[index]))
    return run.wrap(model)


def checkpoint_wrapper_around(run: Run) -> nn.Module:
    model = net(run)
    for index in range(len(model.blocks)):
        model.blocks[index] = wrapper.checkpoint_wrapper(run.wrap(model.blocks[index]))
    return run.wrap(model)


def mixed_strategies(run: Run) -> nn.Module:
    """A CustomPolicy that gives some units arguments of their own."""

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Block):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.LayerNorm)

    return run.wrap(net(run), auto_wrap_policy=CustomPolicy(choose))


def ignored_parameters(run: Run) -> nn.Module:
    """An ignored module stays a plain one: its gradients are local, so it is frozen to keep the ranks
    equal."""
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
    """A synced backward, a local one on top of it, and a synced one that reduces both."""
    run.forward_backward(0)
    with run.model.no_sync():
        run.forward_backward(1)
    run.forward_backward(2)
    run.optimizer_step()


def unused_block_step(run: Run) -> None:
    """One block sits out in each step, in the third step none does."""
    run.model.module.skip = frozenset({run.step % 4} if run.step % 4 < 3 else ())
    plain_step(run)


def unused_block_accumulate_step(run: Run) -> None:
    run.model.module.skip = frozenset({1})
    run.forward_backward(0)
    run.model.module.skip = frozenset({run.step % 3})
    run.forward_backward(1)
    run.optimizer_step()


def several_forwards_step(run: Run) -> None:
    loss = run.forward_loss(0) + run.forward_loss(1) * 0.5 + run.forward_loss(2)
    loss.backward()
    run.record_grads("after one backward of three forwards")
    run.optimizer_step()


def fed_back_step(run: Run) -> None:
    """The output goes in again: every unit runs twice in one graph."""
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


def summon(run: Run, label: str, **arguments: Any) -> None:
    """Full parameters are recorded and halved; ``writeback`` says whether the edit stays."""
    with run.fsdp.summon_full_params(run.model, **arguments):
        run.record_params(f"{label}, inside")
        if arguments.get("with_grads"):
            run.record_grads(f"{label}, inside")
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
    run.record_params(f"{label}, after")


def summon_step(run: Run) -> None:
    plain_step(run)
    if run.step % 3 == 0:
        summon(run, "summon with writeback", writeback=True)
    if run.step % 3 == 1:
        summon(run, "summon without writeback", writeback=False)
    if run.step % 3 == 2:
        summon(run, "summon one unit", recurse=False)


def summon_grads_step(run: Run) -> None:
    run.forward_backward()
    if run.step % 2:
        summon(run, "summon with gradients", with_grads=True)
        run.record_grads("after summon")
    run.optimizer_step()


def state_dict_step(run: Run) -> None:
    plain_step(run)
    if run.step % 3 == 0:
        state = run.full_state_dict()
        for name, value in state.items():
            run.record(f"saved {name}", value)
        run.load_full_state_dict(
            {name: value * 0.5 if value.is_floating_point() else value for name, value in state.items()}
        )
        run.record_params("after load")


def edited_grads_step(run: Run) -> None:
    """The user replaces some gradients, drops others, and accumulates on top."""
    run.forward_backward(0)
    for index, parameter in enumerate(run.model.parameters()):
        if parameter.grad is not None and index % 3 == 0:
            parameter.grad = parameter.grad * 2
        elif parameter.grad is not None and index % 3 == 1:
            parameter.grad = None
    run.forward_backward(1)
    run.optimizer_step()


def edited_params_step(run: Run) -> None:
    """Without use_orig_params torch forgets new data after one forward: test_differences.py has that."""
    plain_step(run)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.01)
            if run.point.use_orig_params:
                parameter.data = parameter.data * 0.99
    run.record_params("after edits")


def containers_step(run: Run) -> None:
    x = run.batch()
    output = run.model(x, options={"gain": torch.full_like(x, 0.5)})
    loss = run.loss(output)
    run.record("loss", loss)
    loss.backward()
    run.record_grads("after backward")
    run.optimizer_step()


def input_gradient_step(run: Run) -> None:
    x = run.batch().requires_grad_()
    loss = run.loss(run.model(x))
    loss.backward()
    run.record("loss", loss)
    run.record("gradient of the input", x.grad)
    run.record_grads("after backward")
    run.optimizer_step()


def hooked_output_step(run: Run) -> None:
    """The user's own hooks see activations and their gradients."""
    seen: list[Tensor] = []
    output = run.model(run.batch())
    output.register_hook(seen.append)
    run.loss(output).backward()
    run.record("gradient of the output", seen[0])
    run.record_grads("after backward")
    run.optimizer_step()


# ------------------------------------------------------------------ the tables

CORE: dict[str, Scenario] = {  # every strategy, use_orig_params and precision
    "plain": Scenario(per_block(), plain_step),
    "no_sync": Scenario(per_block(), no_sync_step),
    "checkpoint_around_nonreentrant": Scenario(per_block(around="nonreentrant"), plain_step),
    "checkpoint_inside_reentrant": Scenario(per_block(checkpoint_mode="reentrant"), plain_step),
    "shared": Scenario(per_block(tied=True, tied_head=True), plain_step),
    "frozen": Scenario(frozen_block, plain_step),
    "unused": Scenario(per_block(extra=True), unused_block_step),
}

WIDE: dict[str, Scenario] = {  # every strategy and use_orig_params in fp32, FULL_SHARD in bf16
    "no_sync_after_sync": Scenario(per_block(), no_sync_after_sync_step),
    "checkpoint_around_reentrant": Scenario(per_block(around="reentrant"), plain_step),
    "checkpoint_inside_nonreentrant": Scenario(per_block(checkpoint_mode="nonreentrant"), plain_step),
    "frozen_first": Scenario(frozen_first_units, plain_step),
    "frozen_in_unit": Scenario(frozen_in_unit, plain_step),
    "shared_no_sync": Scenario(per_block(tied=True, tied_head=True), no_sync_step),
    "unused_no_sync": Scenario(per_block(extra=True), no_sync_step),
    "unused_accumulate": Scenario(per_block(extra=True), unused_block_accumulate_step),
    "several_forwards": Scenario(per_block(), several_forwards_step),
    "fed_back": Scenario(per_block(), fed_back_step),
    "evaluate_between": Scenario(per_block(), evaluate_between_step),
    "forward_without_backward": Scenario(per_block(), forward_without_backward_step),
    "nested": Scenario(nested_by_hand, plain_step),
    "nested_no_sync": Scenario(nested_by_hand, no_sync_step),
    "clip_2": Scenario(per_block(), clip_step(2.0)),
    "clip_inf": Scenario(per_block(), clip_step(float("inf"))),
    "clip_unused": Scenario(per_block(extra=True), clip_step(2.0)),
    "summon": Scenario(per_block(tied=True), summon_step),
    "summon_grads": Scenario(per_block(extra=True), summon_grads_step),
    "state_dict": Scenario(per_block(tied=True, tied_head=True), state_dict_step),
}

NARROW: dict[str, Scenario] = {  # FULL_SHARD and SHARD_GRAD_OP, use_orig_params both, fp32
    "one_unit": Scenario(with_arguments(auto_wrap_policy=None), plain_step),
    "root_without_parameters": Scenario(root_without_parameters, plain_step),
    "checkpoint_wrapper_inside": Scenario(checkpoint_wrapper_inside, plain_step),
    "checkpoint_wrapper_around": Scenario(checkpoint_wrapper_around, no_sync_step),
    "policy_lambda": Scenario(
        with_arguments(
            auto_wrap_policy=functools.partial(
                lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
            )
        ),
        plain_step,
    ),
    "policy_custom": Scenario(mixed_strategies, no_sync_step),
    "ignored": Scenario(ignored_parameters, plain_step),
    "prefetch_post": Scenario(with_arguments(backward_prefetch=BackwardPrefetch.BACKWARD_POST), plain_step),
    "prefetch_none": Scenario(with_arguments(backward_prefetch=None), plain_step),
    "prefetch_forward": Scenario(with_arguments(forward_prefetch=True), evaluate_between_step),
    "no_rate_limit": Scenario(with_arguments(limit_all_gathers=False), plain_step),
    "containers": Scenario(
        lambda run: run.wrap(Containers(), auto_wrap_policy=ModuleWrapPolicy({Block, Pair})), containers_step
    ),
    "input_gradient": Scenario(per_block(), input_gradient_step),
    "hooked_output": Scenario(per_block(), hooked_output_step),
    "edited_grads": Scenario(per_block(), edited_grads_step),
    "edited_params": Scenario(per_block(), edited_params_step),
}

SCENARIOS = CORE | WIDE | NARROW
