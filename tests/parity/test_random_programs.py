"""Random programs give bitwise equal losses, gradients, parameters and state dicts with torch's FSDP1 and
fsdp_c.

``FSDP_C_RANDOM_PROGRAMS=500`` runs 500 programs instead of 60. A failure prints the seed and the program.
``FSDP_C_RANDOM_SEED=17`` runs one seed only, and ``FSDP_C_RANDOM_KEEP=1,2,5`` only these operations of it, to
reduce a failing program.

[Note: Programs that torch gets wrong]
Where upstream is known to be wrong there is no reference; test_differences.py and test_parity.py cover these
cases. ``generate`` and ``Recorded.prepared`` leave out
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
import re
from collections.abc import Callable
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
from tests.parity.engine import Run, assert_record_is_worth_comparing, differences, implementation
from tests.parity.programs import Illegal, Operation, Program, Side, build, generate, local_tensors, operation
from tests.ranks import device, on_ranks
from tests.simulated_gpu import races

PROGRAMS = int(os.environ.get("FSDP_C_RANDOM_PROGRAMS", "60"))
PER_TEST = 15
SHOWN_DIFFERENCES = 6
LOW_PRECISION = ("bf16_reduce_fp32", "bf16")  # parameters are cast

if "FSDP_C_RANDOM_SEED" in os.environ:
    BATCHES = [(int(os.environ["FSDP_C_RANDOM_SEED"]),)]
else:
    BATCHES = [tuple(range(first, min(first + PER_TEST, PROGRAMS))) for first in range(0, PROGRAMS, PER_TEST)]
KEPT = tuple(int(number) for number in os.environ.get("FSDP_C_RANDOM_KEEP", "").split(",") if number)


# ------------------------------------------------------------------ running


class ProgramError(Exception):
    """An operation raised. The message names implementation and operation."""


ENDING = (operation("train", skip=None, sync=True), operation("step"))
PARAMS_AFTER = ("step", "summon", "load", "edit", "freeze")
GRADS_AFTER = ("train", "twice", "zero_grad", "clip", "summon")


@dataclass
class Recorded(Side):
    """A run that records its operations. Labels contain the number of the operation as the step."""

    edits_in_vain = True

    written: Callable[[], None] | None = None  # waits for the background save and checks its files
    evaluated: bool = False  # true if a forward without gradients may have left parameters unsharded

    def start(self, build: Callable[[Run], nn.Module]) -> None:
        super().start(build)
        self.record_params("start")

    def execute(self, one: Operation) -> None:
        if device().type != "cpu" and one.name in ("edit", "summon", "load"):
            self.check_checkpoint()  # a write to parameters waits for the copy
        try:
            found = getattr(self, "do_" + one.name)(**self.prepared(one)) or {}
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

    def prepared(self, one: Operation) -> dict[str, Any]:
        """Return the arguments to use, after a synced backward where one is needed: [Note: Programs that torch
        gets wrong].
        """
        name, arguments = one.name, dict(one.arguments)
        blocks, point = self.program.blocks, self.point
        if name in ("summon", "load", "freeze", "clip", "edit", "fail", "step", "checkpoint"):
            self.settle(needs_gradients=name == "clip")
        elif name in ("zero_grad", "save") and self.local:
            self.settle()
        unsharded_orig = point.use_orig_params and "NO_SHARD" in (
            point.strategy,
            *(block.strategy for block in blocks),
        )
        if name == "train":
            has_frozen = self.frozen_later or any(block.frozen != "none" for block in blocks)
            is_tied = self.program.tied_head is not None or any(block.kind == "tied" for block in blocks)
            is_cast = point.precision in LOW_PRECISION
            if (has_frozen and point.use_orig_params) or (is_tied and is_cast and unsharded_orig):
                arguments["sync"] = True
            if (
                self.local
                or self.kept
                or self.evaluated
                or (self.program.forward_prefetch and unsharded_orig)
            ):
                arguments["skip"] = None
            self.evaluated = self.evaluated and not arguments["sync"]
        elif name == "forward":
            mode = "inference" if arguments["mode"] == "inference" else "no_grad"
            arguments = {"mode": mode, "training": arguments["training"]}
            self.evaluated = True
        elif name == "zero_grad":
            arguments["block"] = None
        elif name == "freeze" and self.graded:
            self.do_zero_grad(to_none=True)
        elif name == "summon":
            arguments["with_grads"] = arguments["with_grads"] and self.graded
        elif name == "save":
            arguments["kind"] = self.kind_of_state(arguments["kind"])
        elif name == "load" and self.saved is None:
            self.do_save(self.kind_of_state("SHARDED"))
        elif name == "edit" and arguments["how"] == "data":
            arguments["how"] = "data.mul_"
        return arguments

    def kind_of_state(self, drawn: str) -> str:
        is_full = drawn == "FULL" or any(block.kind == "channels_last" for block in self.program.blocks)
        return "FULL" if is_full else "SHARDED"

    def settle(self, needs_gradients: bool = False) -> None:
        """Run a synced backward through all units if parameters or gradients are not complete."""
        if self.kept or self.evaluated or self.local or (needs_gradients and not self.graded):
            self.do_train()
            self.evaluated = False
            self.record_grads("after settling")

    def do_twice(self) -> Any:
        """Run two forwards of every unit and one backward through both."""
        if any(block.checkpoint == "reentrant" for block in self.program.blocks):
            raise Illegal
        losses = [self.do_forward()["loss"] for _ in range(2)]
        self.do_backward(graphs=(0, 1))
        self.evaluated = False
        return {"first loss": losses[0], "second loss": losses[1]}

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
        self.do_zero_grad(to_none=True)


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
        for run.step, one in enumerate((*program.operations, *ENDING), start=1):
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
        program = generate(seed, "torch")
        kept = [one for index, one in enumerate(program.operations, start=1) if not KEPT or index in KEPT]
        compare_program(replace(program, operations=tuple(kept)), rank, world_size)
