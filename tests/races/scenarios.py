"""Steps of a small model under every strategy and setting that changes the order on streams."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import optional
from tests.models import WIDTH, Block, Net
from tests.ranks import device

STEPS = 2
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
REDUCE_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Trainer:
    """A model, its optimizer, and steps for the scenarios."""

    def __init__(self, rank: int, net: dict[str, Any] | None = None, **arguments: Any) -> None:
        torch.manual_seed(3)
        self.rank = rank
        strategy = ShardingStrategy[arguments.pop("strategy", "FULL_SHARD")]
        mesh, hybrid = arguments.pop("hybrid_blocks", (None, []))
        whole = Net(**(net or {}))
        if arguments.pop("segments", False):
            _make_segments(whole)
        for index in arguments.pop("optional", []):
            optional(whole.blocks[index])
        for index in hybrid:
            inner = {
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
                "device_mesh": mesh,
                "use_orig_params": True,
            }
            whole.blocks[index] = FSDP(whole.blocks[index], device_id=device(), **inner)
        self.model = FSDP(
            whole,
            auto_wrap_policy=None if hybrid else ModuleWrapPolicy({Block}),
            sharding_strategy=strategy,
            device_id=device(),
            **({"use_orig_params": True} | arguments),
        )
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)

    def forward(self) -> Tensor:
        return self.model(torch.randn(3, WIDTH)).float().square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.model.clip_grad_norm_(1.0)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _make_segments(whole: Net) -> None:
    """Give the units frozen parameters, parameters of another dtype, and integers."""
    for block in whole.blocks:
        block.up.requires_grad_(False)
        block.norm.double().register_forward_pre_hook(lambda _, args: args[0].double())
        block.norm.register_forward_hook(lambda *args: args[-1].float())
        block.order = nn.Parameter(torch.arange(5), requires_grad=False)


# ---- scenarios


def plain(trainer: Trainer) -> None:
    for _ in range(STEPS):
        trainer.step()


def accumulate(trainer: Trainer) -> None:
    """Accumulate gradients over several backwards, with and without no_sync."""
    for _ in range(2):
        with trainer.model.no_sync():
            trainer.forward().backward()
            trainer.forward().backward()
        trainer.forward().backward()
        trainer.forward().backward()
        trainer.update()


def two_forwards(trainer: Trainer) -> None:
    for _ in range(2):
        (trainer.forward() + trainer.forward()).backward()
        trainer.update()


def two_backwards(trainer: Trainer) -> None:
    """Run two backwards in a row, in the second round with the first one under no_sync."""
    for step in range(2):
        losses = [trainer.forward(), trainer.forward()]
        with trainer.model.no_sync() if step else contextlib.nullcontext():
            losses[0].backward()
        losses[1].backward()
        trainer.update()


def backward_twice(trainer: Trainer) -> None:
    """Run two backwards through one graph."""
    for _ in range(2):
        loss = trainer.forward()
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.update()


def update_between_backwards(trainer: Trainer) -> None:
    """Run the second backward after an optimizer step, without a forward in between: it must all-gather the
    new values.
    """
    for _ in range(2):
        losses = [trainer.forward(), trainer.forward()]
        for loss in losses:
            loss.backward()
            trainer.model.clip_grad_norm_(1.0)
            trainer.update()


def auxiliary_loss_first(trainer: Trainer) -> None:
    """Run a backward from a block's output, then the backward of the whole model."""
    outputs: list[Tensor] = []
    hook = trainer.model.module.blocks[1].register_forward_hook(lambda *args: outputs.append(args[-1]))
    for _ in range(2):
        loss = trainer.forward()
        outputs.pop().float().square().mean().backward(retain_graph=True)
        loss.backward()
        trainer.update()
    hook.remove()


def evaluate(trainer: Trainer) -> None:
    """Run forwards without a backward during training, under no_grad and in eval mode."""
    for _ in range(2):
        trainer.step()
        with torch.no_grad():
            trainer.forward()
            trainer.forward()
        trainer.model.eval()
        trainer.forward()
        trainer.model.train()


def look_at_parameters(trainer: Trainer) -> None:
    """Read full parameters and state dicts, between steps and between a forward and its backward."""
    for _ in range(2):
        trainer.step()
        with FSDP.summon_full_params(trainer.model, writeback=True):
            for param in filter(torch.is_floating_point, trainer.model.parameters()):
                param.data.mul_(0.9)
        loss = trainer.forward()
        trainer.model.state_dict()
        loss.backward()
        trainer.update()


def call_a_unit_alone(trainer: Trainer) -> None:
    """Call a single unit right after an optimizer step, and prefetch it by hand."""
    trainer.step()
    block = trainer.model.module.blocks[1]
    for _ in range(2):
        block(torch.randn(2, WIDTH)).sum().backward()
        trainer.update()
        work = block._unshard(async_op=True)
        work.wait()
        trainer.step()


class Refused(Exception):
    """The exception that scenarios raise inside a step."""


@contextlib.contextmanager
def raising_in(hooked: Any, register: str) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise Refused

    handle = getattr(hooked, register)(refuse)
    with pytest.raises(Refused):
        yield
    handle.remove()


def raise_in_forward(trainer: Trainer) -> None:
    for block in (0, 2):
        trainer.step()
        with raising_in(trainer.model.module.blocks[block], "register_forward_hook"):
            trainer.forward()
    trainer.step()


def raise_in_backward(trainer: Trainer) -> None:
    for block in (2, 0):
        trainer.step()
        with raising_in(trainer.model.module.blocks[block], "register_full_backward_hook"):
            trainer.forward().backward()
        gc.collect()
        list(trainer.model.parameters())  # waits until autograd's thread has freed the backward
    trainer.step()


def refusing(collective: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Return a version of the collective that raises once on every rank, after ``after`` calls."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise Refused
        return collective(*args, **kwargs)

    return call


def refuse_collectives(trainer: Trainer) -> None:
    for name, after in (
        ("all_gather_into_tensor", 2),
        ("all_gather_into_tensor", 5),
        ("reduce_scatter_tensor", 1),
    ):
        trainer.step()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Refused):
            patched.setattr(dist, name, refusing(getattr(dist, name), after))
            trainer.forward().backward()
        gc.collect()
    trainer.step()


def reduce_by_hook(trainer: Trainer) -> None:
    def reduce(state: Any, full: Tensor, shard: Tensor) -> None:
        dist.reduce_scatter_tensor(shard, full)

    trainer.model.register_comm_hook(None, reduce)
    plain(trainer)


def reduce_in_bf16(trainer: Trainer) -> None:
    for unit in FSDP.fsdp_modules(trainer.model):
        state = default_hooks.LowPrecisionState(unit.process_group)
        unit._handle.set_comm_hook(default_hooks.bf16_compress_hook, state, torch.bfloat16)
    plain(trainer)


def step_in_backward(trainer: Trainer) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, trainer.model.parameters(), {"lr": 0.1})
    for _ in range(STEPS):
        trainer.forward().backward()


def step_with_state_in_backward(trainer: Trainer) -> None:
    """Step the optimizer in backward. The first step creates its state; afterwards the script uses parameters
    and state.
    """
    params = list(trainer.model.parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1, "momentum": 0.9})
    for _ in range(STEPS):
        trainer.forward().backward()
        for param in params:
            param.detach().mul_(0.9)
            for state in param._in_backward_optimizers[0].state.values():
                state["momentum_buffer"].mul_(1.0)


def step_with_late_gradients(trainer: Trainer) -> None:
    """Add a term of the parameters themselves to the loss, so that gradients arrive after the unit's own were
    packed. Autograd's own hooks are off.
    """
    params = trainer.model.parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1}, register_hook=False)
    for _ in range(STEPS):
        term = sum(param.sum() for param in trainer.model.parameters())
        (trainer.forward() + 0.1 * term).backward()


def replace_parameters(trainer: Trainer) -> None:
    """Replace parameters between steps by tensors without other references, and the first unit's during a
    forward.
    """
    replace(trainer.model.module.inp)
    for _ in range(2):
        trainer.step()
        replace(trainer.model)
    hook = trainer.model.module.blocks[0].module.register_forward_hook(
        lambda *_: replace(trainer.model.module.blocks[2])
    )
    trainer.step()
    hook.remove()


def replace(module: Any) -> None:
    for param in module.parameters():
        param.data = param.data * 0.9


def step_twice_in_backward(trainer: Trainer) -> None:
    """Step the optimizer twice in backward: a unit in two forwards ends its backward twice with reentrant
    checkpoints, and is unsharded again after its step.
    """
    _apply_optimizer_in_backward(torch.optim.SGD, trainer.model.parameters(), {"lr": 0.1})
    for _ in range(STEPS):
        (trainer.forward() + trainer.forward()).backward()


def look_at_parameters_inside_a_step(trainer: Trainer) -> None:
    """Summon full parameters between a forward and its backward. These are written back, and the backward
    unshards again.
    """
    for _ in range(STEPS):
        loss = trainer.forward()
        with FSDP.summon_full_params(trainer.model):
            pass
        loss.backward()
        trainer.update()


def write_after_evaluating(trainer: Trainer) -> None:
    """Write to parameters on the host, which has not waited for the work of an evaluation."""
    trainer.step()
    for _ in range(2):
        with torch.no_grad():
            trainer.forward()
            for unit in FSDP.fsdp_modules(trainer.model):
                unit._flat_param.data.mul_(0.9)


def leave_out_optional_units(trainer: Trainer) -> None:
    """Leave out optional units, different ones on each rank and in each step, none or all of them, with and
    without no_sync.
    """
    net = trainer.model.module
    for step in range(2):
        for left_out in ({0}, {2}, {0, 2}, set()):
            net.skip = frozenset(left_out if trainer.rank % 2 else {0, 2} - left_out)
            with trainer.model.no_sync() if step else contextlib.nullcontext():
                (trainer.forward() + trainer.forward()).backward()
        with torch.no_grad():
            trainer.forward()
        trainer.step()


# ---- table

Body = Callable[[Trainer], None]
SCENARIOS: dict[str, tuple[Body, dict[str, Any]]] = {
    "FULL_SHARD": (plain, {}),
    "SHARD_GRAD_OP": (plain, {"strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": (plain, {"strategy": "NO_SHARD"}),
    "NO_SHARD bf16": (plain, {"strategy": "NO_SHARD", "mixed_precision": BF16}),
    "flat": (plain, {"use_orig_params": False}),
    "bf16": (plain, {"mixed_precision": BF16}),
    "reduce fp32": (accumulate, {"mixed_precision": REDUCE_FP32}),
    "prefetch after": (plain, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "no prefetch": (plain, {"backward_prefetch": None}),
    "forward prefetch": (plain, {"forward_prefetch": True}),
    "no limit": (plain, {"limit_all_gathers": False}),
    "no limit, forward prefetch, bf16": (
        plain,
        {"limit_all_gathers": False, "forward_prefetch": True, "mixed_precision": BF16},
    ),
    "accumulate": (accumulate, {}),
    "accumulate, SHARD_GRAD_OP": (accumulate, {"strategy": "SHARD_GRAD_OP", "use_orig_params": False}),
    "accumulate, NO_SHARD": (accumulate, {"strategy": "NO_SHARD"}),
    "two forwards": (two_forwards, {"limit_all_gathers": False}),
    "two backwards": (two_backwards, {"limit_all_gathers": False}),
    "two backwards, bf16": (two_backwards, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "two backwards, offload": (two_backwards, {"limit_all_gathers": False, "cpu_offload": CPUOffload(True)}),
    "backward twice, bf16": (backward_twice, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "update between backwards": (update_between_backwards, {"limit_all_gathers": False}),
    "update between backwards, bf16": (
        update_between_backwards,
        {"limit_all_gathers": False, "mixed_precision": BF16},
    ),
    "auxiliary loss, checkpointed, bf16": (
        auxiliary_loss_first,
        {"net": {"around": "reentrant"}, "limit_all_gathers": False, "mixed_precision": BF16},
    ),
    "checkpointed": (plain, {"net": {"around": "nonreentrant"}, "limit_all_gathers": False}),
    "checkpointed inside": (plain, {"net": {"checkpoint_mode": "reentrant"}}),
    "evaluate": (evaluate, {"limit_all_gathers": False}),
    "evaluate in full precision": (evaluate, {"mixed_precision": BF16, "limit_all_gathers": False}),
    "look at parameters": (look_at_parameters, {"limit_all_gathers": False}),
    "look at parameters, bf16": (look_at_parameters, {"mixed_precision": BF16, "strategy": "SHARD_GRAD_OP"}),
    "look at parameters inside a step": (look_at_parameters_inside_a_step, {"limit_all_gathers": False}),
    "look at parameters inside a step, bf16": (look_at_parameters_inside_a_step, {"mixed_precision": BF16}),
    "replaced": (replace_parameters, {"limit_all_gathers": False, "forward_prefetch": True}),
    "replaced, bf16": (replace_parameters, {"limit_all_gathers": False, "mixed_precision": BF16}),
    "replaced, flat": (replace_parameters, {"use_orig_params": False, "limit_all_gathers": False}),
    "replaced, offload": (replace_parameters, {"cpu_offload": CPUOffload(True), "forward_prefetch": True}),
    "a unit alone": (call_a_unit_alone, {"limit_all_gathers": False}),
    "raise in forward": (raise_in_forward, {"limit_all_gathers": False}),
    "raise in backward": (raise_in_backward, {"limit_all_gathers": False}),
    "raise in backward, NO_SHARD": (raise_in_backward, {"strategy": "NO_SHARD"}),
    "refuse collectives": (refuse_collectives, {"forward_prefetch": True}),
    "refuse collectives, bf16": (refuse_collectives, {"mixed_precision": BF16, "limit_all_gathers": False}),
    "hook": (reduce_by_hook, {}),
    "bf16 hook": (reduce_in_bf16, {}),
    "offload": (accumulate, {"cpu_offload": CPUOffload(True), "limit_all_gathers": False}),
    "offload, no limit, forward prefetch": (
        plain,
        {"cpu_offload": CPUOffload(True), "limit_all_gathers": False, "forward_prefetch": True},
    ),
    "offload, look at parameters, bf16": (
        look_at_parameters,
        {"cpu_offload": CPUOffload(True), "mixed_precision": BF16, "limit_all_gathers": False},
    ),
    "offload, SHARD_GRAD_OP, bf16": (
        plain,
        {"cpu_offload": CPUOffload(True), "strategy": "SHARD_GRAD_OP", "mixed_precision": BF16},
    ),
    "offload, NO_SHARD": (
        plain,
        {"cpu_offload": CPUOffload(True), "strategy": "NO_SHARD", "use_orig_params": False},
    ),
    "offload, write after evaluating": (
        write_after_evaluating,
        {"cpu_offload": CPUOffload(True), "use_orig_params": False, "limit_all_gathers": False},
    ),
    "step twice in backward": (
        step_twice_in_backward,
        {"net": {"around": "reentrant"}, "limit_all_gathers": False, "mixed_precision": BF16},
    ),
    "offload, step in backward": (step_in_backward, {"cpu_offload": CPUOffload(True)}),
    "step in backward": (step_in_backward, {"limit_all_gathers": False}),
    "step in backward, state": (step_with_state_in_backward, {"limit_all_gathers": False}),
    "step in backward, state, NO_SHARD": (step_with_state_in_backward, {"strategy": "NO_SHARD"}),
    "step in backward, late gradients": (step_with_late_gradients, {"limit_all_gathers": False}),
    "segments": (accumulate, {"segments": True, "limit_all_gathers": False}),
    "segments, flat": (plain, {"segments": True, "use_orig_params": False, "forward_prefetch": True}),
    "segments, offload": (
        accumulate,
        {"segments": True, "cpu_offload": CPUOffload(True), "limit_all_gathers": False},
    ),
    "segments, SHARD_GRAD_OP": (accumulate, {"segments": True, "strategy": "SHARD_GRAD_OP"}),
    "segments, look at parameters": (look_at_parameters, {"segments": True, "limit_all_gathers": False}),
    "segments, raise in backward": (raise_in_backward, {"segments": True, "limit_all_gathers": False}),
    "optional": (leave_out_optional_units, {"optional": [0, 2], "limit_all_gathers": False}),
    "optional, SHARD_GRAD_OP, bf16, forward prefetch": (
        leave_out_optional_units,
        {"optional": [0, 2], "strategy": "SHARD_GRAD_OP", "mixed_precision": BF16, "forward_prefetch": True},
    ),
    "segments, optional": (
        leave_out_optional_units,
        {"optional": [0, 2], "segments": True, "limit_all_gathers": False},
    ),
    "offload, optional": (leave_out_optional_units, {"optional": [0, 2], "cpu_offload": CPUOffload(True)}),
}


HYBRID_SCENARIOS = [
    "accumulate",
    "two backwards, bf16",
    "reduce fp32",
    "raise in backward",
    "step in backward",
    "step in backward, state",
    "offload",
    "optional",
]
