"""A forward uses current parameters: units left unsharded by an earlier forward are all-gathered again after a
change. Compared with the plain module: both ranks have the same data.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import split_frozen
from tests import training
from tests.distributed.test_collectives import calls, counted
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, all_strategies, both_views, device, on_ranks
from tests.storage import live_nbytes, settled_nbytes
from tests.training import SHARDED

WIDTH = 6
LARGE = 420  # a unit of more than 1 MiB


class Block(nn.Linear):
    pass


class Scale(nn.Module):
    """Has one element, which one rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """A root with its own parameters and three units. A forward may skip the second."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = (Block(width, width) for _ in range(2))
        self.scale, self.head = Scale(), nn.Linear(width, 3)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = torch.tanh(self.a(x))
        x = x if skip else x + self.b(x)
        return self.head(self.scale(x))


def plain(width: int = WIDTH) -> Net:
    return Net(width).to(device(), torch.float64)


def wrap(module: nn.Module, strategy: str = "SHARD_GRAD_OP", **arguments: Any) -> FSDP:
    policy = ModuleWrapPolicy({Block, Scale})
    return training.wrap(module, strategy=strategy, auto_wrap_policy=policy, **arguments)


def batch(index: int = 0, width: int = WIDTH) -> Tensor:
    numbers = torch.Generator().manual_seed(index)
    return torch.randn(4, width, generator=numbers, dtype=torch.float64, device="cpu").to(device())


def full(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check(model: nn.Module, expected: nn.Module, width: int = WIDTH, rtol: float = 1e-9) -> None:
    """The same outputs, and the same parameters."""
    with torch.no_grad():
        out, right = model(batch(9, width)), expected(batch(9, width))
    torch.testing.assert_close(out.double(), right, rtol=rtol, atol=rtol)
    torch.testing.assert_close(full(model), full(expected), rtol=rtol, atol=rtol)


# ----------------------------------------------------------------- changes of parameters


class Trainer:
    """A model, its optimizer, and the parameters as they were when it was made."""

    def __init__(self, model: nn.Module, width: int = WIDTH) -> None:
        self.model, self.width = model, width
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.25, momentum=0.5)

    def loss(self, index: int = 0) -> Tensor:
        return self.model(batch(index, self.width)).double().square().mean()

    def train(self, index: int = 0) -> None:
        self.loss(index).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step(trainer: Trainer) -> None:
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def step_by_hand(trainer: Trainer) -> None:
    with torch.no_grad():
        for param in trainer.params:
            if param.grad is not None:  # None on a rank without elements of the parameter
                param -= 0.25 * param.grad
                param.grad = None


def scale_shown(trainer: Trainer) -> None:
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.mul_(1.5)


def scale_shown_data(trainer: Trainer) -> None:
    for param in trainer.model.parameters():
        param.data.mul_(1.5)


def scale_kept(trainer: Trainer) -> None:  # like an EMA of a teacher
    torch._foreach_mul_([param.detach() for param in trainer.params if param.numel()], 1.5)


def scale_kept_data(trainer: Trainer) -> None:
    for param in trainer.params:
        param.data.mul_(1.5)


def load(trainer: Trainer) -> None:
    state = plain(trainer.width).state_dict()
    trainer.model.load_state_dict({name: value * 1.5 for name, value in state.items()})


def summon(trainer: Trainer) -> None:
    if not isinstance(trainer.model, FSDP):
        return scale_shown(trainer)
    with FSDP.summon_full_params(trainer.model):
        scale_shown(trainer)


Change = Callable[[Trainer], None]
CHANGES: tuple[Change, ...] = (step, step_by_hand, scale_shown, scale_shown_data, scale_kept, scale_kept_data)
CHANGES += (load, summon)


def both(width: int = WIDTH, **arguments: Any) -> tuple[Trainer, Trainer]:
    return Trainer(wrap(plain(width), **arguments), width), Trainer(plain(width), width)


def run(change: Change, trainers: tuple[Trainer, Trainer], held: bool) -> None:
    """Run a step, a forward without a backward, the change, and two more steps."""
    for trainer in trainers:
        trainer.train(0)
        trainer.loss(1).backward()
        skipped = trainer.loss(2)
        if not held:
            del skipped
        if trainer.params[0].device != device():
            torch.cuda.synchronize()  # the skipped forward may still copy the offloaded shards
        change(trainer)
        trainer.train(3)


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# arguments, and whether the output of the forward without a backward is kept
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "dropped": ({}, False),
    "kept": ({}, True),
    "prefetch": ({"forward_prefetch": True}, False),
    "bf16 dropped": ({"mixed_precision": BF16}, False),
    "bf16 kept": ({"mixed_precision": BF16}, True),
    "offload": ({"cpu_offload": CPUOffload(True)}, True),
    "large": ({"width": LARGE, "forward_prefetch": True}, True),
}


@pairwise(strategy=STRATEGIES[:2], use_orig_params=VIEWS, case=tuple(CASES))
@on_ranks(2)
def test_a_forward_after_one_without_backward_sees_each_change(
    strategy: str, use_orig_params: bool, case: str
) -> None:
    arguments, held = CASES[case]
    for change in CHANGES:
        trainers = both(strategy=strategy, use_orig_params=use_orig_params, **arguments)
        run(change, trainers, held)
        rtol = 0.1 if "bf16" in case else 1e-9
        check(trainers[0].model, trainers[1].model, trainers[0].width, rtol)


# ----------------------------------------------------------------- units left unsharded


@pairwise(strategy=STRATEGIES[:2], use_orig_params=VIEWS, grad=[False, True])
@on_ranks(2)
def test_unused_prefetched_units_are_freed_with_their_forward(
    strategy: str, use_orig_params: bool, grad: bool
) -> None:
    base = settled_nbytes()
    trainers = both(strategy=strategy, use_orig_params=use_orig_params, forward_prefetch=True)
    for trainer in trainers:
        trainer.train()
        trainer.loss().backward()
        with torch.set_grad_enabled(grad):
            trainer.model(batch(), skip=True)
        if not grad and trainer is trainers[0]:
            assert live_nbytes() == base
        step(trainer)
        trainer.train()
    check(trainers[0].model, trainers[1].model)


@pairwise(strategy=STRATEGIES[:2], use_orig_params=VIEWS)
@on_ranks(2)
def test_a_second_forward_before_the_backward_gathers_each_unit_once(
    strategy: str, use_orig_params: bool
) -> None:
    trainers = both(strategy=strategy, use_orig_params=use_orig_params)
    losses = [trainer.loss(0) for trainer in trainers]
    with calls() as seen:
        losses[0] = losses[0] + trainers[0].loss(1)
    assert counted(seen) == {"AG": 4}
    losses[1] = losses[1] + trainers[1].loss(1)
    for trainer, loss in zip(trainers, losses, strict=True):
        loss.backward()
        step(trainer)
    check(trainers[0].model, trainers[1].model)


# ----------------------------------------------------------------- between forward and backward


def totals(model: FSDP) -> list[float]:
    """The sum of all values of a full and of a sharded state dict."""
    with FSDP.state_dict_type(model, SHARDED):
        sharded = model.state_dict()
    parts = [shard.tensor for value in sharded.values() for shard in value.local_shards()]
    local = sum((part.abs().sum() for part in parts), torch.zeros((), dtype=torch.float64, device=device()))
    dist.all_reduce(local)
    return [float(sum(value.abs().sum() for value in full(model).values())), float(local)]


@pytest.mark.parametrize("held", [False, True], ids=["gone", "held"])
@on_ranks(2)
def test_writes_to_unsharded_parameters_are_saved_and_kept(held: bool) -> None:
    """Between a forward and its backward under SHARD_GRAD_OP; torch loses it in the backward."""
    trainers = both()
    total = float(sum(param.abs().sum() for param in plain().parameters()))
    outputs = [trainer.loss() for trainer in trainers]
    if not held:
        del outputs
    for trainer in trainers:
        scale_shown(trainer)
    torch.testing.assert_close(totals(trainers[0].model), [1.5 * total] * 2)
    for trainer in trainers:
        trainer.train()
    check(trainers[0].model, trainers[1].model)


@on_ranks(2)
def test_unwritten_elements_keep_their_bits_under_mixed_precision() -> None:
    model = wrap(plain(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    output = model(batch())  # noqa: F841  # a backward can follow
    with torch.no_grad():
        model.a.weight[0].fill_(2.0)
    expected = plain().state_dict()
    expected["a.weight"][0].fill_(2.0)
    torch.testing.assert_close(full(model), dict(expected), rtol=0, atol=0)


@on_ranks(2)
def test_parameters_are_resharded_after_an_optimizer_step() -> None:
    """As weights are clipped, with the graph of a skipped backward alive."""
    trainers = both()
    for trainer in trainers:
        trainer.loss(0).backward()
        skipped = trainer.loss(1)  # noqa: F841
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        other.step()
        if trainer is trainers[0]:  # another optimizer's changes nothing
            assert trainer.model.a.weight.shape == (WIDTH, WIDTH)
        step(trainer)
        for param in trainer.model.parameters():
            param.data.clamp_(-0.1, 0.1)
    check(trainers[0].model, trainers[1].model)


@on_ranks(2)
def test_unsharded_parameters_are_freed_with_the_outputs_of_their_forward() -> None:
    model = wrap(plain())
    output = model(batch())
    assert model.a.weight.shape == (WIDTH, WIDTH) and not isinstance(model.a.weight, nn.Parameter)
    del output
    gc.collect()
    assert model.a.weight.dim() == 1 and isinstance(model.a.weight, nn.Parameter)
    for old_first in (True, False):  # the graph of another forward is alive
        outputs = [model(batch()), model(batch())]
        del outputs[0 if old_first else 1]
        outputs[0].sum().backward()
    torch.testing.assert_close(full(model), dict(plain().state_dict()), rtol=0, atol=0)


@on_ranks(2)
def test_an_exception_or_a_move_loses_no_writes() -> None:
    model = wrap(plain())
    for leave in (lambda: model.to(torch.float64), lambda: pytest.raises(TypeError, model, None), model.eval):
        before = copy.deepcopy(full(model))
        output = model(batch())  # noqa: F841
        with torch.no_grad():
            model.a.weight.mul_(2.0)
        leave()
        before["a.weight"] *= 2.0
        torch.testing.assert_close(full(model), before, rtol=0, atol=0)


# ----------------------------------------------------------------- writes of a forward


class Writing(Block):
    """A block whose forward writes into a trained parameter and into a frozen one, a codebook."""

    def __init__(self, writes_from: int = 0, recomputed: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.forwards, self.writes_from, self.recomputed = 0, writes_from, recomputed

    def write(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > self.writes_from:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
                self.code.mul_(0.75).add_(x.detach().mean(0))
        return super().forward(x + self.code)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.write, x, use_reentrant=False) if self.recomputed else self.write(x)


class WritingNet(nn.Module):
    """A model whose root also has a parameter that forwards write to."""

    def __init__(self, recomputed: str = "no", writes_from: int = 0) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(4, WIDTH, max_norm=0.5)
        self.a, self.b = (Writing(writes_from, recomputed == "inside") for _ in range(2))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding(torch.arange(4, device=x.device))
        x = checkpoint(self.a, x, use_reentrant=False) if self.recomputed == "around" else self.a(x)
        return self.b(torch.tanh(x))


def both_writing(*given: Any, **arguments: Any) -> tuple[Trainer, Trainer]:
    models = [WritingNet(*given).to(device(), torch.float64) for _ in range(2)]
    return Trainer(wrap(models[0], **arguments)), Trainer(models[1])


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, recomputed=["no", "inside", "around"])
@on_ranks(2)
def test_writes_of_a_forward_to_its_parameters_are_kept(
    strategy: str, use_orig_params: bool, recomputed: str
) -> None:
    """Writes like those of `nn.Embedding(max_norm=...)` and of codebooks, which raise in torch. A
    recomputation writes once more.
    """
    trainers = both_writing(recomputed, strategy=strategy, use_orig_params=use_orig_params)
    for trainer in trainers:
        for index in range(3):
            trainer.train(index)
            with torch.no_grad():
                trainer.loss(index + 5)
    check(trainers[0].model, trainers[1].model)


@pytest.mark.parametrize(
    "arguments", [{"cpu_offload": CPUOffload(True)}, {"forward_prefetch": True}, {"split": True}]
)
@on_ranks(2)
def test_writes_of_a_forward_are_kept_with_offload_prefetch_and_split_frozen(
    arguments: dict[str, Any],
) -> None:
    with split_frozen() if arguments.pop("split", False) else contextlib.nullcontext():
        trainers = both_writing(**arguments)
    for trainer in trainers:
        with getattr(trainer.model, "no_sync", torch.enable_grad)():
            trainer.loss(7).backward()
        trainer.train(0)
        trainer.train(1)
        with torch.inference_mode():
            trainer.loss(2)
    check(trainers[0].model, trainers[1].model)


@all_strategies
@both_views
@on_ranks(2)
def test_elements_that_a_forward_left_keep_their_bits_under_mixed_precision(
    strategy: str, use_orig_params: bool
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    trainer = both_writing(strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)[0]
    before = full(trainer.model)["a.weight"]
    trainer.loss().backward()
    low = before.to(torch.bfloat16)
    clamped = low.clamp(-0.2, 0.2)
    expected = torch.where(clamped == low, before, clamped.double())
    assert 0 < int((clamped != low).sum()) < low.numel()
    assert torch.equal(full(trainer.model)["a.weight"], expected)


@on_ranks(2)
def test_a_unit_whose_forward_writes_only_later_is_refused_once(rank: int) -> None:
    """Versions of all parameters are asked for after few forwards, where none has written."""
    model = both_writing("no", 6)[0].model
    with torch.no_grad():
        for index in range(64):
            model(batch(index))
        for unit in ("a", "b"):
            with pytest.raises(
                RuntimeError, match=f"rank {rank}, unit Writing at '{unit}': its forward writes in"
            ):
                model(batch())
        model(batch())
        kept = full(model)["a.code"]
        model(batch())
    assert not torch.equal(full(model)["a.code"], kept)
