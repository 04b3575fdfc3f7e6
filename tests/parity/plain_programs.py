"""Random training loops held to the plain, unsharded module: what FSDP must not change, whatever torch's
FSDP1 does.

``python -m tests.parity.plain_programs --seconds 60`` runs programs of fresh seeds on 2 ranks and prints each
that fails; ``--seed`` starts at a seed.

Every rank has the same data, in float64, so that averaged gradients are the plain ones. An action is run on
the sharded and on the plain model; then what came out, parameters, gradients and optimizer states are
compared. They are read from this rank's shards, which calls nothing of a step. Whether an action is legal is
seen when it is run: one that is not does nothing, so that any part of a program is a program.

[Note: What the plain module does otherwise]
What is documented as different is left out, or modelled where the comment names this note:
- parameters that change between a forward and its backward (D-127): what such graphs would compute is not
  defined, so their backward does not come;
- gradients that no_sync keeps local stand beside reduced ones until a synced backward adds them (A-111,
  C-110): they are compared after it, and optimizer, clipping and edits of gradients wait for it;
- a parameter without a gradient in a unit that has one shows zeros (C-118);
- a write through `.data` to parameters that are gathered leaves no trace (docs/reliability.md);
- after an exception in a backward gradients are zeroed (docs/reliability.md, "An exception in a step");
- a layer is called through its unit (D-128, parity 17), an inner unit once the root has run (D-002);
- without use_orig_params a unit is frozen as a whole (C-011);
- a module within a unit may show views between a forward and its backward (C-091), which `zero_grad()` and
  `requires_grad_()` of that module do not see past, and a unit's do: what is not a unit is reached by its
  parameters;
- with use_orig_params, where others of the unit are trained, a parameter that is frozen between a forward and
  its backward adds what that brings to a gradient that it has, and one that is unfrozen there has none of a
  checkpoint;
- a backward through a checkpoint may raise after such a change (CheckpointError): the program ends where the
  plain module's does;
- views are written to, or what the optimizer has: of both between two forwards of the root one is lost
  (C-091);
- summoned gradients need use_orig_params (X-105);
- clipping without any gradient returns fp32 (A-115).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.utils.checkpoint import CheckpointError

from tests import ranks
from tests.parity.engine import OPTIMIZERS, Point, Run, implementation
from tests.parity.programs import BATCH, Block, BlockPlan, Operation, Program, build
from tests.parity.programs import _local_tensors as local_tensors

LENGTHS = (3, 14)  # actions in a program
KINDS = ("mlp", "norm", "embedding", "conv", "tied", "single", "mixed", "scalar")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
CLOSE_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}  # where a part of the program is, sums come in another order
tolerance = dict(CLOSE)
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
RUN_TIMEOUT_S = 180.0

# ------------------------------------------------------------------ generating


def generate(seed: int, world_size: int = 2) -> Program:
    rng = random.Random(seed)
    orig = rng.random() < 0.5
    strategies = (
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") if world_size == 2 else ("HYBRID_SHARD", "FULL_SHARD")
    )
    strategy = rng.choice(strategies)
    blocks = tuple(_block(rng, orig, strategy) for _ in range(rng.randint(1, 3)))
    # of a difference in the last place Adam may make a whole step
    optimizers = ("sgd",) if has_float32(blocks) else tuple(OPTIMIZERS)
    return Program(
        seed=seed,
        width=rng.choice((3, 5, 6)),
        blocks=blocks,
        tied_head=rng.random() < 0.2,
        point=Point("plain", strategy, orig, "fp32", rng.choice(optimizers)),
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_POST", None)),
        forward_prefetch=rng.random() < 0.4,
        limit_all_gathers=rng.random() < 0.7,
        operations=tuple(_action(rng, len(blocks)) for _ in range(rng.randint(*LENGTHS))),
    )


def has_float32(blocks: tuple[BlockPlan, ...]) -> bool:
    return any(block.kind == "mixed" for block in blocks)


def _block(rng: random.Random, orig: bool, root_strategy: str) -> BlockPlan:
    plan = rng.choice(("none", "unit", "unit", "nested", "inner"))
    strategy = root_strategy
    if "HYBRID" not in strategy and rng.random() < 0.2:
        strategy = rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    return BlockPlan(
        kind=rng.choice(KINDS),
        hidden=rng.choice((1, 2, 7)),
        plan=plan,
        strategy=strategy,
        frozen=rng.choice(("all", "inner")) if rng.random() < 0.2 else "none",
        checkpoint=rng.choice((None, None, None, "reentrant", "nonreentrant")),
    )


def _action(rng: random.Random, blocks: int) -> Operation:
    def some_block(chance: float) -> int | None:
        return rng.randrange(blocks) if rng.random() < chance else None

    def drawn(*values: Any) -> Any:
        return rng.choice(values)

    skip = some_block(0.2)
    name, arguments = drawn(
        *[("train", {"skip": skip, "sync": rng.random() < 0.75})] * 4,
        *[("forward", {"mode": drawn("grad", "grad", "no_grad", "inference"), "skip": skip, "part": some_block(0.2),
                       "inner": drawn(True, False), "training": rng.random() < 0.7})] * 4,
        *[("backward", {"graphs": drawn((0,), (1,), (0, 1)), "retain": rng.random() < 0.3,
                        "sync": rng.random() < 0.75})] * 3,
        ("forget", {}),
        *[("step", {})] * 3,
        *[("zero_grad", {"to_none": drawn(True, False), "by_model": drawn(True, False), "block": some_block(0.3)})] * 3,
        ("clip", {"norm_type": drawn(2.0, 1.0, float("inf"))}),
        ("scale_gradients", {"factor": 0.5}),
        *[("edit", {"how": drawn("mul_", "lerp_", "data.mul_", "copy_"), "held": drawn(True, False)})] * 2,
        *[("freeze", {"block": rng.randrange(blocks), "inner": drawn(True, False), "frozen": drawn(True, True, False)})]
        * 2,
        ("summon", {"writeback": drawn(True, False), "recurse": drawn(True, True, False),
                    "with_grads": drawn(True, False)}),
        ("save", {"kind": drawn("FULL", "SHARDED", "LOCAL")}),
        ("load", {"factor": drawn(1.0, 0.5)}),
        ("save_optimizer", {"kind": drawn("FULL", "SHARDED")}),
        ("load_optimizer", {}),
        ("fail", {"block": rng.randrange(blocks), "place": drawn("forward", "backward"), "sync": drawn(True, False)}),
    )  # fmt: skip
    return Operation(name, tuple(arguments.items()))


# ------------------------------------------------------------------ running


class Illegal(Exception):
    """The action is not legal in this state: it does nothing, on either side."""


class Ended(Exception):
    """The plain module's backward has raised: what it leaves is compared with nothing."""


class Different(Exception):
    """What came out is not the plain module's."""


@functools.cache
def _groups() -> dict[str, Any]:
    """Of this process: those of HYBRID_SHARD over pairs of ranks, and one for the agreement on how an action
    ended."""
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    pairs = [dist.new_group(list(range(first, first + 2))) for first in range(0, world_size, 2)]
    across = [dist.new_group(list(range(first, world_size, 2))) for first in range(2)]
    return {"hybrid": (pairs[rank // 2], across[rank % 2]), "agree": dist.new_group(backend="gloo")}


@dataclass
class Side(Run):
    """The model of one side, with what a training loop has in its variables. Both sides keep the same
    books."""

    program: Program | None = None
    # losses whose backward may come, and if of all units
    graphs: list[tuple[Tensor, bool]] = field(default_factory=list)
    forgotten: list[Any] = field(default_factory=list)  # graphs that are alive, but may not be used
    graded: bool = False  # there are gradients
    local: bool = False  # of these that no_sync kept local
    kept: bool = False  # the last backward may have left parameters gathered, for the forward after no_sync
    ran: bool = False  # the root has run
    viewed: bool = False  # modules may show views, for a backward
    wrote: str | None = None  # since: to these, or to what the optimizer has
    # of blocks, and of what is in them
    own: dict[tuple[int, bool], list[nn.Parameter]] = field(default_factory=dict)
    saved: Any = None
    saved_optimizer: Any = None
    draws: int = 0

    def wrap(self, module: nn.Module, **changes: Any) -> nn.Module:
        if self.plain:
            return module
        if "HYBRID" in self.point.strategy:
            changes["process_group"] = _groups()["hybrid"]
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

    def held(self) -> list[nn.Parameter]:
        """The parameters as the optimizer has them, whatever modules show."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def batch(self, *shape: int) -> Tensor:  # type: ignore[override]
        self.draws += 1
        numbers = torch.Generator().manual_seed(self.draws)
        return torch.randn(BATCH, *shape, generator=numbers, device="cpu").to(ranks.device())

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
            raise Illegal  # [Note: What the plain module does otherwise]
        self.wrote = place if self.viewed else None

    def note_parameters(self) -> None:
        for index, block in enumerate(self.blocks()):
            self.own[index, False] = list(self.stack.blocks[index].parameters())
            self.own[index, True] = list(block.inner.parameters())

    # ---------------------------------------------------------------- actions: each returns what is compared
    def do_forward(self, mode: str, skip: int | None, part: int | None, inner: bool, training: bool) -> Any:
        module, shape = self.model, (self.program.width,)
        if part is not None:
            plan = self.plan(part).plan
            inner = inner and plan in ("nested", "inner")
            if not self.ran or not (inner or plan in ("unit", "nested")):
                raise Illegal
            module = self.stack.blocks[part]
            if inner:
                module = self.blocks()[part].inner
                shape = self._inner_shape(part)
        x = self.batch(*shape)
        self.stack.skip = () if skip is None or self.plan(skip).plan not in ("unit", "nested") else (skip,)
        self.model.train(training)
        context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[
            mode
        ]
        try:
            with context():
                out = module(x)
                loss = out.square().mean()
        finally:
            self.stack.skip = ()
            self.model.train()
        self.ran = self.ran or part is None
        self.wrote = self.wrote if part is not None else None
        if loss.requires_grad:
            self.graphs.append((loss, part is None))
            self.viewed = True
        return {"loss": loss.detach().clone() if mode != "inference" else torch.tensor(loss.item()),
                "requires_grad": loss.requires_grad}  # fmt: skip

    def _inner_shape(self, part: int) -> tuple[int, ...]:
        plan = self.plan(part)
        if plan.kind == "conv":
            return (plan.hidden + 1, BATCH, self.program.width)
        return (plan.hidden if plan.kind in ("mlp", "norm") else self.program.width,)

    def do_backward(self, graphs: tuple[int, ...], retain: bool, sync: bool) -> None:
        chosen = [self.graphs[-1 - index] for index in graphs if index < len(self.graphs)]
        if not chosen:
            raise Illegal
        with self.sync(sync):
            sum(loss for loss, _ in chosen).backward(retain_graph=retain)
        if not retain:
            self.graphs = [graph for graph in self.graphs if not any(graph is one for one in chosen)]
        self.graded = True
        whole = sync and any(of_all for _, of_all in chosen)
        self.local = not sync or (self.local and not whole)
        self.kept = not sync or (self.kept and not whole)
        self.viewed = self.viewed and not whole

    def do_train(self, skip: int | None, sync: bool) -> Any:
        with self.sync(sync):
            found = self.do_forward("grad", skip, None, False, True)
            if found["requires_grad"]:
                self.do_backward((0,), False, sync)
        return found

    def do_forget(self) -> None:
        self.graphs, self.forgotten = [], []

    def do_step(self) -> None:
        self.needs_reduced()
        self.writes_to("held")
        self.optimizer.step()
        self.changed()

    def do_zero_grad(self, to_none: bool, by_model: bool, block: int | None) -> None:
        if block is not None and self.plan(block).plan in ("unit", "nested"):
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

    def do_scale_gradients(self, factor: float) -> None:
        self.needs_reduced()
        for parameter in self.held():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def do_edit(self, how: str, held: bool) -> None:
        if how == "data.mul_" and (self.kept or ((self.graphs or self.forgotten) and not held)):
            raise Illegal  # [Note: What the plain module does otherwise]
        self.writes_to("held" if held else "shown")
        for parameter in self.held() if held else list(self.model.parameters()):
            if how == "data.mul_":
                parameter.data.mul_(0.75)
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
        plan = self.plan(block).plan
        if (
            self.graphs
            and self.point.use_orig_params
            and (self.graded if frozen else self.plan(block).checkpoint)
        ):
            raise Illegal  # [Note: What the plain module does otherwise]
        if plan in (("nested", "inner") if inner else ("unit", "nested")):
            (self.blocks()[block].inner if inner else self.stack.blocks[block]).requires_grad_(not frozen)
        elif not self.point.use_orig_params:
            raise Illegal
        else:
            for parameter in self.own[block, inner]:
                parameter.requires_grad_(not frozen)

    def do_summon(self, writeback: bool, recurse: bool, with_grads: bool) -> Any:
        with_grads = with_grads and self.point.use_orig_params and recurse and not self.local
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
            if writeback and recurse:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.mul_(0.75)
        if writeback and recurse:
            self.changed()
        return found

    def do_save(self, kind: str) -> Any:
        if self.plain:
            self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
            return {}
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"]):
            state = self.model.state_dict()
        if kind == "LOCAL":  # its values are views of the shards
            state = type(state)((name, value.clone()) for name, value in state.items())
        self.saved = kind, state
        return {} if kind == "LOCAL" else {"saved " + name: value for name, value in state.items()}

    def do_load(self, factor: float) -> None:
        if self.saved is None:
            raise Illegal
        for value in (self.saved if self.plain else self.saved[1]).values():
            for local in local_tensors(value):
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
        type_ = StateDictType[f"{kind}_STATE_DICT"]
        config = (
            {"optim_state_dict_config": FullOptimStateDictConfig(rank0_only=False)} if kind == "FULL" else {}
        )
        with self.fsdp.state_dict_type(self.model, type_, **config):
            self.saved_optimizer = kind, config, self.fsdp.optim_state_dict(self.model, self.optimizer)
        states = self.saved_optimizer[2]["state"]
        return {
            f"saved state {state} {name}": value
            for name, of_name in states.items()
            for state, value in of_name.items()
            if state in STATES
        }

    def do_load_optimizer(self) -> None:
        if self.saved_optimizer is None:
            raise Illegal
        if self.plain:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved_optimizer))
            return
        kind, config, state = self.saved_optimizer
        with self.fsdp.state_dict_type(self.model, StateDictType[f"{kind}_STATE_DICT"], **config):
            state = self.fsdp.optim_state_dict_to_load(self.model, self.optimizer, copy.copy(state))
            self.optimizer.load_state_dict(state)

    def do_fail(self, block: int, place: str, sync: bool) -> Any:
        chosen = self.blocks()[block]
        chosen.raises, chosen.raises_in_backward = place == "forward", place == "backward"
        raised = False
        try:
            with self.sync(sync):
                loss = self.model(self.batch(self.program.width)).square().mean()
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


# ------------------------------------------------------------------ comparing


@dataclass
class Part:
    """One parameter as its flat parameter has it on this rank."""

    name: str
    flat: Any
    begin: int  # of its elements in the shard
    first: int  # of the parameter's elements there
    numel: int
    whole_begin: int  # in the flat parameter
    held: Any  # with use_orig_params the parameter that users see
    view: Any  # what they see in its place between a forward and its backward, and may write to; or None


def parts(model: nn.Module) -> Iterator[Part]:
    for prefix, unit in model.named_modules():
        if not hasattr(unit, "_handle") or unit._handle is None:
            continue
        prefix = (prefix + ".").replace("_fsdp_wrapped_module.", "").lstrip(".")
        for flat in unit.params:
            begin = 0
            for index, (name, info, numel) in enumerate(
                zip(flat._fqns, flat._shard_param_infos, flat._numels, strict=True)
            ):
                held = None if flat._params is None else flat._params[index]
                slot = flat._param_infos[index]
                shown = slot.module._parameters.get(slot.param_name)
                view = None if held is None or isinstance(shown, nn.Parameter) else shown
                if info.in_shard:
                    yield Part(
                        prefix + name, flat, info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard,
                        begin, held, view,
                    )  # fmt: skip
                begin += numel


def mine(part: Part, value: Tensor) -> Tensor:
    """This rank's part of a whole parameter or gradient."""
    return value.detach().flatten()[part.first : part.first + part.numel]


def in_shard(part: Part, value: Tensor | None) -> Tensor | None:
    """This rank's part of a gradient or state as it was found, of its shard or whole."""
    if value is None:
        return None
    value = value.detach()
    if part.held is not None:
        return value.flatten() if value.numel() == part.numel else mine(part, value)
    shard_numel = part.flat._local_shard.numel() if hasattr(part.flat, "_local_shard") else part.flat.numel()
    if value.numel() == shard_numel:
        return value.flatten()[part.begin : part.begin + part.numel]
    return value.flatten()[part.whole_begin + part.first :][: part.numel]


def same(label: str, expected: Any, actual: Any) -> None:
    if isinstance(actual, ShardedTensor):
        for shard in actual.local_shards():
            rows = expected.detach()
            for dim, (offset, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            ):
                rows = rows.narrow(dim, offset, size)
            same(label, rows, shard.tensor)
        return
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        if expected is not actual and expected != actual:
            raise Different(f"{label}: plain {_shown(expected)}, sharded {_shown(actual)}")
        return
    expected, actual = expected.detach().cpu(), actual.detach().cpu()
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise Different(f"{label}: plain {expected.dtype}{list(expected.shape)}, sharded {actual.dtype}"
                        f"{list(actual.shape)}")  # fmt: skip
    if not torch.allclose(expected, actual, equal_nan=True, **tolerance):
        worst = int((expected - actual).abs().nan_to_num(nan=float("inf")).argmax())
        values = expected.flatten()[worst].item(), actual.flatten()[worst].item()
        raise Different(
            f"{label}: plain {values[0]!r}, sharded {values[1]!r} at {worst} of {expected.numel()}"
        )


def _shown(value: Any) -> str:
    return f"{list(value.shape)} {value.flatten()[:4].tolist()}" if isinstance(value, Tensor) else repr(value)


def compare_states(sharded: Side, plain: Side) -> None:
    """Parameters, gradients and optimizer states, read from this rank's shards."""
    expected = dict(plain.model.named_parameters())
    found = list(parts(sharded.model))
    with_gradients = {id(part.flat) for part in found if expected[part.name].grad is not None}
    for part in found:
        parameter = expected[part.name]
        holder = part.flat if part.held is None else part.held
        shard = getattr(part.flat, "_local_shard", part.flat)
        value = in_shard(replace(part, held=None), shard)
        if part.view is not None and value is not None and not value.allclose(mine(part, parameter)):
            value = mine(part, part.view)  # what was written there goes to the shard later
        same(f"parameter {part.name}", mine(part, parameter), value)
        if not plain.local:
            gradient, grad = in_shard(part, holder.grad), parameter.grad
            if grad is None and gradient is not None and id(part.flat) in with_gradients:
                grad = torch.zeros_like(parameter)  # [Note: What the plain module does otherwise]
            same(f"gradient {part.name}", None if grad is None else mine(part, grad), gradient)
        of_plain, of_sharded = (
            plain.optimizer.state.get(parameter, {}),
            sharded.optimizer.state.get(holder, {}),
        )
        for state in STATES:
            if of_plain.get(state) is not None:
                same(
                    f"state {state} {part.name}",
                    mine(part, of_plain[state]),
                    in_shard(part, of_sharded.get(state)),
                )


def compare_returned(
    sharded: dict[str, Any], plain: dict[str, Any], model: nn.Module, optimizer: Any
) -> None:
    names = {name: value for name, value in model.state_dict().items()}
    states = {name: optimizer.state.get(value, {}) for name, value in model.named_parameters()}
    for label, value in sharded.items():
        if label.startswith("saved state "):
            _, _, state, name = label.split()
            if states[name]:  # [Note: What the plain module does otherwise]: zeros
                same(label, states[name][state], value)
        elif label.startswith("saved "):
            same(label, names[label.split()[1]], value)
        else:
            same(label, plain.get(label.replace("_fsdp_wrapped_module.", "")), value)
    assert not [
        label for label in plain if label not in {one.replace("_fsdp_wrapped_module.", "") for one in sharded}
    ]


def _agreed(failure: str | None) -> str | None:
    """The first failure of any rank, on all of them."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, failure, group=_groups()["agree"])
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)


def run_program(rank: int, world_size: int, program: Program) -> str | None:
    """Runs a program on both sides; returns what differs first, the same on all ranks, or None."""
    _groups()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    tolerance.update(CLOSE_IN_FLOAT32 if has_float32(program.blocks) else CLOSE)
    try:
        sides = []
        for fsdp in (implementation("fsdp_c"), None):
            side = Side(program.point, fsdp, rank, world_size, program=program)  # type: ignore[arg-type]
            torch.manual_seed(7)
            side.model = build(program, side).to(ranks.device())  # type: ignore[arg-type]
            side.note_parameters()
            side.optimizer = OPTIMIZERS[program.point.optimizer](side.model.parameters())
            sides.append(side)
        ending = (Operation("train", (("skip", None), ("sync", True))), Operation("step"))
        ending += (Operation("save", (("kind", "FULL"),)), ending[0])
        for number, action in enumerate(program.operations + ending, start=1):
            failure = _agreed(_run_action(sides[0], sides[1], action))
            if failure is not None:
                return f"action {number}, {action}: {failure}"
        return None
    except Ended:
        return None
    finally:
        torch.set_default_dtype(before)


def _run_action(sharded: Side, plain: Side, action: Operation) -> str | None:
    found = []
    try:
        for side in (plain, sharded):
            found.append(getattr(side, "do_" + action.name)(**dict(action.arguments)) or {})
        compare_returned(found[1], found[0], plain.model, plain.optimizer)
        compare_states(sharded, plain)
    except Illegal:
        pass
    except Different as different:
        return str(different)
    except CheckpointError as error:
        if not found:
            raise Ended from error
        return f"sharded raised CheckpointError: {error}"
    except Exception as error:
        return f"{'sharded' if found else 'plain'} raised {type(error).__name__}: {error}"
    return None


# ------------------------------------------------------------------ the command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new programs are begun")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a fresh one by default")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    ranks.os.environ[ranks.DEVICE_SETTING] = given.device
    pool = ranks.pool(given.ranks)
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"programs from seed {first}", flush=True)
    failures, deadline = 0, time.monotonic() + given.seconds
    for seed in itertools.count(first):
        if time.monotonic() > deadline:
            break
        program = generate(seed, given.ranks)
        try:
            why = pool.run(__spec__.name, "run_program", {"program": program}, RUN_TIMEOUT_S)[0]
        except ranks.RankFailure as failure:  # died, or hangs
            why = f"{type(failure).__name__}: {failure}"
        if why is not None:
            failures += 1
            print(f"\nseed {seed}:\n{program}\n{why}", flush=True)
    print(f"\n{seed - first} programs, {failures} of them not as the plain module", flush=True)
    ranks.close_pools()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
