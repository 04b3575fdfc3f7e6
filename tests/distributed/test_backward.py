"""Backwards over graphs beyond one forward and one backward, beside the unsharded model on the batches of all
ranks.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_reshard import full
from tests.models import WIDTH, Net
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, all_strategies, both_views, device, on_ranks
from tests.storage import live_nbytes, live_nbytes_after_a_failure, settled_nbytes
from tests.training import PER_BLOCK, assert_same, full_state, train, wrap
from tests.training import batch as inputs


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def plain(**options: Any) -> Net:
    return seeded(lambda: Net(**options))


def sharded(strategy: str = "FULL_SHARD", net: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return wrap(plain(**(net or {})), strategy=strategy, auto_wrap_policy=PER_BLOCK, **arguments)


batch = functools.partial(inputs, dtype=torch.float64)


Step = Callable[[Any, int], None]


def full_gradients(model: Any) -> dict[str, Tensor]:
    """Full gradients by name, zero for None: the difference that a step of plain SGD makes."""
    before = full(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = full(model)
    return {name: before[name] - after[name] for name in before}


def expected_gradients(model: nn.Module, step: Step, world_size: int) -> dict[str, Tensor]:
    for rank in range(world_size):
        step(model, rank)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= world_size
    return full_gradients(model)


def assert_same_gradients(model: Any, reference: nn.Module, step: Step, rank: int, world_size: int) -> None:
    """Assert that ``step`` accumulates the same gradients in both and leaves nothing unsharded."""
    # models of earlier tests may be collected meanwhile, so what is live can only go down
    before = live_nbytes()
    step(model, rank)
    assert live_nbytes() <= before
    assert all(
        unit._handle.unsharded_nbytes == 0 for unit in type(model).fsdp_modules(model) if unit._has_params
    )
    expected, actual = expected_gradients(reference, step, world_size), full_gradients(model)
    assert set(expected) == set(actual)
    assert any(bool(value.count_nonzero()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


# ----------------------------------------------------------------- graphs


def once(model: Any, rank: int) -> None:
    loss_of(model(batch(rank))).backward()


def twice(model: Any, rank: int) -> None:
    for index in range(2):
        loss_of(model(batch(rank, index))).backward()


@all_strategies
@both_views
@on_ranks(2)
def test_grad_on_inputs_gives_parameters_no_gradient_and_frees_everything(
    rank: int, world_size: int, use_orig_params: bool, strategy: str
) -> None:
    before = settled_nbytes()
    model = sharded(strategy, use_orig_params=use_orig_params)
    x = batch(rank).requires_grad_()
    torch.autograd.grad(loss_of(model(x)), x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert live_nbytes() == before
    assert_same_gradients(model, plain(), twice, rank, world_size)


@both_views
@on_ranks(2)
def test_vmap_works_without_gradients_and_is_refused_with_them(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    model, reference = sharded(use_orig_params=use_orig_params), plain()
    inputs = torch.stack([batch(rank, index) for index in range(2)])
    refused = (
        lambda: torch.vmap(model)(inputs),
        lambda: torch.func.grad(lambda x: model(x).sum())(inputs[0]),
        lambda: torch.func.jvp(model, (inputs[0],), (inputs[0],)),
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(model)(inputs), reference(inputs))
    for call in refused:
        with pytest.raises(
            NotImplementedError, match=r"unit \S.* transformation of torch.func .*torch.no_grad"
        ):
            call()
    assert_same_gradients(model, reference, twice, rank, world_size)
    with torch.inference_mode():
        torch.testing.assert_close(torch.vmap(model)(inputs), model(inputs))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_a_first_forward_in_a_transformation_leaves_buffers_as_outside(
    rank: int, dtype: torch.dtype | None
) -> None:
    """Tensors made inside a transformation would not outlive it."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = wrap(module, mixed_precision=MixedPrecision(param_dtype=dtype, buffer_dtype=dtype))
    x = batch(rank).float()
    with pytest.raises(NotImplementedError, match="transformation of torch.func"):
        torch.func.grad(lambda x: model(x).sum())(x)
    assert model.module[1].running_var.dtype == (dtype or torch.float32)
    assert torch.equal(full_state(model)["1.running_var"], torch.ones(WIDTH, device=device()))


class Recursive(nn.Module):
    """A module whose forward calls its own unit, and uses its parameters before and after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unit: list[nn.Module] = [self]

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(self.unit[0](x, depth - 1) if depth else x)


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, recomputed=[False, True])
@on_ranks(2)
def test_a_unit_that_calls_itself_trains(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, recomputed: bool
) -> None:
    def made() -> nn.Module:
        return nn.Sequential(Recursive(), nn.Linear(WIDTH, 2))

    policy = ModuleWrapPolicy({Recursive})
    model = wrap(seeded(made), strategy=strategy, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    model[0].module.unit = [model[0]]

    def step(model: Any, rank: int) -> None:
        run = (lambda x: checkpoint(model, x, use_reentrant=False)) if recomputed else model
        twice(run, rank)

    assert_same_gradients(model, seeded(made), step, rank, world_size)


@on_ranks(2)
def test_a_unit_with_its_whole_module_in_a_checkpoint_is_resharded_at_once(rank: int) -> None:
    """From the first backward on: a model of such units must not be unsharded all at once."""
    whole = [checkpoint_wrapper(nn.Linear(WIDTH, WIDTH).double(), CheckpointImpl.REENTRANT) for _ in range(3)]
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), *map(wrap, whole)))
    gathered = []

    def look(grad: Tensor) -> None:
        gathered.append([unit._handle.unsharded_nbytes > 0 for unit in (model[2], model[3])])

    model[2].register_forward_pre_hook(lambda module, args: args[0].register_hook(look) and None)
    for _ in range(2):
        loss_of(model(batch(rank))).backward()
    assert gathered == [[False, False]] * 2


# ----------------------------------------------------------------- inputs


class Forces(nn.Module):
    """Differentiates the energy that an inner unit computes, within its own forward, and learns from the
    result."""

    def __init__(self, runs_again: bool, with_energy: bool, looks: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.runs_again, self.with_energy, self.looks = runs_again, with_energy, looks

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        if self.looks:
            torch.autograd.grad(force.sum(), x, retain_graph=True)
        if self.runs_again:
            force = force + self.energy(force)
        return self.head(force) + (energy if self.with_energy else 0)


@pairwise(
    use_orig_params=VIEWS,
    strategy=STRATEGIES,
    energy=["none", "with", "looked at"],
    runs_again=[False, True],
)
@on_ranks(2)
def test_gradient_taken_inside_a_forward_is_differentiated(
    rank: int,
    world_size: int,
    strategy: str,
    use_orig_params: bool,
    energy: str,
    runs_again: bool,
) -> None:
    def make() -> nn.Module:
        return Forces(runs_again, with_energy=energy != "none", looks=energy == "looked at")

    model, reference = seeded(make), seeded(make)
    policy = ModuleWrapPolicy({nn.Sequential})
    model = wrap(model, strategy=strategy, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    assert_same_gradients(model, reference, twice, rank, world_size)


def slope(model: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def of_the_slope(model: Any, x: Tensor) -> Tensor:
    return slope(model, x).square().sum()


def of_output_and_slope(model: Any, x: Tensor, looks: int = 0) -> Tensor:
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    for _ in range(looks):
        torch.autograd.grad(slope.sum(), x, retain_graph=True)
    return output.square().mean() + slope.square().sum()


def amid_other_forwards(model: Any, x: Tensor) -> Tensor:
    """Return the loss of a WGAN's critic."""
    real = model(2 * x.detach()).mean()
    penalty = (slope(model, x).norm(dim=1) - 1).square().mean()
    with torch.no_grad():
        shown = model(x)
    return model(3 * x.detach()).mean() - real + penalty + shown.mean()


def beside_a_forward_without_some_units(model: Any, x: Tensor) -> Tensor:
    loss = of_the_slope(model, x)
    model(x)
    net = getattr(model, "module", model)
    net.skip = frozenset({1})
    with torch.no_grad():
        model(x)
        net.skip = frozenset()
        model(x)
    return loss


def of_second_derivatives(model: Any, x: Tensor) -> Tensor:
    first = slope(model, x)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return first.square().mean() + second.square().mean()


def after_a_look_at_second_derivatives(model: Any, x: Tensor) -> Tensor:
    return of_output_and_slope(model, x, looks=2)


def of_checkpointed_blocks(model: Any, x: Tensor) -> Tensor:
    net = getattr(model, "module", model)
    net.around = "nonreentrant"
    loss = of_output_and_slope(model, x)
    net.around = None
    return loss


def after_one_that_is_dropped(model: Any, x: Tensor) -> Tensor:
    slope(model, x)
    return model(x).square().mean()


PENALTIES = (
    of_the_slope,
    of_output_and_slope,
    amid_other_forwards,
    beside_a_forward_without_some_units,
    of_second_derivatives,
    after_a_look_at_second_derivatives,
    of_checkpointed_blocks,
    after_one_that_is_dropped,
)


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, offload=[False, True])
@on_ranks(2)
def test_gradient_penalties_have_the_bits_of_the_plain_model(
    rank: int, world_size: int, use_orig_params: bool, strategy: str, offload: bool
) -> None:
    """Each penalty trains three steps, and nothing stays unsharded after any."""
    reference = plain()
    options = {"cpu_offload": CPUOffload(offload)} if strategy != "NO_SHARD" else {}
    held = settled_nbytes()
    model = sharded(strategy, use_orig_params=use_orig_params, **options)
    for index, loss in enumerate(PENALTIES):
        for step in range(3):
            for each in range(world_size):
                (loss(reference, batch(each, 3 * index + step).requires_grad_()) / world_size).backward()
            loss(model, batch(rank, 3 * index + step).requires_grad_()).backward()
            for one in (reference, model):
                torch.optim.SGD(one.parameters(), lr=0.01).step()
                one.zero_grad()
            assert live_nbytes() == held, loss.__name__
        with model.summon_full_params(model):
            for own, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(own.view_as(other), other), loss.__name__


@on_ranks(2)
def test_a_gradient_penalty_whose_backward_raises_leaves_nothing_unsharded(rank: int) -> None:
    before = settled_nbytes()
    model = sharded()
    x = batch(rank).requires_grad_()
    loss = of_the_slope(model, x)
    assert live_nbytes() > before
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert live_nbytes_after_a_failure(before) == before
    with torch.no_grad():
        model(batch(rank))
    assert live_nbytes() == before


@all_strategies
@on_ranks(2)
def test_frozen_units_free_their_storage_during_backward(rank: int, strategy: str) -> None:
    before = settled_nbytes()
    model = plain()
    model.blocks[2].requires_grad_(False)
    model = wrap(model, strategy=strategy, auto_wrap_policy=PER_BLOCK)
    frozen = model.module.blocks[2]._handle
    seen: list[int] = []
    norm = model.module.blocks[0].module.norm
    norm.register_full_backward_hook(lambda *ignored: seen.append(frozen.unsharded_nbytes))
    for _ in range(2):
        loss_of(model(batch(rank))).backward()
    assert seen == [0, 0]
    assert live_nbytes() == before


@pairwise(
    use_orig_params=VIEWS,
    strategy=STRATEGIES,
    inside=[pytest.param(False, id="after"), pytest.param(True, id="inside")],
    inner=[pytest.param(False, id="of the root"), pytest.param(True, id="of a unit inside")],
)
@on_ranks(2)
def test_losses_weighted_by_gradients_of_the_last_layer(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, inside: bool, inner: bool
) -> None:
    """As a VQGAN weighs the loss of its discriminator. ``inside``: gradients of the weight that the forward used.
    Weights read between forwards are in no graph.
    """

    def made() -> nn.Module:
        body, last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(body, last)

    def step(model: Any, rank: int) -> None:
        layer, used = model[1][0], []
        layer.register_forward_pre_hook(lambda module, args: used.append(module.weight))
        for index in range(2):
            output = model(batch(rank, index))
            weight = used[-1] if inside else layer.weight
            losses = output.square().mean(), output.sin().mean()
            one, other = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses)
            assert one.shape == (WIDTH, WIDTH)
            (losses[0] + one.norm() / other.norm() * losses[1]).backward()

    policy = ModuleWrapPolicy({nn.Sequential}) if inner else None
    model, reference = seeded(made), seeded(made)
    model = wrap(model, strategy=strategy, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    if inside or not use_orig_params or strategy == "SHARD_GRAD_OP":
        assert_same_gradients(model, reference, step, rank, world_size)
        return
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        step(model, rank)
    model(batch(rank)).sum().backward()


# ----------------------------------------------------------------- modules


@all_strategies
@both_views
@on_ranks(2)
def test_recurrent_modules_train_like_the_plain_model(
    rank: int, world_size: int, use_orig_params: bool, strategy: str
) -> None:
    """They keep their weights in a list, too."""

    def made() -> nn.Module:
        return seeded(lambda: nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True))

    def step(model: Any, rank: int) -> None:
        twice(lambda x: model(x)[0], rank)

    model = wrap(made(), strategy=strategy, use_orig_params=use_orig_params)
    assert_same_gradients(model, made(), step, rank, world_size)


@pairwise(use_orig_params=VIEWS, strategy=STRATEGIES, around=["the root", "units", "both"])
@on_ranks(2)
def test_recomputed_forwards_cast_their_inputs_under_mixed_precision(
    rank: int, use_orig_params: bool, strategy: str, around: str
) -> None:
    """Bit for bit as without checkpoints. Units get fp32 of each other."""
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    states = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        net = Net(float_between=True, around="nonreentrant" if recomputes and around != "the root" else None)
        model = wrap(
            net,
            strategy=strategy,
            auto_wrap_policy=PER_BLOCK,
            use_orig_params=use_orig_params,
            mixed_precision=precision,
        )
        recomputed = functools.partial(checkpoint, model, use_reentrant=False)
        called = recomputed if recomputes and around != "units" else model
        train(called, torch.optim.SGD(model.parameters(), lr=0.1), seed=rank, steps=3)
        states.append(full_state(model))
    assert_same(*states)


# ----------------------------------------------------------------- refused, and inference


@pytest.mark.parametrize("net", [{}, {"around": "reentrant"}], ids=["plain", "checkpoint"])
@all_strategies
@both_views
@on_ranks(2)
def test_a_model_dropped_before_its_backward_leaves_the_gradients(
    rank: int, use_orig_params: bool, strategy: str, net: dict[str, Any]
) -> None:
    """The graph keeps the units alive until its backward has filled the parameters' gradients."""

    def take(keep: bool) -> tuple[list[Tensor | None], Any]:
        model = sharded(strategy, net, use_orig_params=use_orig_params)
        params, loss = list(model.parameters()), model(batch(rank)).sum()
        kept = model if keep else None
        del model
        gc.collect()
        loss.backward()
        return [param.grad for param in params], kept

    before = settled_nbytes()
    expected, kept = take(keep=True)
    del kept
    gradients, _ = take(keep=False)
    assert any(grad is not None for grad in gradients)
    for grad, other in zip(gradients, expected, strict=True):
        assert grad is other is None or torch.equal(grad, other)
    assert settled_nbytes() <= before
