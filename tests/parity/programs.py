"""Random programs, each generated from one seed: a small module, a wrap plan, a configuration and a sequence
of actions.

A program is plain data. A failure prints its repr, and a seed gives the same program everywhere. ``generate``
draws programs to compare with torch's FSDP1 (test_random_programs.py) or with the plain module
(plain_programs.py). ``Side`` runs their actions on a model of torch's FSDP1, of fsdp_c, or on the plain module.
Each action checks at run time whether it is legal, from state that all implementations share. An illegal
action raises ``Illegal`` and changes nothing, so that any part of a program is a program.

[Note: Restrictions beside the plain module]
Documented differences from the plain module are avoided, or modelled where a comment names this note:
- parameters that change between a forward and its backward: the gradients of such graphs are undefined, so
  their backward does not run;
- gradients that no_sync keeps local are separate from reduced ones until a synced backward adds them: they
  are compared after it, and optimizer, clipping and edits of gradients wait for it;
- a parameter without a gradient in a unit with one has a gradient of zeros;
- a write through `.data` to unsharded parameters is lost (docs/troubleshooting.md);
- after an exception in a backward gradients are zeroed (docs/troubleshooting.md, "After an exception");
- a layer is called through its unit, an inner unit only after a forward of the root;
- without use_orig_params a unit is frozen as a whole;
- a module inside a unit may hold views between a forward and its backward. Its `zero_grad()` and
  `requires_grad_()` change the views only, while a unit's change the parameters: modules that are no units
  are reached by their parameters;
- with use_orig_params, if other parameters of the unit are trained, a parameter frozen between a forward and
  its backward adds that gradient to its existing one, and a parameter unfrozen there gets no gradient from a
  checkpoint;
- a backward through a checkpoint may raise after such a change (CheckpointError): the program ends where the
  plain module's does;
- either views or the optimizer's parameters are written to between two forwards of the root: if both are
  written to, one write is lost;
- summoned gradients need use_orig_params;
- clipping without any gradient returns fp32;
- a parameter shared by units belongs to the root: the block that shares it is called, frozen and zeroed
  through the root only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_c import checkpoint as fsdp_c_checkpoint
from fsdp_c.wrap import split_frozen
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.models import WIDTH
from tests.parity.engine import OPTIMIZERS, Point, Run
from tests.ranks import device

BATCH = 3
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class BlockPlan:
    """A block: its layers, the wrapped modules (itself, its inner layer, both or none), the frozen ones, and
    its checkpoint.
    """

    kind: str
    hidden: int
    plan: str  # "none", "unit", "nested" or "inner"
    strategy: str
    frozen: str  # "none", "all" or "inner"
    checkpoint: str | None

    @property
    def is_unit(self) -> bool:
        return self.plan in ("unit", "nested")

    @property
    def has_inner_unit(self) -> bool:
        return self.plan in ("nested", "inner")


@dataclass(frozen=True)
class Operation:
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments)})"


def operation(name: str, **arguments: Any) -> Operation:
    return Operation(name, tuple(arguments.items()))


@dataclass(frozen=True)
class Program:
    seed: int
    width: int
    blocks: tuple[BlockPlan, ...]
    point: Point
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    operations: tuple[Operation, ...]
    tied_head: str | None = None  # layer whose weight the head shares: the first layer, "inp", or a "block"
    offload: bool = False
    split: bool = False  # frozen parameters are in separate flat parameters

    def __str__(self) -> str:
        point = self.point
        lines = [
            f"seed {self.seed}: {point.strategy}, use_orig_params={point.use_orig_params}, "
            f"{point.precision}, {point.optimizer}, backward_prefetch={self.backward_prefetch}, "
            f"forward_prefetch={self.forward_prefetch}, limit_all_gathers={self.limit_all_gathers}, "
            f"width={self.width}, tied_head={self.tied_head}, offload={self.offload}, split={self.split}"
        ]
        lines += [f"  block {index}: {block}" for index, block in enumerate(self.blocks)]
        lines += [f"  {index}: {operation}" for index, operation in enumerate(self.operations, start=1)]
        return "\n".join(lines)


# ------------------------------------------------------------------ generating

LENGTHS = (3, 14)  # number of actions in a program
KINDS = {
    "plain": ("mlp", "norm", "embedding", "conv", "tied", "single", "mixed", "scalar", "packed"),
    "torch": ("mlp", "norm", "embedding", "conv", "tied", "single", "channels_last"),
}
SQUARE = ("embedding", "single", "scalar", "packed")  # kinds whose inner weight is as large as the head's
PRECISIONS = ("fp32", "fp32", "bf16_reduce_fp32", "bf16", "reduce_bf16")  # beside torch
# added to sizes beside torch; on a GPU, units above 1 MiB are in the pool's arena
WIDER = WIDTH - 5


def generate(seed: int, beside: str, world_size: int = 2) -> Program:
    """Draw a program to be compared with ``"torch"`` or with the ``"plain"`` module."""
    rng = random.Random(seed)
    orig = rng.random() < 0.5
    strategies = (
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") if world_size == 2 else ("HYBRID_SHARD", "FULL_SHARD")
    )
    strategy = rng.choice(strategies)
    blocks = tuple(_block(rng, orig, strategy, beside) for _ in range(rng.randint(1, 3)))
    # Adam can turn a difference in the last bit into a whole step
    optimizers = ("sgd",) if has_float32(blocks) else tuple(OPTIMIZERS)
    tied_head = "inp" if rng.random() < 0.2 else None
    if blocks[-1].kind in SQUARE and blocks[-1].frozen == "none" and rng.random() < 0.6:
        tied_head = "block" if beside == "plain" else tied_head
    return Program(
        seed=seed,
        width=rng.choice((3, 5, 6)) + (WIDER if beside == "torch" else 0),
        blocks=blocks,
        tied_head=tied_head,
        point=Point(
            beside,
            strategy,
            orig,
            rng.choice(PRECISIONS) if beside == "torch" else "fp32",
            rng.choice(optimizers),
        ),
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_POST", None)),
        forward_prefetch=rng.random() < 0.4,
        limit_all_gathers=rng.random() < 0.7,
        offload=rng.random() < 0.15 and beside == "plain",
        split=rng.random() < 0.3 and beside == "plain",
        operations=tuple(_action(rng, len(blocks), beside) for _ in range(rng.randint(*LENGTHS))),
    )


def has_float32(blocks: tuple[BlockPlan, ...]) -> bool:
    return any(block.kind == "mixed" for block in blocks)


def _block(rng: random.Random, orig: bool, root_strategy: str, beside: str) -> BlockPlan:
    plan = rng.choice(("none", "unit", "unit", "nested", "inner"))
    strategy = root_strategy
    if "HYBRID" not in strategy and rng.random() < 0.2:
        strategy = rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    block = BlockPlan(
        kind=rng.choice(KINDS[beside]),
        hidden=rng.choice((1, 2, 7)) + (WIDER if beside == "torch" else 0),
        plan=plan,
        strategy=strategy,
        frozen=rng.choice(("all", "inner")) if rng.random() < 0.2 else "none",
        checkpoint=rng.choice((None, None, None, "reentrant", "nonreentrant")),
    )
    if beside == "torch":  # [Note: Programs that torch gets wrong] in test_random_programs.py
        if block.frozen != "none" and not orig:
            block = replace(block, frozen={"none": "none", "inner": "inner"}.get(plan, "all"))
        if block.kind == "channels_last" and orig and "NO_SHARD" in (strategy, root_strategy):
            block = replace(block, kind="conv")
        if block.checkpoint == "reentrant" and not block.is_unit:
            block = replace(block, checkpoint="nonreentrant")
    return block


def _action(rng: random.Random, blocks: int, beside: str) -> Operation:
    def some_block(chance: float) -> int | None:
        return rng.randrange(blocks) if rng.random() < chance else None

    def drawn(*values: Any) -> Any:
        return rng.choice(values)

    skip = some_block(0.2)
    actions = [  # weights beside the plain module and beside torch, name, arguments
        (4, 4, "train", {"skip": skip, "sync": rng.random() < 0.75}),
        (4, 1, "forward", {"mode": drawn("grad", "grad", "no_grad", "inference"), "skip": skip,
                           "part": some_block(0.2), "inner": drawn(True, False), "training": rng.random() < 0.7}),
        (3, 0, "backward", {"graphs": drawn((0,), (1,), (0, 1)), "retain": rng.random() < 0.3,
                            "sync": rng.random() < 0.75}),
        (1, 0, "forget", {}),
        (3, 3, "step", {}),
        (3, 2, "zero_grad", {"to_none": drawn(True, False), "by_model": drawn(True, False), "block": some_block(0.3)}),
        (1, 1, "clip", {"norm_type": drawn(2.0, 1.0, float("inf"))}),
        (1, 0, "edit_gradients", {"replace": drawn(True, False)}),
        (2, 1, "edit", {"how": drawn("mul_", "lerp_", "data.mul_", "data", "copy_"), "held": drawn(True, False)}),
        (2, 1, "freeze", {"block": rng.randrange(blocks), "inner": drawn(True, False),
                          "frozen": drawn(True, True, False)}),
        (1, 2, "summon", {"writeback": drawn(True, False), "recurse": drawn(True, True, False),
                          "with_grads": drawn(True, False)}),
        (1, 1, "save", {"kind": drawn("FULL", "SHARDED", "LOCAL")}),
        (1, 2, "load", {"factor": drawn(1.0, 0.5)}),
        (1, 0, "save_optimizer", {"kind": drawn("FULL", "SHARDED")}),
        (2, 0, "load_optimizer", {}),
        (2, 0, "move", {"way": drawn("FULL", "SHARDED", "checkpoint"), "one_unit": drawn(True, False)}),
        (1, 1, "fail", {"block": rng.randrange(blocks), "place": drawn("forward", "backward"),
                        "sync": drawn(True, False)}),
        (0, 1, "twice", {}),
        (0, 1, "checkpoint", {}),
    ]  # fmt: skip
    weighted = [
        (name, arguments)
        for plain, torchs, name, arguments in actions
        for _ in range(plain if beside == "plain" else torchs)
    ]
    name, arguments = drawn(*weighted)
    return operation(name, **arguments)


# ------------------------------------------------------------------ the modules


class Block(nn.Module):
    """A residual block. A wrap plan may make its ``inner`` layer a unit."""

    def __init__(self, plan: BlockPlan, width: int) -> None:
        super().__init__()
        self.kind = plan.kind
        self.raises = self.raises_in_backward = False
        if plan.kind in ("conv", "channels_last"):
            layout = torch.channels_last if plan.kind == "channels_last" else torch.contiguous_format
            self.first = nn.Conv2d(1, plan.hidden + 1, (3, 3), padding=1).to(memory_format=layout)
            self.inner = nn.Conv2d(plan.hidden + 1, 1, (1, 3), padding=(0, 1)).to(memory_format=layout)
        elif plan.kind == "embedding":
            self.first = nn.Embedding(plan.hidden + 2, width)
            self.inner = nn.Linear(width, width, bias=False)
        elif plan.kind == "tied":
            self.first = nn.Linear(width, width)
            self.again = nn.Linear(width, width, bias=False)
            self.again.weight = self.first.weight
            self.inner = nn.LayerNorm(width)
        elif plan.kind == "single":
            self.inner = nn.Linear(width, width)
        # compared with the plain module only, like the next two kinds: torch refuses them
        elif plan.kind == "scalar":
            self.inner, self.gain = nn.Linear(width, width), nn.Parameter(torch.tensor(0.7))
        elif plan.kind == "mixed":
            self.first = nn.Linear(width, width, dtype=torch.float32)
            self.inner = nn.Linear(width, width, dtype=torch.float64)
        elif plan.kind == "packed":  # like a quantizer's: frozen bytes, and a mask
            packed = torch.randint(0, 256, (width * width,), dtype=torch.uint8)
            self.packed = nn.Parameter(packed, requires_grad=False)
            self.used = nn.Parameter(torch.rand(width) > 0.2, requires_grad=False)
            self.inner = nn.Linear(width, width)
        else:
            self.first = nn.Linear(width, plan.hidden)
            self.inner = nn.Linear(plan.hidden, width)
            self.norm = nn.LayerNorm(width) if plan.kind == "norm" else None
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        change = self._change(x)
        if self.raises:
            _raise()
        if self.raises_in_backward and change.requires_grad:
            change.register_hook(_raise)
        return x + change * self.scale.to(change.dtype)

    def _change(self, x: Tensor) -> Tensor:
        if self.kind in ("conv", "channels_last"):
            return self.inner(torch.tanh(self.first(x.view(1, 1, *x.shape)))).view(x.shape)
        if self.kind == "embedding":
            rows = torch.arange(x.shape[0], device=x.device) % self.first.num_embeddings
            return self.inner(self.first(rows) + x)
        if self.kind == "tied":
            return self.inner(self.again(torch.tanh(self.first(x))))
        if self.kind == "single":
            return self.inner(x)
        if self.kind == "scalar":
            return self.inner(x) * self.gain
        if self.kind == "packed":
            weight = self.packed.view(x.shape[-1], -1).to(x.dtype) / 128 - 1
            return self.inner(F.linear(x, weight) * self.used)
        if self.kind == "mixed":
            return self.inner(torch.tanh(self.first(x.float())).double())
        return self.inner(F.gelu(self.first(x if self.norm is None else self.norm(x))))


def _raise(gradient: Tensor | None = None) -> None:
    raise ArithmeticError("asked for by the program")


class Stack(nn.Module):
    """First layer, blocks and head. Each block is checkpointed by its plan; blocks in ``skip`` are left out."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inp = nn.Linear(program.width, program.width)
        self.blocks = nn.ModuleList(Block(plan, program.width) for plan in program.blocks)
        self.head = nn.Linear(program.width, program.width)
        if program.tied_head is not None:
            self.head.weight = (self.inp if program.tied_head == "inp" else self.blocks[-1].inner).weight
        self.checkpoints = [plan.checkpoint for plan in program.blocks]
        self.skip: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, (block, mode) in enumerate(zip(self.blocks, self.checkpoints, strict=True)):
            if index in self.skip:
                continue
            x = block(x) if mode is None else checkpoint(block, x, use_reentrant=mode == "reentrant")
        return self.head(x)


def build(program: Program, run: Run) -> nn.Module:
    model = Stack(program)
    prefetch = program.backward_prefetch
    common = {
        "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
        "forward_prefetch": program.forward_prefetch,
        "limit_all_gathers": program.limit_all_gathers,
        "cpu_offload": CPUOffload(program.offload),
    }
    units: dict[nn.Module, dict[str, Any]] = {}
    for block, plan in zip(model.blocks, program.blocks, strict=True):
        if plan.frozen != "none":
            (block if plan.frozen == "all" else block.inner).requires_grad_(False)
        own = {"sharding_strategy": ShardingStrategy[plan.strategy]}
        units |= {block: own} if plan.is_unit else {}
        units |= {block.inner: own} if plan.has_inner_unit else {}
    with split_frozen() if program.split else contextlib.nullcontext():
        return run.wrap(
            model, auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False)), **common
        )


def local_tensors(value: Tensor | ShardedTensor) -> list[Tensor]:
    """Return this rank's tensors in an entry of a state dict."""
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


# ------------------------------------------------------------------ running


class Illegal(Exception):
    """The action is illegal in this state. Illegal actions change nothing in any implementation."""


@functools.cache
def groups() -> dict[str, Any]:
    """Return this process' groups: those of HYBRID_SHARD over pairs of ranks, and one for agreement on the
    outcome of actions.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    pairs = [dist.new_group(list(range(first, first + 2))) for first in range(0, world_size, 2)]
    across = [dist.new_group(list(range(first, world_size, 2))) for first in range(2)]
    return {"hybrid": (pairs[rank // 2], across[rank % 2]), "agree": dist.new_group(backend="gloo")}


@dataclass
class Side(Run):
    """The model of one implementation and the variables of a training loop. Legality is equal in all
    implementations.
    """

    edits_in_vain = False  # also change parameters in summon_full_params without writeback

    program: Program | None = None
    data_of_rank: int = 0  # rank whose data is used: the own rank, or 0 on all ranks for equal data
    graphs: list[tuple[Tensor, bool]] = field(default_factory=list)  # (loss, True if it is of the root)
    forgotten: list[Any] = field(default_factory=list)  # graphs that are alive but must not be used
    graded: bool = False  # true if there are gradients
    local: bool = False  # true if no_sync kept some of them local
    local_alone: bool = False  # true if all gradients are local
    kept: bool = False  # true if the last backward may have left parameters unsharded for the next forward
    ran: bool = False  # true if the root has run
    viewed: bool = False  # true if modules may hold views for a backward
    wrote: str | None = None  # parameters written to while modules hold views: "shown" or "held"
    frozen_later: bool = False  # true if an action has frozen or unfrozen parameters
    own: dict[tuple[int, bool], list[nn.Parameter]] = field(
        default_factory=dict
    )  # keys: (block, True for its inner layer only)
    saved: Any = None
    saved_optimizer: Any = None
    draws: int = 0

    def start(self, build: Callable[[Run], nn.Module]) -> None:
        torch.manual_seed(7)
        self.model = build(self)
        if self.plain:
            self.model.to(device())
        self.note_parameters()
        self.optimizer = OPTIMIZERS[self.point.optimizer](self.model.parameters())

    def wrap(self, module: nn.Module, **changes: Any) -> nn.Module:
        if self.plain:
            return module
        if "HYBRID" in self.point.strategy:
            changes["process_group"] = groups()["hybrid"]
        return super().wrap(module, **changes)

    @property
    def plain(self) -> bool:
        return self.fsdp is None

    @property
    def stack(self) -> nn.Module:
        return self.model if self.plain else self.model.module

    def blocks(self) -> list[Block]:
        return [module for module in self.model.modules() if isinstance(module, Block)]

    def plan(self, block: int) -> BlockPlan:
        return self.program.blocks[block]

    def needs_own_parameters(self, block: int) -> None:
        if self.program.tied_head == "block" and block == len(self.program.blocks) - 1:
            raise Illegal  # [Note: Restrictions beside the plain module]

    def held(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters, also while modules hold views."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def batch(self, *shape: int) -> Tensor:  # type: ignore[override]
        self.draws += 1
        numbers = torch.Generator().manual_seed(10 * self.draws + self.data_of_rank)
        return torch.randn(BATCH, *shape, generator=numbers, device="cpu").to(device())

    def loss(self, output: Tensor) -> Tensor:
        return (output if output.dtype == torch.float64 else output.float()).square().mean()

    def sync(self, on: bool) -> Any:
        return contextlib.nullcontext() if on or self.plain else self.model.no_sync()

    def changed(self) -> None:
        self.forgotten += self.graphs
        self.graphs = []

    def needs_reduced(self) -> None:
        if self.local:
            raise Illegal

    def writes_to(self, place: str) -> None:
        if self.viewed and self.wrote not in (None, place):
            raise Illegal  # [Note: Restrictions beside the plain module]
        self.wrote = place if self.viewed else None

    def note_parameters(self) -> None:
        for index, block in enumerate(self.blocks()):
            self.own[index, False] = list(self.stack.blocks[index].parameters())
            self.own[index, True] = list(block.inner.parameters())

    # ---------------------------------------------------------------- actions: each returns values to compare
    def do_forward(
        self,
        mode: str = "grad",
        skip: int | None = None,
        part: int | None = None,
        inner: bool = False,
        training: bool = True,
    ) -> Any:
        module, shape = self.model, (self.program.width,)
        if part is not None:
            self.needs_own_parameters(part)
            inner = inner and self.plan(part).has_inner_unit
            if not self.ran or not (inner or self.plan(part).is_unit):
                raise Illegal
            module = self.stack.blocks[part]
            if inner:
                module = self.blocks()[part].inner
                shape = self._inner_shape(part)
        x = self.batch(*shape)
        self.stack.skip = () if skip is None or not self.plan(skip).is_unit else (skip,)
        self.model.train(training)
        context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        try:
            with (
                context[mode.split()[0]](),
                torch.enable_grad() if "with grad" in mode else contextlib.nullcontext(),
            ):
                loss = self.loss(module(x))
        finally:
            self.stack.skip = ()
            self.model.train()
        self.ran = self.ran or part is None
        self.wrote = self.wrote if part is not None else None
        if loss.requires_grad:
            self.graphs.append((loss, part is None))
            self.viewed = True
        return {"loss": torch.tensor(loss.item()) if "inference" in mode else loss.detach().clone(),
                "requires_grad": loss.requires_grad}  # fmt: skip

    def _inner_shape(self, part: int) -> tuple[int, ...]:
        plan = self.plan(part)
        if plan.kind == "conv":
            return (plan.hidden + 1, BATCH, self.program.width)
        return (plan.hidden if plan.kind in ("mlp", "norm") else self.program.width,)

    def do_backward(self, graphs: tuple[int, ...] = (0,), retain: bool = False, sync: bool = True) -> None:
        chosen = [self.graphs[-1 - index] for index in graphs if index < len(self.graphs)]
        if not chosen:
            raise Illegal
        with self.sync(sync):
            sum(loss for loss, _ in chosen).backward(retain_graph=retain)
        if not retain:
            self.graphs = [graph for graph in self.graphs if not any(graph is one for one in chosen)]
        self.local_alone = not sync and (self.local_alone or not self.graded)
        self.graded = True
        whole = sync and any(of_root for _, of_root in chosen)
        self.local = not sync or (self.local and not whole)
        self.kept = not sync or (self.kept and not whole)
        self.viewed = self.viewed and not whole

    def do_train(self, skip: int | None = None, sync: bool = True) -> Any:
        with self.sync(sync):
            found = self.do_forward("grad", skip)
            if found["requires_grad"]:
                self.do_backward(sync=sync)
        return found

    def do_forget(self) -> None:
        self.graphs, self.forgotten = [], []

    def do_step(self) -> None:
        self.needs_reduced()
        self.writes_to("held")
        self.optimizer.step()
        self.changed()

    def do_zero_grad(self, to_none: bool, by_model: bool = False, block: int | None = None) -> None:
        if block is not None:
            self.needs_own_parameters(block)
        if block is not None and self.plan(block).is_unit:
            self.stack.blocks[block].zero_grad(set_to_none=to_none)
        elif block is not None:
            if not self.point.use_orig_params:
                raise Illegal
            for parameter in self.own[block, False]:
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            (self.model if by_model else self.optimizer).zero_grad(set_to_none=to_none)
            self.local = self.local and not to_none
            self.graded = self.graded and not to_none

    def do_clip(self, norm_type: float) -> Any:
        self.needs_reduced()
        if self.plain:
            return {"norm": torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, norm_type).double()}
        return {"norm": self.model.clip_grad_norm_(0.05, norm_type).double()}

    def do_zero_weights(self, to_none: bool) -> None:
        if not self.point.use_orig_params:
            raise Illegal
        for name, parameter in self.model.named_parameters():
            if name.endswith("weight") and to_none:
                parameter.grad = None
            elif name.endswith("weight") and parameter.grad is not None:
                parameter.grad.zero_()

    def do_edit_gradients(self, replace: bool) -> None:
        self.needs_reduced()
        for parameter in self.held():
            if parameter.grad is not None and replace:
                parameter.grad = parameter.grad * 0.5
            elif parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def do_edit(self, how: str, held: bool) -> None:
        if "data" in how and (
            self.kept or ((self.graphs or self.forgotten) and not (held and how == "data.mul_"))
        ):
            raise Illegal  # [Note: Restrictions beside the plain module]
        self.writes_to("held" if held else "shown")
        parameters = self.held() if held else list(self.model.parameters())
        for parameter in filter(torch.is_floating_point, parameters):
            if how == "data.mul_":
                parameter.data.mul_(0.75)
                continue
            if how == "data":
                parameter.data = parameter.data * 0.75
                continue
            with torch.no_grad():
                if how == "mul_":
                    parameter.mul_(0.75)
                elif how == "lerp_":
                    parameter.lerp_(torch.zeros_like(parameter), 0.25)
                else:
                    parameter.copy_(parameter.detach().clone() * 0.75)
        self.changed()

    def do_freeze(self, block: int, inner: bool, frozen: bool) -> None:
        self.needs_own_parameters(block)
        plan = self.plan(block)
        if self.graphs and self.point.use_orig_params and (self.graded if frozen else plan.checkpoint):
            raise Illegal  # [Note: Restrictions beside the plain module]
        if plan.kind == "packed" and not inner:
            raise Illegal  # integers have no gradient
        if plan.has_inner_unit if inner else plan.is_unit:
            (self.blocks()[block].inner if inner else self.stack.blocks[block]).requires_grad_(not frozen)
        elif not self.point.use_orig_params:
            raise Illegal
        else:
            for parameter in self.own[block, inner]:
                parameter.requires_grad_(not frozen)
        self.frozen_later = True

    def do_summon(self, writeback: bool, recurse: bool, with_grads: bool) -> Any:
        with_grads = with_grads and self.point.use_orig_params and recurse
        with_grads = with_grads and (self.local_alone or not self.local)
        arguments = {"writeback": writeback, "recurse": recurse, "with_grads": with_grads}
        with (
            contextlib.nullcontext() if self.plain else self.fsdp.summon_full_params(self.model, **arguments)
        ):
            found = {}
            for name, parameter in self.model.named_parameters():
                if recurse:
                    found["summoned " + name] = parameter.detach().clone()
                if with_grads and parameter.grad is not None and parameter.grad.any():
                    found["summoned gradient " + name] = parameter.grad.clone()
            if (writeback and recurse) or self.edits_in_vain:
                with torch.no_grad():
                    for parameter in filter(torch.is_floating_point, self.model.parameters()):
                        parameter.mul_(0.75)
        if writeback and recurse:
            self.changed()
        return found

    def do_save(self, kind: str) -> Any:
        if kind == "LOCAL" and self.program.offload:
            raise Illegal  # torch cannot clone a ShardedTensor in pinned memory
        if self.plain:
            self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
            return {}
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            state = self.model.state_dict()
        if kind == "LOCAL":  # the values are views of the shards
            state = type(state)((name, value.clone()) for name, value in state.items())
        self.saved = kind, state
        return {} if kind == "LOCAL" else {"saved " + name: value for name, value in state.items()}

    def do_load(self, factor: float) -> None:
        if self.saved is None:
            raise Illegal
        for value in (self.saved if self.plain else self.saved[1]).values():
            for local in filter(torch.is_floating_point, local_tensors(value)):
                local.mul_(factor)
        if self.plain:
            self.model.load_state_dict(self.saved)
        else:
            with self.fsdp.state_dict_type(self.model, StateDictType[f"{self.saved[0]}_STATE_DICT"]):
                self.model.load_state_dict(self.saved[1])
        self.changed()

    def do_save_optimizer(self, kind: str) -> Any:
        self.needs_reduced()
        if self.plain:
            self.saved_optimizer = copy.deepcopy(self.optimizer.state_dict())
            return {}
        self.saved_optimizer = kind, self.optimizer_state(kind)
        states = self.saved_optimizer[1]["state"]
        return {
            f"saved state {state} {name}": value
            for name, of_name in states.items()
            for state, value in of_name.items()
            if state in STATES
        }

    def optimizer_state(self, kind: str) -> dict[str, Any]:
        with self.optimizer_states(kind):
            return self.fsdp.optim_state_dict(self.model, self.optimizer)

    def optimizer_states(self, kind: str) -> Any:
        full = {"optim_state_dict_config": FullOptimStateDictConfig(rank0_only=False)}
        config = full if kind == "FULL" else {}
        return self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"], **config)

    def load_optimizer_state(self, kind: str, state: dict[str, Any]) -> None:
        with self.optimizer_states(kind):
            state = self.fsdp.optim_state_dict_to_load(self.model, self.optimizer, copy.copy(state))
            self.optimizer.load_state_dict(state)

    def do_load_optimizer(self) -> None:
        if self.saved_optimizer is None:
            raise Illegal
        if self.plain:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved_optimizer))
        else:
            self.load_optimizer_state(*self.saved_optimizer)

    def do_move(self, way: str, one_unit: bool) -> None:
        """Continue with a new model of different units and use_orig_params, which loads the state of this
        one.
        """
        self.needs_reduced()
        if self.frozen_later:
            raise Illegal
        blocks = self.program.blocks
        whole = {plan.strategy == "NO_SHARD" for plan in blocks} | {self.point.strategy == "NO_SHARD"}
        if one_unit and way == "SHARDED" and len(whole) > 1:
            raise Illegal  # sharded state dicts hold unsharded tensors for NO_SHARD units
        if one_unit:
            blocks = tuple(replace(plan, plan="none", strategy=self.point.strategy) for plan in blocks)
        point = replace(self.point, use_orig_params=True)
        program = replace(self.program, blocks=blocks, point=point)
        source = copy.copy(self)
        self.program, self.point = program, point
        self.graphs, self.forgotten, self.saved, self.saved_optimizer = [], [], None, None
        self.graded = self.local = self.kept = self.ran = self.viewed = False
        self.wrote = None
        if self.plain:
            self.optimizer.zero_grad()
            return
        self.start(lambda run: build(program, run))
        if way == "checkpoint":
            path = folder_of_ranks() / "moved"
            fsdp_c_checkpoint.save(source.model, source.optimizer, path)
            fsdp_c_checkpoint.load(self.model, self.optimizer, path)
            return
        source.do_save(way)
        self.saved = source.saved
        self.do_load(1.0)
        self.saved = None
        self.load_optimizer_state(way, source.optimizer_state(way))

    def do_fail(self, block: int, place: str, sync: bool) -> Any:
        chosen = self.blocks()[block]
        chosen.raises, chosen.raises_in_backward = place == "forward", place == "backward"
        raised = False
        try:
            with self.sync(sync):
                loss = self.loss(self.model(self.batch(self.program.width)))
                if loss.requires_grad:
                    loss.backward()
        except ArithmeticError:
            raised = True
        finally:
            chosen.raises = chosen.raises_in_backward = False
        self.ran = True
        if place == "backward":
            self.optimizer.zero_grad()
            self.local = self.graded = False
        return {"raised": raised}
