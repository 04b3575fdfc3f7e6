"""Random programs give bitwise equal losses, gradients, parameters and state dicts with torch's FSDP1 and
fsdp_c.

``FSDP_C_RANDOM_PROGRAMS=500`` runs 500 programs instead of 60. A failure prints the seed and the program.
``FSDP_C_RANDOM_SEED=17`` runs one seed only, and ``FSDP_C_RANDOM_KEEP=1,2,5`` only these operations of it, to
reduce a failing program.

[Note: Programs that the generator leaves out]
Where upstream is known to be wrong there is no reference; test_differences.py and test_parity.py cover these
cases. The generator leaves out
- changes of parameters while upstream may still hold unsharded ones (after a no_grad forward, a backward in
  no_sync): it would compute with the old values. A synced backward through all units comes first and frees
  everything;
- local gradients (no_sync) that are dropped, clipped, saved or stepped on: upstream keeps them in several
  places until the next synced backward;
- a forward with gradients but no backward when parameters are cast: upstream loses the gradients of the next
  step;
- keep_low_precision_grads: upstream fails to assign such gradients with use_orig_params;
- two forwards before one backward through a reentrant checkpoint: upstream reads freed storage;
- reentrant checkpoints around a part of a unit: upstream reduces and frees the unit after the first part;
- channels-last weights with use_orig_params under NO_SHARD: upstream exposes their gradients with the
  elements in a different order;
- backwards in no_sync with frozen parameters in a trained unit, with use_orig_params: upstream gives them
  gradients;
- a synced backward that leaves out a unit with local gradients: upstream leaves them unreduced for the
  optimizer;
- a forward that leaves out a prefetched unit, with use_orig_params under NO_SHARD: upstream does not restore
  the parameters;
- tied weights cast in no_sync, with use_orig_params under NO_SHARD: upstream assigns a gradient of a
  different dtype and raises;
- gradients of frozen parameters inside summon_full_params: upstream returns zeros, fsdp_c None;
- the order of names in a state dict with tied weights: upstream moves the shared one behind the others of its
  module;
- sharded state dicts of channels-last weights: upstream refuses to make them;
- offloading on a CPU: upstream frees the returned tensors;
- trained and frozen parameters in one unit without use_orig_params, and summoned gradients there: upstream
  refuses;
- frozen first layers: a reentrant checkpoint whose input needs no gradient computes none.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fsdp_c import checkpoint as fsdp_c_checkpoint
from fsdp_c.checkpoint.pieces import narrow_box
from fsdp_c.checkpoint.storage import read_checkpoint, read_entries
from fsdp_c.checkpoint.values import RangeTensor
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.models import WIDTH
from tests.parity.engine import (
    OPTIMIZERS,
    Point,
    Run,
    assert_record_is_worth_comparing,
    differences,
    implementation,
)
from tests.parity.programs import (
    BlockPlan,
    Illegal,
    Operation,
    Program,
    Side,
    build,
    local_tensors,
    operation,
)
from tests.ranks import device, on_ranks
from tests.simulated_gpu import races

PROGRAMS = int(os.environ.get("FSDP_C_RANDOM_PROGRAMS", "60"))
PER_TEST = 15
SHOWN_DIFFERENCES = 6
WIDER = WIDTH - 5  # added to usual sizes; on a GPU, units above 1 MiB are in the pool's arena
LENGTHS = (6, 12)  # number of operations in a program, before those inserted by the rules above
LOW_PRECISION = ("bf16_reduce_fp32", "bf16")  # parameters are cast
KINDS = ("mlp", "norm", "embedding", "conv", "channels_last", "tied", "single")
PLANS = ("none", "unit", "unit", "nested", "inner")

if "FSDP_C_RANDOM_SEED" in os.environ:
    BATCHES = [(int(os.environ["FSDP_C_RANDOM_SEED"]),)]
else:
    BATCHES = [tuple(range(first, min(first + PER_TEST, PROGRAMS))) for first in range(0, PROGRAMS, PER_TEST)]
KEPT = tuple(int(number) for number in os.environ.get("FSDP_C_RANDOM_KEEP", "").split(",") if number)


# ------------------------------------------------------------------ generating


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    orig = rng.random() < 0.6
    strategy = rng.choice(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    precision = rng.choice(("fp32", "fp32", "bf16_reduce_fp32", "bf16", "reduce_bf16"))
    program = Program(
        seed=seed,
        width=rng.choice((3, 5, 6, 9)) + WIDER,
        blocks=tuple(_block(rng, orig, strategy) for _ in range(rng.randint(2, 4))),
        tied_head="inp" if rng.random() < 0.3 else None,
        point=Point("random", strategy, orig, precision, rng.choice(tuple(OPTIMIZERS))),
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None)),
        forward_prefetch=rng.random() < 0.3,
        limit_all_gathers=rng.random() < 0.8,
        operations=(),
    )
    operations = _with_checkpoints(random.Random(seed + 1), _Sequence(rng, program).operations())
    return replace(program, operations=tuple(operations))


def _with_checkpoints(rng: random.Random, operations: list[Operation]) -> Iterator[Operation]:
    """Insert background saves where parameters and gradients are complete."""
    for one in operations:
        yield one
        if one == operation("train") and rng.random() < 0.25:
            yield operation("checkpoint")


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
    """Draws operations and inserts required operations before them: [Note: Programs that the generator leaves
    out].
    """

    def __init__(self, rng: random.Random, program: Program) -> None:
        blocks, point = program.blocks, program.point
        self.rng = rng
        self.blocks = blocks
        self.orig = point.use_orig_params
        self.cast = point.precision in LOW_PRECISION
        self.forward_prefetch = program.forward_prefetch
        self.reentrant = any(block.checkpoint == "reentrant" for block in blocks)
        self.tied = program.tied_head is not None or any(block.kind == "tied" for block in blocks)
        self.frozen = any(block.frozen != "none" for block in blocks)
        unsharded = "NO_SHARD" in (point.strategy, *(block.strategy for block in blocks))
        self.unsharded_orig = unsharded and self.orig
        self.drawn: list[Operation] = []
        self.gathered = False  # true if upstream may still hold unsharded parameters
        self.local = False  # true if there are gradients that no_sync kept local
        self.gradients = False
        self.saved = False

    def operations(self) -> list[Operation]:
        self._train()
        self._emit("step")
        draw = [self._train] * 3 + [self._step] * 3 + [self._zero_grad] * 2
        draw += [self._no_sync, self._evaluate, self._summon, self._save, self._load, self._freeze]
        draw += [self._clip, self._edit, self._twice, self._fail]
        for _ in range(self.rng.randint(*LENGTHS)):
            self.rng.choice(draw)()
        self._train()
        self._emit("step")
        return self.drawn

    def _emit(self, name: str, **arguments: Any) -> None:
        self.drawn.append(operation(name, **arguments))

    def _settle(self, gradients: bool = False) -> None:
        """Emit a synced backward if parameters or gradients are not complete, or if gradients are required."""
        if self.gathered or self.local or (gradients and not self.gradients):
            self._train()

    def _skip(self) -> dict[str, int]:
        if self.forward_prefetch and self.unsharded_orig:
            return {}
        return {"skip": self.rng.randrange(len(self.blocks))} if self.rng.random() < 0.15 else {}

    def _train(self) -> None:
        self._emit("train", **({} if self.local or self.gathered else self._skip()))
        self.gathered = self.local = False
        self.gradients = True

    def _twice(self) -> None:
        """Emit two forwards of every unit and one backward through both."""
        if self.reentrant:
            return self._train()
        self._emit("forward")
        self._emit("forward")
        self._emit("backward", graphs=(0, 1))
        self.gathered = self.local = False
        self.gradients = True

    def _no_sync(self) -> None:
        if (self.frozen and self.orig) or (self.tied and self.cast and self.unsharded_orig):
            return self._train()
        self._emit("train", sync=False, **self._skip())
        self.gathered = self.local = True

    def _evaluate(self) -> None:
        mode = "inference" if self.rng.random() < 0.3 else "no_grad"
        self._emit("forward", mode=mode, training=self.rng.random() < 0.3)
        self.gathered = True

    def _step(self) -> None:
        self._settle(gradients=self.rng.random() < 0.8)
        self._emit("step")
        if self.rng.random() < 0.7:
            self._zero_grad()

    def _zero_grad(self, to_none: bool | None = None) -> None:
        if self.local:
            self._train()
        to_none = self.rng.random() < 0.7 if to_none is None else to_none
        self._emit("zero_grad", to_none=to_none, by_model=self.rng.random() < 0.3)
        self.gradients = self.gradients and not to_none

    def _summon(self) -> None:
        self._settle()
        gradients = self.orig and self.gradients and self.rng.random() < 0.5
        writeback, recurse = self.rng.random() < 0.6, self.rng.random() < 0.8
        self._emit("summon", writeback=writeback, recurse=recurse, with_grads=gradients)

    def _save(self) -> None:
        if self.local:
            self._train()
        whole_only = any(block.kind == "channels_last" for block in self.blocks)
        self._emit("save", kind=self.rng.choice(("FULL",) if whole_only else ("FULL", "SHARDED")))
        self.saved = True

    def _load(self) -> None:
        if not self.saved:
            self._save()
        self._settle()
        self._emit("load", factor=self.rng.choice((1.0, 0.5)))

    def _freeze(self) -> None:
        self._settle()
        if self.gradients:
            self._zero_grad(to_none=True)
        frozen = self.rng.random() < 0.6
        self.frozen = self.frozen or frozen
        block, inner = self.rng.randrange(len(self.blocks)), self.rng.random() < 0.5
        self._emit("freeze", block=block, inner=inner, frozen=frozen)

    def _clip(self) -> None:
        self._settle(gradients=True)
        self._emit("clip", norm_type=self.rng.choice((2.0, 1.0, float("inf"))))

    def _edit(self) -> None:
        self._settle()
        how = self.rng.choice(("mul_", "lerp_", "data.mul_", "copy_"))
        self._emit("edit", how=how, held=self.rng.random() < 0.5)

    def _fail(self) -> None:
        """Emit a failing step. With fsdp_c it raises and has no effect; torch skips it."""
        self._settle()
        place, sync = self.rng.choice(("forward", "backward", "backward")), self.rng.random() < 0.7
        self._emit("fail", block=self.rng.randrange(len(self.blocks)), place=place, sync=sync)
        self._zero_grad(to_none=True)


# ------------------------------------------------------------------ running


class ProgramError(Exception):
    """An operation raised. The message names implementation and operation."""


PARAMS_AFTER = ("step", "summon", "load", "edit", "freeze")
GRADS_AFTER = ("train", "backward", "zero_grad", "clip", "summon")


@dataclass
class Recorded(Side):
    """A run that records its operations. Labels contain the number of the operation as the step."""

    edits_in_vain = True

    written: Callable[[], None] | None = None  # waits for the background save and checks its files

    def start(self, build: Callable[[Run], nn.Module]) -> None:
        super().start(build)
        self.record_params("start")

    def execute(self, one: Operation) -> None:
        if device().type != "cpu" and one.name in ("edit", "summon", "load"):
            self.check_checkpoint()  # a write to parameters waits for the copy
        try:
            found = getattr(self, "do_" + one.name)(**dict(one.arguments)) or {}
        except Illegal:
            return
        for name, value in found.items():
            if isinstance(value, ShardedTensor):
                self.record(f"metadata of {name}", _metadata_text(value))
            for index, local in enumerate(local_tensors(value)):
                self.record(f"{name} {index}", local)
        moment = "after optimizer" if one.name == "step" else f"after {one.name}"
        if one.name in PARAMS_AFTER:
            self.record_params(moment)
        if one.name in GRADS_AFTER:
            self.record_grads(moment)

    def do_checkpoint(self) -> None:
        """Save in the background with fsdp_c, and record the expected values with torch's FSDP1."""
        self.check_checkpoint()
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

        def check() -> None:
            handle.wait()
            found = read_checkpoint(path)
            own = read_entries(found, [key for key in found.entries if key.startswith("model.")])
            for key, value in own.items():
                self.trace[f"{label} {key.removeprefix('model.')}"] = value.to(device())
            for key, value, boxes in shards:
                whole = read_entries(found, [key])[key]
                for offsets, box in boxes.items():
                    assert torch.equal(narrow_box(whole, offsets, box.shape), box.cpu()), (key, value.shape)

        self.written = check

    def check_checkpoint(self) -> None:
        if self.written is not None:
            self.written()
            self.written = None

    def do_fail(self, block: int, place: str, sync: bool) -> None:
        if self.fsdp.__module__.startswith("fsdp_c"):
            draws = self.draws
            super().do_fail(block, place, sync)
            self.draws = draws


def _metadata_text(value: ShardedTensor) -> str:
    """Return the metadata as text. With gloo beside NCCL torch reports the CPU for shards on a GPU, so on
    GPUs the placement is removed.
    """
    text = str(value.metadata())
    return text if device().type == "cpu" else re.sub(r"placement=rank:\d+/[\w:]+", "", text)


def record_program(program: Program, name: str, rank: int, world_size: int) -> dict[str, Any]:
    """Run a program and return the record. Its last entry is the full state dict."""
    run = Recorded(program.point, implementation(name), rank, world_size, program=program, data_of_rank=rank)
    run.start(lambda started: build(program, started))
    one: Operation | str = ""
    try:
        for run.step, one in enumerate(program.operations, start=1):
            run.execute(one)
        one = "the last checkpoint"
        run.check_checkpoint()
        one = "the final state dict"
        run.record_full_state_dict("end")
    except Exception as error:
        raise ProgramError(f"{name}, operation {run.step} {one}: {type(error).__name__}: {error}") from error
    return run.trace


def compare_program(program: Program, rank: int, world_size: int) -> None:
    try:
        expected = record_program(program, "torch", rank, world_size)
        races.forget()  # torch writes edited gradients back on the unshard stream
        actual = record_program(program, "fsdp_c", rank, world_size)
    except ProgramError as error:
        raise AssertionError(failure_text(program, [str(error)])) from error
    found = sorted(differences(expected, actual), key=_moment)
    assert not found, failure_text(program, found)
    assert_record_is_worth_comparing(expected)


def failure_text(program: Program, found: list[str]) -> str:
    shown = "\n  ".join(found[:SHOWN_DIFFERENCES])
    return (
        f"{len(found)} records differ, the first of them:\n  {shown}\n{program}\n"
        f"Again, and smaller: FSDP_C_RANDOM_SEED={program.seed} FSDP_C_RANDOM_KEEP=<numbers of operations>"
    )


def _moment(difference: str) -> int:
    """Return the number of the operation at the start of a label: ``step 3 ...``."""
    return int(difference.split()[1])


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"seeds {seeds[0]} to {seeds[-1]}")
@on_ranks(2, timeout_s=120.0)
def test_random_programs_equal_torch(rank: int, world_size: int, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        program = generate(seed)
        kept = [one for index, one in enumerate(program.operations, start=1) if not KEPT or index in KEPT]
        compare_program(replace(program, operations=tuple(kept)), rank, world_size)
