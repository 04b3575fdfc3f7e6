"""Random programs: a small module, a wrap plan, a configuration and a sequence of operations, all from one
seed.

A program is plain data: its repr is what a failure prints, and the same seed gives the same program
everywhere. It is run by ``record_program`` for torch's FSDP1 or for fsdp_c, with everything a user can see
recorded after each operation.

[Note: What the generator leaves out]
Where upstream is known to be wrong there is nothing to compare with; test_differences.py and test_parity.py
show these cases. The generator leaves out
- changes of parameters while upstream may still hold gathered ones (after a no_grad forward, a backward in
  no_sync, a forward that raised): it would compute with the old values. A synced backward through all units
  comes first, which frees everything;
- local gradients (no_sync) that are dropped, clipped, saved or stepped on: upstream keeps them in several
  places until the next synced backward;
- a forward with gradients but no backward, so also one that raises, when parameters are cast: upstream loses
  the gradients of the next step (parity 29);
- keep_low_precision_grads: upstream fails to assign such gradients with use_orig_params;
- two forwards before one backward through a reentrant checkpoint: upstream reads freed storage;
- reentrant checkpoints around a part of a unit: upstream reduces and frees the unit after the first part;
- channels-last weights with use_orig_params where nothing is sharded: upstream shows their gradients with the
  elements in another order (parity 30);
- backwards in no_sync with frozen parameters in a trained unit, with use_orig_params: upstream gives them
  gradients;
- a synced backward that leaves out a unit with local gradients: upstream keeps them, unreduced, for the
  optimizer (parity 29);
- a forward that raises, and one that leaves out a unit that was prefetched, with use_orig_params where
  nothing is
  sharded: upstream does not put the parameters back (parity 32);
- tied weights cast in no_sync, with use_orig_params where nothing is sharded: upstream assigns a gradient of
  another dtype and raises;
- gradients of frozen parameters inside summon_full_params: upstream shows zeros, fsdp_c None;
- the order of names in a state dict with tied weights: upstream moves the shared one behind the others of its
  module;
- sharded state dicts of channels-last weights: upstream refuses to make them;
- offloading on a CPU: upstream frees what it returns;
- trained and frozen parameters in one unit without use_orig_params, and summoned gradients there: upstream
  refuses;
- first layers that are frozen: a reentrant checkpoint whose input needs no gradient computes none.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.utils.checkpoint import checkpoint

from fsdp_c import checkpoint as fsdp_c_checkpoint
from fsdp_c.checkpoint.metadata import read_checkpoint
from fsdp_c.checkpoint.storage import narrowed, read_tensor
from fsdp_c.checkpoint.values import RangeTensor
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.models import WIDTH
from tests.parity.engine import OPTIMIZERS, Point, Run, implementation
from tests.ranks import device

BATCH = 3
WIDER = WIDTH - 5  # than the usual sizes: units above 1 MiB lie in the pool's piece on a GPU
LENGTHS = (6, 12)  # operations in a program, before those that the rules above insert
LOW_PRECISION = ("bf16_reduce_fp32", "bf16")  # parameters are cast
KINDS = ("mlp", "norm", "embedding", "conv", "channels_last", "tied", "single")
PLANS = ("none", "unit", "unit", "nested", "inner")


@dataclass(frozen=True)
class BlockPlan:
    """One block: its layers, what is wrapped (itself, its inner layer, both), what is frozen, and its
    checkpoint."""

    kind: str
    hidden: int
    plan: str
    strategy: str
    frozen: str  # "none", "all" or "inner"
    checkpoint: str | None


@dataclass(frozen=True)
class Operation:
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments)})"


@dataclass(frozen=True)
class Program:
    seed: int
    width: int
    blocks: tuple[BlockPlan, ...]
    tied_head: bool
    point: Point
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        point = self.point
        lines = [
            f"seed {self.seed}: {point.strategy}, use_orig_params={point.use_orig_params}, "
            f"{point.precision}, {point.optimizer}, backward_prefetch={self.backward_prefetch}, "
            f"forward_prefetch={self.forward_prefetch}, limit_all_gathers={self.limit_all_gathers}, "
            f"width={self.width}, tied_head={self.tied_head}"
        ]
        lines += [f"  block {index}: {block}" for index, block in enumerate(self.blocks)]
        lines += [f"  {index}: {operation}" for index, operation in enumerate(self.operations, start=1)]
        return "\n".join(lines)


# ------------------------------------------------------------------ generating


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    orig = rng.random() < 0.6
    strategy = rng.choice(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    precision = rng.choice(("fp32", "fp32", "bf16_reduce_fp32", "bf16", "reduce_bf16"))
    blocks = tuple(_block(rng, orig, strategy) for _ in range(rng.randint(2, 4)))
    program = Program(
        seed=seed,
        width=rng.choice((3, 5, 6, 9)) + WIDER,
        blocks=blocks,
        tied_head=rng.random() < 0.3,
        point=Point("random", strategy, orig, precision, rng.choice(tuple(OPTIMIZERS))),
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None)),
        forward_prefetch=rng.random() < 0.3,
        limit_all_gathers=rng.random() < 0.8,
        operations=(),
    )
    operations = _with_checkpoints(random.Random(seed + 1), _Sequence(rng, program).operations())
    return replace(program, operations=tuple(operations))


def _with_checkpoints(rng: random.Random, operations: list[Operation]) -> Iterator[Operation]:
    """Saves in the background, where parameters and gradients are at rest."""
    for operation in operations:
        yield operation
        if operation.name == "train" and rng.random() < 0.25:
            yield Operation("checkpoint")


def _block(rng: random.Random, orig: bool, root_strategy: str) -> BlockPlan:
    plan = rng.choice(PLANS)
    frozen = "none"
    if rng.random() < 0.25:
        if orig:
            frozen = rng.choice(("all", "inner"))
        elif plan in ("unit", "nested"):
            frozen = "all"
        elif plan == "inner":
            frozen = "inner"
    kind = rng.choice(KINDS)
    strategy = (
        root_strategy if rng.random() < 0.8 else rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    )
    if kind == "channels_last" and orig and "NO_SHARD" in (strategy, root_strategy):
        kind = "conv"
    mode = rng.choice((None, None, None, "reentrant", "nonreentrant"))
    if plan in ("none", "inner") and mode == "reentrant":
        mode = "nonreentrant"
    return BlockPlan(kind, rng.choice((1, 2, 7, 11)) + WIDER, plan, strategy, frozen, mode)


class _Sequence:
    """Draws operations and inserts what must come before them; see [Note: What the generator leaves out]."""

    def __init__(self, rng: random.Random, program: Program) -> None:
        blocks, point = program.blocks, program.point
        self.rng = rng
        self.blocks = blocks
        self.orig = point.use_orig_params
        self.cast = point.precision in LOW_PRECISION
        self.forward_prefetch = program.forward_prefetch
        self.reentrant = any(block.checkpoint == "reentrant" for block in blocks)
        self.tied = program.tied_head or any(block.kind == "tied" for block in blocks)
        self.frozen = any(block.frozen != "none" for block in blocks)
        unsharded = "NO_SHARD" in (point.strategy, *(block.strategy for block in blocks))
        self.unsharded_orig = unsharded and self.orig
        self.drawn: list[Operation] = []
        self.gathered = False  # upstream may still hold gathered parameters
        self.local = False  # there are gradients that no_sync kept local
        self.gradients = False
        self.saved = False

    def operations(self) -> list[Operation]:
        self._train()
        self._emit("optimizer_step")
        names = ["train"] * 3 + ["optimizer_step"] * 3 + ["zero_grad"] * 2
        names += [
            "no_sync",
            "evaluate",
            "summon",
            "save",
            "load",
            "freeze",
            "clip",
            "edit",
            "twice",
            "raise_in_forward",
            "fail",
        ]
        for _ in range(self.rng.randint(*LENGTHS)):
            getattr(self, "_" + self.rng.choice(names))()
        self._train()
        self._emit("optimizer_step")
        return self.drawn

    def _emit(self, name: str, **arguments: Any) -> None:
        self.drawn.append(Operation(name, tuple(arguments.items())))

    def _settle(self, gradients: bool = False) -> None:
        """A synced backward where parameters or gradients are not at rest, or where gradients are wanted."""
        if self.gathered or self.local or (gradients and not self.gradients):
            self._train()

    def _skip(self) -> tuple[int, ...]:
        if self.forward_prefetch and self.unsharded_orig:
            return ()
        return (self.rng.randrange(len(self.blocks)),) if self.rng.random() < 0.15 else ()

    def _train(self) -> None:
        self._emit(
            "train",
            skip=() if self.local or self.gathered else self._skip(),
            scaled_by_rank=self.rng.random() < 0.3,
        )
        self.gathered = self.local = False
        self.gradients = True

    def _twice(self) -> None:
        if self.reentrant:
            return self._train()
        self._emit("twice", fed_back=self.rng.random() < 0.5)
        self.gathered = self.local = False
        self.gradients = True

    def _no_sync(self) -> None:
        if (self.frozen and self.orig) or (self.tied and self.cast and self.unsharded_orig):
            return self._train()
        self._emit("no_sync", skip=self._skip())
        self.gathered = self.local = True

    def _evaluate(self) -> None:
        self._emit("evaluate", eval_mode=self.rng.random() < 0.7, inference=self.rng.random() < 0.3)
        self.gathered = True

    def _optimizer_step(self) -> None:
        self._settle(gradients=self.rng.random() < 0.8)
        self._emit("optimizer_step")
        if self.rng.random() < 0.7:
            self._zero_grad()

    def _zero_grad(self) -> None:
        if self.local:
            self._train()
        set_to_none = self.rng.random() < 0.7
        self._emit("zero_grad", set_to_none=set_to_none, by_model=self.rng.random() < 0.3)
        self.gradients = self.gradients and not set_to_none

    def _summon(self) -> None:
        self._settle()
        gradients = self.orig and self.gradients and self.rng.random() < 0.5
        self._emit(
            "summon",
            writeback=self.rng.random() < 0.6,
            recurse=self.rng.random() < 0.8,
            with_grads=gradients,
        )

    def _save(self) -> None:
        if self.local:
            self._train()
        kinds = (
            ("FULL",) if any(block.kind == "channels_last" for block in self.blocks) else ("FULL", "SHARDED")
        )
        self._emit("save", kind=self.rng.choice(kinds))
        self.saved = True

    def _load(self) -> None:
        if not self.saved:
            self._save()
        self._settle()
        self._emit("load", factor=self.rng.choice((1.0, 0.5)))

    def _freeze(self) -> None:
        self._settle()
        if self.gradients:
            self._emit("zero_grad", set_to_none=True, by_model=False)
            self.gradients = False
        frozen = self.rng.random() < 0.6
        self.frozen = self.frozen or frozen
        self._emit(
            "freeze", block=self.rng.randrange(len(self.blocks)), inner=self.rng.random() < 0.5, frozen=frozen
        )

    def _clip(self) -> None:
        self._settle(gradients=True)
        self._emit("clip", norm_type=self.rng.choice((2.0, 1.0, float("inf"))))

    def _edit(self) -> None:
        self._settle()
        self._emit("edit")

    def _raise_in_forward(self) -> None:
        if self.cast or self.local or self.unsharded_orig:
            return self._train()
        self._emit("raise_in_forward", block=self.rng.randrange(len(self.blocks)))
        self._emit("zero_grad", set_to_none=True, by_model=False)
        self.gathered = True
        self.gradients = False
        self._train()

    def _fail(self) -> None:
        self._settle()
        place = self.rng.choice(("forward", "backward", "backward"))
        self._emit(
            "fail", block=self.rng.randrange(len(self.blocks)), place=place, sync=self.rng.random() < 0.7
        )
        self._emit("zero_grad", set_to_none=True, by_model=False)
        self.gradients = False


# ------------------------------------------------------------------ the modules


class Block(nn.Module):
    """A residual block; ``inner`` is the layer that a wrap plan may make a unit of its own."""

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
        elif plan.kind == "scalar":  # for the plain module alone, as the next: torch refuses both
            self.inner, self.gain = nn.Linear(width, width), nn.Parameter(torch.tensor(0.7))
        elif plan.kind == "mixed":
            self.first = nn.Linear(width, width, dtype=torch.float32)
            self.inner = nn.Linear(width, width, dtype=torch.float64)
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
        if self.kind == "mixed":
            return self.inner(torch.tanh(self.first(x.float())).double())
        return self.inner(F.gelu(self.first(x if self.norm is None else self.norm(x))))


def _raise(gradient: Tensor | None = None) -> None:
    raise ArithmeticError("asked for by the program")


class Stack(nn.Module):
    """First layer, blocks, head; each block under the checkpoint of its plan, ``skip`` left out."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inp = nn.Linear(program.width, program.width)
        self.blocks = nn.ModuleList(Block(plan, program.width) for plan in program.blocks)
        self.head = nn.Linear(program.width, program.width)
        if program.tied_head:
            self.head.weight = self.inp.weight
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
    }
    for index, plan in enumerate(program.blocks):
        block = model.blocks[index]
        if plan.frozen != "none":
            (block if plan.frozen == "all" else block.inner).requires_grad_(False)
        own = common | {"sharding_strategy": ShardingStrategy[plan.strategy]}
        if plan.plan in ("nested", "inner"):
            block.inner = run.wrap(block.inner, **own)
        if plan.plan in ("unit", "nested"):
            model.blocks[index] = run.wrap(block, **own)
    return run.wrap(model, **common)


# ------------------------------------------------------------------ running


class ProgramError(Exception):
    """An operation raised; the message names implementation and operation."""


@dataclass
class ProgramRun(Run):
    """A run that executes operations; the step of its labels counts them."""

    program: Program | None = None
    saved: dict[str, Any] | None = None
    saved_kind: StateDictType = StateDictType.FULL_STATE_DICT
    written: Callable[[], None] | None = None  # waits for the save in the background, and looks at its files

    def execute(self, operation: Operation) -> None:
        if device().type != "cpu" and operation.name in ("edit", "summon", "load"):
            self.look_at_checkpoint()  # what writes to parameters waits for the copy
        getattr(self, "do_" + operation.name)(**dict(operation.arguments))

    # ---------------------------------------------------------------- helpers
    def batch(self, index: int = 0) -> Tensor:
        generator = torch.Generator(device()).manual_seed(1000 * self.step + 10 * index + self.rank)
        return torch.randn(BATCH, self.program.width, generator=generator)

    def blocks(self) -> list[Block]:
        return [module for module in self.model.modules() if isinstance(module, Block)]

    def backward(self, loss: Tensor) -> None:
        self.record("loss", loss)
        loss.backward()
        self.record_grads("after backward")

    # ---------------------------------------------------------------- operations
    def do_train(self, skip: tuple[int, ...], scaled_by_rank: bool) -> None:
        self.model.module.skip = skip
        self.backward(self.loss(self.model(self.batch())) * (1.0 + self.rank * scaled_by_rank))
        self.model.module.skip = ()

    def do_no_sync(self, skip: tuple[int, ...]) -> None:
        with self.model.no_sync():
            self.do_train(skip, False)

    def do_twice(self, fed_back: bool) -> None:
        """Two forwards of every unit meet in one backward."""
        first = self.model(self.batch())
        second = self.model(first.float() if fed_back else self.batch(1))
        self.backward(self.loss(first) + self.loss(second))

    def do_evaluate(self, eval_mode: bool, inference: bool) -> None:
        self.model.train(not eval_mode)
        with torch.inference_mode() if inference else torch.no_grad():
            loss = self.loss(self.model(self.batch())).clone()
        self.record("loss", loss.item())
        self.model.train()

    def do_optimizer_step(self) -> None:
        self.optimizer.step()
        self.record_params("after optimizer")

    def do_zero_grad(self, set_to_none: bool, by_model: bool) -> None:
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=set_to_none)
        self.record_grads("after zero_grad")

    def do_clip(self, norm_type: float) -> None:
        self.record("total norm", self.model.clip_grad_norm_(0.05, norm_type))
        self.record_grads("after clip")

    def do_summon(self, **arguments: bool) -> None:
        with self.fsdp.summon_full_params(self.model, **arguments):
            self.record_params("inside")
            if arguments["with_grads"]:
                for name, parameter in self.model.named_parameters():
                    if parameter.requires_grad:
                        self.record(f"inside: gradient {name}", parameter.grad)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.75)
        self.record_params("after")
        self.record_grads("after")

    def do_save(self, kind: str) -> None:
        self.saved_kind = StateDictType[f"{kind}_STATE_DICT"]
        with self.fsdp.state_dict_type(self.model, self.saved_kind):
            self.saved = self.model.state_dict()
        self.record("names", sorted(self.saved))
        for name, value in self.saved.items():
            if isinstance(value, ShardedTensor):
                self.record(f"metadata of {name}", _metadata_text(value))
            for index, local in enumerate(_local_tensors(value)):
                self.record(f"saved {name}, {index}", local)

    def do_checkpoint(self) -> None:
        """A save in the background of fsdp_c, of which torch's FSDP1 knows what is to be in it."""
        self.look_at_checkpoint()
        label = f"step {self.step} in the checkpoint:"
        if not self.fsdp.__module__.startswith("fsdp_c"):
            for name, value in self.full_state_dict().items():
                self.trace[f"{label} {name}"] = value.detach().clone()
            return
        state = fsdp_c_checkpoint.optim_state(self.model, self.optimizer)["state"]
        shards = [
            (
                f"optim.state.{fqn}.{name}",
                value,
                {offsets: box.clone() for offsets, box in value.boxes.items()},
            )
            for fqn, own in state.items()
            for name, value in own.items()
            if isinstance(value, RangeTensor)
        ]
        path = folder_of_ranks() / "checkpoint"
        handle = fsdp_c_checkpoint.save(self.model, self.optimizer, path, background=True)

        def look() -> None:
            handle.wait()
            found = read_checkpoint(path)
            for key in [key for key in found.entries if key.startswith("model.")]:
                self.trace[f"{label} {key.removeprefix('model.')}"] = read_tensor(found, key).to(device())
            for key, value, boxes in shards:
                whole = read_tensor(found, key)
                for offsets, box in boxes.items():
                    assert torch.equal(narrowed(whole, offsets, box.shape), box.cpu()), (key, value.shape)

        self.written = look

    def look_at_checkpoint(self) -> None:
        if self.written is not None:
            self.written()
            self.written = None

    def do_load(self, factor: float) -> None:
        for value in self.saved.values():
            for local in _local_tensors(value):
                local.mul_(factor)
        with self.fsdp.state_dict_type(self.model, self.saved_kind):
            self.model.load_state_dict(self.saved)
        self.record_params("after load")

    def do_freeze(self, block: int, inner: bool, frozen: bool) -> None:
        """Whole flat parameters, or the original ones, of a block or its inner layer; the root's stay
        trained."""
        chosen = self.blocks()[block]
        for parameter in (chosen.inner if inner else chosen).parameters():
            parameter.requires_grad_(not frozen)
        self.record("frozen", [name for name, one in self.model.named_parameters() if not one.requires_grad])

    def do_edit(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01)
        self.record_params("after edit")

    def do_raise_in_forward(self, block: int) -> None:
        chosen = self.blocks()[block]
        chosen.raises = True
        try:
            self.model(self.batch())
        except ArithmeticError as error:
            self.record("raised", str(error))
        chosen.raises = False

    def do_fail(self, block: int, place: str, sync: bool) -> None:
        """A step of fsdp_c that raises is as if it never happened: torch does without it."""
        if not self.fsdp.__module__.startswith("fsdp_c"):
            return
        chosen = self.blocks()[block]
        chosen.raises, chosen.raises_in_backward = place == "forward", place == "backward"
        with contextlib.suppress(ArithmeticError), contextlib.nullcontext() if sync else self.model.no_sync():
            self.loss(self.model(self.batch())).backward()
        chosen.raises = chosen.raises_in_backward = False


def _metadata_text(value: ShardedTensor) -> str:
    """With gloo beside NCCL torch says of shards on a GPU that they are on the CPU: there it is left out."""
    text = str(value.metadata())
    return text if device().type == "cpu" else re.sub(r"placement=rank:\d+/[\w:]+", "", text)


def _local_tensors(value: Tensor | ShardedTensor) -> list[Tensor]:
    """This rank's tensors of an entry of a state dict."""
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def record_program(program: Program, implementation_name: str, rank: int, world_size: int) -> dict[str, Any]:
    """Run a program and return the record; the full state dict closes it."""
    run = ProgramRun(program.point, implementation(implementation_name), rank, world_size, program=program)
    run.start(lambda started: build(program, started))
    for run.step, operation in enumerate(program.operations, start=1):
        what = f"{implementation_name}, operation {run.step} {operation}"
        _run_named(what, functools.partial(run.execute, operation))
    _run_named(f"{implementation_name}, the last checkpoint", run.look_at_checkpoint)
    _run_named(f"{implementation_name}, the final state dict", lambda: run.record_full_state_dict("end"))
    return run.trace


def _run_named(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        raise ProgramError(f"{what}: {type(error).__name__}: {error}") from error


def shortened(program: Program, kept: tuple[int, ...]) -> Program:
    """The program with the operations of these numbers alone (all where there are none), to look for a
    smaller one."""
    operations = tuple(
        one for index, one in enumerate(program.operations, start=1) if not kept or index in kept
    )
    return replace(program, operations=operations)
