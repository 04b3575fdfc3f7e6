"""Freezing, zeroing and looking between the backwards of a step: losses and parameters are those of the plain
model."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models import WIDTH
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.storage import live_nbytes, settled_nbytes


class Layer(nn.Linear):
    """Each is a unit."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)  # its backward reads the weight itself, and no view of it
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Run:
    """A model, sharded or plain, and what its training has shown. All ranks have the same data."""

    def __init__(self, **arguments: Any) -> None:
        self.net = Stack()
        self.weight = self.net.norm.weight  # with use_orig_params the optimizer's, whatever modules show
        self.model: Any = self.net
        if arguments:
            from fsdp_c import FullyShardedDataParallel

            policy = ModuleWrapPolicy({Layer})
            self.model = FullyShardedDataParallel(
                self.net, auto_wrap_policy=policy, device_id=device(), **arguments
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        self.forwards = 0
        self.shown: list[Tensor] = []

    def loss(self) -> Tensor:
        self.forwards += 1
        x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64, device=device()).view(4, WIDTH)
        loss = self.model(x + 0.1 * self.forwards).square().mean()
        self.shown.append(loss.detach().clone())
        return loss

    def sync(self) -> None:
        self.loss().backward()

    def no_sync(self) -> None:
        with self.model.no_sync() if self.model is not self.net else contextlib.nullcontext():
            self.loss().backward()

    def step(self) -> None:
        self.optimizer.step()

    def to_none(self) -> None:
        self.optimizer.zero_grad()

    def to_zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def to_zero_after_forward(self) -> None:
        loss = self.loss()
        self.to_zero()
        loss.backward()

    def to_none_after_forward(self) -> None:
        loss = self.loss()
        self.to_none()
        loss.backward()

    def weights_to_zero(self) -> None:
        for name, param in self.model.named_parameters():
            if name.endswith("weight") and param.grad is not None:
                param.grad.zero_()

    def weights_to_none(self) -> None:
        for name, param in self.model.named_parameters():
            if name.endswith("weight"):
                param.grad = None

    def hold(self) -> None:
        self.held = self.loss()

    def sync_with_held(self) -> None:
        (self.held + self.loss()).backward()

    def infer(self) -> None:
        with torch.inference_mode():
            self.loss()

    def infer_with_gradients_on(self) -> None:
        with torch.inference_mode(), torch.enable_grad():
            self.loss()

    def freeze(self) -> None:
        self.net.second.requires_grad_(False)

    def thaw(self) -> None:
        self.net.second.requires_grad_(True)

    def freeze_a_weight(self) -> None:
        self.weight.requires_grad_(False)

    def thaw_a_weight(self) -> None:
        self.weight.requires_grad_(True)

    def look_at_gradients(self) -> None:
        summoned = self.model is not self.net
        with (
            type(self.model).summon_full_params(self.model, with_grads=True)
            if summoned
            else contextlib.nullcontext()
        ):
            for param in self.model.parameters():
                self.shown.append(torch.zeros_like(param) if param.grad is None else param.grad.clone())

    def do(self, program: str) -> list[Tensor]:
        for verb in program.split():
            getattr(self, verb)()
        return self.shown


def assert_as_plain(program: str, strategy: str, use_orig_params: bool) -> None:
    """The program, and then a step and a look at what it has made of the parameters."""
    program += " step infer"
    expected = Run().do(program)
    actual = Run(sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params).do(program)
    assert len(actual) == len(expected) > 1
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------- inference mode


@pytest.mark.parametrize(
    "program",
    [
        "sync step to_none freeze infer sync",
        "sync step to_none freeze infer_with_gradients_on sync",
        "sync step to_zero freeze infer sync step sync",
        "sync freeze infer sync",
        "sync step to_none freeze infer sync thaw sync",
        "infer_with_gradients_on sync step sync",
        "sync step to_none hold freeze sync_with_held step sync",
        "sync step to_none freeze hold thaw sync_with_held step sync",
    ],
)
@all_strategies
@both_views
@on_ranks(2)
def test_what_was_frozen_before_inference_is_not_trained(
    use_orig_params: bool, strategy: str, program: str
) -> None:
    assert_as_plain(program, strategy, use_orig_params)


@pytest.mark.parametrize(
    "program",
    [
        "sync step to_none freeze_a_weight infer_with_gradients_on sync",
        "sync step to_none hold freeze_a_weight sync_with_held step sync",
        "sync step to_none hold freeze_a_weight infer sync_with_held step sync",
        "sync step to_none hold freeze_a_weight infer_with_gradients_on sync_with_held step sync",
        "sync step to_none freeze_a_weight hold thaw_a_weight sync_with_held step sync",
    ],
)
@all_strategies
@on_ranks(2)
def test_a_frozen_weight_is_not_trained(strategy: str, program: str) -> None:
    assert_as_plain(program, strategy, True)


@all_strategies
@both_views
@on_ranks(2)
def test_a_model_that_goes_in_inference_mode_leaves_nothing(use_orig_params: bool, strategy: str) -> None:
    """The views let go of their history there as well."""
    before = settled_nbytes()
    run = Run(sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    run.do("sync step to_none")
    with torch.inference_mode():
        del run
        gc.collect()
    gc.collect()
    assert live_nbytes() <= before


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_gradients_that_inference_mode_has_found_can_be_written_outside_of_it(strategy: str) -> None:
    """Those that the user has put there: zeros for the others are made amid the forward."""
    run = Run(sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    run.do("sync step to_none")
    for param in run.model.parameters():
        param.grad = torch.ones_like(param) if param.numel() else None
    run.do("infer to_zero sync")
    found = run.do("look_at_gradients")[-6:]
    plain = Run()
    plain.do("sync step to_none infer sync")
    for one, other in zip(found, plain.do("look_at_gradients")[-6:], strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_new_data_that_inference_mode_has_found_trains_outside_of_it() -> None:
    """The flat parameter's views are made anew amid the forward."""
    run = Run(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=False)
    plain = Run()
    for each in (run, plain):
        each.do("sync step to_none")
        for param in each.model.parameters():
            param.data = param.data * 0.5
        each.do("infer sync step sync")
    torch.testing.assert_close(run.shown, plain.shown)


# ----------------------------------------------------------------- zeroed


@pytest.mark.parametrize(
    "program",
    [
        "sync no_sync to_zero sync",
        "sync no_sync to_none sync",
        "sync no_sync to_zero_after_forward",
        "sync no_sync to_none_after_forward",
        "sync no_sync to_zero no_sync sync",
        "sync no_sync no_sync sync to_zero no_sync sync",
        "sync no_sync to_zero infer sync step to_zero sync",
        "sync no_sync infer sync",
    ],
)
@all_strategies
@both_views
@on_ranks(2)
def test_zeroed_gradients_do_not_come_back(
    use_orig_params: bool, strategy: str, program: str
) -> None:  # parity 41
    assert_as_plain(program, strategy, use_orig_params)


@pytest.mark.parametrize(
    "program",
    [
        "sync no_sync weights_to_zero sync",
        "sync no_sync weights_to_none sync",
        "sync no_sync weights_to_zero no_sync sync",
        "sync weights_to_zero no_sync sync",
        "no_sync weights_to_none no_sync sync",
        "no_sync weights_to_none no_sync look_at_gradients sync",
    ],
)
@all_strategies
@on_ranks(2)
def test_only_gradients_that_were_zeroed_go(strategy: str, program: str) -> None:  # parity 41
    assert_as_plain(program, strategy, True)


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.other(x) if other else self.one(x)


@both_views
@on_ranks(2)
def test_a_gradient_that_is_zero_by_itself_is_not_taken_for_one_that_was_zeroed(
    use_orig_params: bool,
) -> None:
    from fsdp_c import FullyShardedDataParallel

    x = torch.ones(2, WIDTH, device=device())
    model = FullyShardedDataParallel(OneOfTwo(), device_id=device(), use_orig_params=use_orig_params)
    plain = OneOfTwo().to(device())
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(x, True).sum().backward()
        with each.no_sync() if each is model else contextlib.nullcontext():
            each(x, False).sum().backward()
        each(x, False).sum().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)


# ----------------------------------------------------------------- frozen


@pytest.mark.parametrize(
    "program",
    [
        "sync freeze sync",
        "sync freeze sync step sync",
        "sync freeze no_sync sync",
        "no_sync freeze sync",
        "sync no_sync freeze sync step to_none sync",
        "sync freeze sync thaw sync",
        "sync freeze sync to_zero sync",
        "sync freeze to_none sync thaw sync",
        "sync freeze to_none_after_forward",
    ],
)
@all_strategies
@both_views
@on_ranks(2)
def test_a_gradient_stays_where_its_unit_is_frozen(
    use_orig_params: bool, strategy: str, program: str
) -> None:  # parity 42
    assert_as_plain(program, strategy, use_orig_params)


@pytest.mark.parametrize(
    "program",
    [
        "sync freeze_a_weight sync",
        "sync freeze_a_weight no_sync sync",
        "no_sync freeze_a_weight sync step sync",
        "sync no_sync freeze_a_weight sync",
        "sync freeze_a_weight sync thaw_a_weight sync",
        "sync freeze_a_weight weights_to_none sync",
        "sync freeze_a_weight look_at_gradients sync look_at_gradients",
        "sync freeze look_at_gradients sync look_at_gradients",
        "freeze_a_weight sync look_at_gradients",
        "freeze_a_weight no_sync thaw_a_weight no_sync sync look_at_gradients",
    ],
)
@all_strategies
@on_ranks(2)
def test_a_gradient_stays_where_its_parameter_is_frozen(strategy: str, program: str) -> None:  # parity 42
    assert_as_plain(program, strategy, True)
