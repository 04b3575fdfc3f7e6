"""fsdp_c.optim.step_in_backward: the bits of step() after the backward, whatever the optimizer and the
wrapping."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from fsdp_c import optim
from fsdp_c.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fsdp_c.sharded_grad_scaler import ShardedGradScaler
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import wrap

WIDTH = 640  # shards above 1 MiB
LAYERS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=False),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "kept bf16": {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, recomputes: bool | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x)
            x = layer(x) if recomputes is None else checkpoint(layer, x, use_reentrant=recomputes)
        return self.head(x)


def wrapped(strategy: str = "FULL_SHARD", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(1)
    unit = partial(wrap, strategy=strategy, **settings)
    net = Net().to(dtype)
    for index, layer in enumerate(net.layers):
        net.layers[index] = unit(layer)
    return unit(net)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, device="cpu").to(device())


def train(
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range = range(3),
    after_backward: Callable[[], None] = lambda: None,
    **forward: Any,
) -> list[float]:
    losses = []
    for step in steps:
        x = batch(step, rank).to(next(model.parameters()).dtype)
        loss = model(x, **forward).square().mean()
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole parameters and state, by name."""
    state = FSDP.optim_state_dict(model, optimizer)["state"]
    found = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
    return {**model.state_dict(), **{name: torch.as_tensor(value) for name, value in found.items()}}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.cpu(), other[name].cpu()), name


def both(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> list[tuple[FSDP, Any]]:
    """A model that steps after the backward, and one that steps in it."""
    after, inside = wrapped(**settings), wrapped(**settings)
    return [(after, make(after.parameters())), (inside, optim.step_in_backward(inside, make))]


def train_alike(pairs: list[tuple[FSDP, Any]], rank: int, **forward: Any) -> None:
    """To the bit, in losses, parameters and state."""
    losses = [train(model, optimizer, rank, **forward) for model, optimizer in pairs]
    assert losses[0] == losses[1]
    assert_same(*(full(*pair) for pair in pairs))


@pytest.mark.parametrize("name", OPTIMIZERS)
@both_views
@all_strategies
@on_ranks(2)
def test_bits_are_those_of_a_step_after_the_backward(
    rank: int, strategy: str, use_orig_params: bool, name: str
) -> None:
    train_alike(both(OPTIMIZERS[name], strategy=strategy, use_orig_params=use_orig_params), rank)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "usual"])
@both_views
@on_ranks(2)
def test_bits_under_settings(rank: int, use_orig_params: bool, setting: str) -> None:
    pairs = both(OPTIMIZERS["fused"], use_orig_params=use_orig_params, **SETTINGS[setting])
    train_alike(pairs, rank)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_bits_of_hybrid_strategies(rank: int, strategy: str) -> None:
    mesh = dist.device_mesh.init_device_mesh(device().type, (2, 2))
    pairs = both(OPTIMIZERS["momentum"], strategy=strategy, device_mesh=mesh)
    train_alike(pairs, rank)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_gradients_are_gone_and_parameters_stepped_when_the_backward_returns(
    rank: int, offload: bool
) -> None:
    model = wrapped(cpu_offload=CPUOffload(offload))
    optimizer = optim.step_in_backward(model, OPTIMIZERS["momentum"])
    before = [param.detach().clone() for param in model.parameters()]
    model(batch(0, rank)).square().mean().backward()
    after = [param.detach().clone() for param in model.parameters()]
    assert all(param.grad is None for param in model.parameters())
    changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True) if pair[0].numel()]
    assert all(changed)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(after, model.parameters(), strict=True))


@all_strategies
@pytest.mark.parametrize("recomputes", [True, False])
@on_ranks(2)
def test_checkpointed_layers(rank: int, recomputes: bool, strategy: str) -> None:
    pairs = both(OPTIMIZERS["AdamW"], strategy=strategy)
    train_alike(pairs, rank, recomputes=recomputes)


@all_strategies
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_a_unit_that_is_reduced_twice_in_a_backward_steps_twice(
    rank: int, strategy: str, offload: bool
) -> None:
    """Its second recomputation sees the first step, as with optimizers that torch attaches."""

    def found(attach: Callable[[FSDP], object]) -> dict[str, Tensor]:
        model = wrapped(strategy, cpu_offload=CPUOffload(offload))
        attach(model)
        for step in range(2):
            x, y = batch(step, rank).requires_grad_(), batch(step + 7, rank).requires_grad_()
            (model(x, recomputes=True) + model(y, recomputes=True)).square().mean().backward()
        return model.state_dict()

    sgd = partial(torch.optim.SGD, lr=0.05)
    inside = found(lambda model: optim.step_in_backward(model, sgd))
    torchs = found(
        lambda model: _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    )
    assert_same(inside, torchs)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_no_sync_accumulates_and_the_backward_that_reduces_steps(rank: int, strategy: str) -> None:
    pairs = both(OPTIMIZERS["fused"], strategy=strategy)
    for model, optimizer in pairs:
        for step in range(2):
            with model.no_sync():
                before = [param.detach().clone() for param in model.parameters()]
                model(batch(step, rank)).square().mean().backward()
                assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            model(batch(step + 9, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*(full(*pair) for pair in pairs))


@on_ranks(2)
def test_groups_schedules_and_what_belongs_to_no_unit(rank: int) -> None:
    results = []
    for inside in (False, True):
        torch.manual_seed(1)
        net = Net()
        ignored = net.head
        options: dict[str, Any] = {"device_id": device(), "use_orig_params": True}
        for index, layer in enumerate(net.layers):
            net.layers[index] = FSDP(layer, **options)
        ignored.to(device())
        model = FSDP(net, ignored_modules=[ignored], **options)
        model.module.layers[1].requires_grad_(False)
        groups = optim.param_groups(model, lambda name, shape: {"weight_decay": 0.1 * len(shape)})
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
        if inside:
            optimizer = optim.step_in_backward(model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            model(
                batch(step, 0)
            ).square().mean().backward()  # the same on all ranks, as nobody reduces `head`
            assert (model.module.layers[0].module.weight.grad is None) == inside or rank == 1
            assert ignored.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.00125] * 2
        results.append(full(model, optimizer))
    assert_same(*results)


@on_ranks(2)
def test_state_is_saved_and_loaded_as_ever(rank: int) -> None:
    first = wrapped()
    optimizer = optim.step_in_backward(first, OPTIMIZERS["fused"])
    train(first, optimizer, rank, range(2))
    whole, state = first.state_dict(), FSDP.optim_state_dict(first, optimizer)
    second = wrapped(use_orig_params=False)
    other = optim.step_in_backward(second, OPTIMIZERS["fused"])
    second.load_state_dict(whole)
    other.load_state_dict(FSDP.optim_state_dict_to_load(second, other, state))
    assert train(first, optimizer, rank, range(2, 4)) == train(second, other, rank, range(2, 4))
    assert_same(full(first, optimizer), full(second, other))


@all_strategies
@on_ranks(2)
def test_clipping_by_the_norm_of_the_step_before(rank: int, world_size: int, strategy: str) -> None:
    model = wrapped(strategy)
    optimizer = optim.step_in_backward(model, partial(torch.optim.SGD, lr=0.5), clip_by_last_norm=True)
    plain = Net()
    torch.manual_seed(1)
    plain = Net().to(device())
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    factor = 1.0
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
        norm = model.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses = [plain(batch(step, each)).square().mean() for each in range(world_size)]
        torch.stack(losses).mean().backward()
        expected = nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        torch.testing.assert_close(norm, expected)
        for param in plain.parameters():
            param.grad.mul_(factor)
        reference.step()
        reference.zero_grad()
        factor = min(1.0, 0.05 / (float(expected) + 1e-6))
        assert factor < 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    with pytest.raises(ValueError, match="knows norms of order 2, not 1.0"):
        model.clip_grad_norm_(1.0, norm_type=1)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_clipping_is_refused_where_it_was_not_asked_for(rank: int, strategy: str) -> None:
    model = wrapped(strategy)
    optim.step_in_backward(model, OPTIMIZERS["momentum"])
    model(batch(0, rank)).square().mean().backward()
    words = rf"rank {rank}, unit .*: gradients cannot be clipped .* clip_by_last_norm=True"
    with pytest.raises(RuntimeError, match=words):
        model.clip_grad_norm_(1.0)


@on_ranks(2)
def test_scaled_losses_are_refused(rank: int) -> None:
    model = wrapped()
    optimizer = optim.step_in_backward(model, OPTIMIZERS["momentum"])
    scaler = ShardedGradScaler(device=device().type)
    scaler.scale(model(batch(0, rank)).square().mean()).backward()
    for look in (scaler.unscale_, scaler.step):
        with pytest.raises(
            RuntimeError, match="SGD has stepped in the backward with gradients of a scaled loss"
        ):
            look(optimizer)


class Failing(torch.optim.SGD):
    fails = True

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails and any(param.numel() == 4 for group in self.param_groups for param in group["params"]):
            raise ArithmeticError("no step")
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_what_the_optimizer_raises_the_backward_raises_and_the_next_one_works(
    rank: int, offload: bool
) -> None:
    model = wrapped("NO_SHARD", cpu_offload=CPUOffload(offload))
    optimizer = optim.step_in_backward(model, partial(Failing, lr=0.1))
    with pytest.raises(ArithmeticError, match="no step") as raised:
        model(batch(0, rank)).square().mean().backward()
    assert f"in the step of unit Net on rank {rank}" in "".join(raised.value.__notes__)
    dist.barrier()
    optimizer.zero_grad()
    Failing.fails = False
    try:
        train(model, optimizer, rank)
    finally:
        Failing.fails = True
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_backward_that_raises_waits_for_what_steps(rank: int) -> None:
    model = wrapped()
    began, may_end = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            began.set()
            may_end.wait(5)
            return super().step(*args, **kwargs)

    optimizer = optim.step_in_backward(model, partial(Slow, lr=0.1))

    def fail(grad: Tensor) -> None:
        if device().type == "cpu":
            assert began.wait(60)  # of the units before
        threading.Timer(0.2, may_end.set).start()
        raise ArithmeticError("amid the backward")

    hidden = model.module.layers[0].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    with pytest.raises(ArithmeticError, match="amid the backward"):
        model(batch(0, rank)).square().mean().backward()
    hidden.remove()
    assert may_end.is_set() or device().type != "cpu"
    before = [param.detach().clone() for param in model.parameters()]
    dist.barrier()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    train(model, optimizer, rank)


class OfAGroup(torch.optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(*args, **kwargs)


@on_ranks(2)
def test_what_cannot_step_unit_by_unit_is_refused(rank: int) -> None:
    model = wrapped()
    with pytest.raises(ValueError, match="LBFGS steps over all parameters at once"):
        optim.step_in_backward(model, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="WholeParameters steps over all parameters at once"):
        optim.step_in_backward(model, optim.WholeParameters(model, torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match="no unit has parameters of the SGD"):
        optim.step_in_backward(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    optimizer = optim.step_in_backward(model, partial(OfAGroup, lr=0.1))
    with pytest.raises(
        ValueError, match="another optimizer steps in the backward|has an optimizer that steps"
    ):
        optim.step_in_backward(model, torch.optim.SGD)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=r"OfAGroup changes \['k'\] of a group in each step"):
        model(batch(0, rank)).square().mean().backward()
    assert optimizer.param_groups[0] == before


@on_ranks(2)
def test_steps_are_made_beside_the_backward(rank: int) -> None:
    """In a thread where parameters lie on the CPU: the first step waits there for the last unit's
    backward."""
    if device().type != "cpu":
        pytest.skip("on a GPU a stream has them")
    model = wrapped()
    last = threading.Event()
    where = []

    class Waiting(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            where.append(threading.current_thread().name)
            assert last.wait(60)
            return super().step(*args, **kwargs)

    optim.step_in_backward(model, partial(Waiting, lr=0.1))
    x = batch(0, rank).requires_grad_()
    x.register_hook(lambda grad: last.set())
    model(x).square().mean().backward()
    assert len(where) == LAYERS + 1 and all(name.startswith("fsdp_c-step") for name in where)
