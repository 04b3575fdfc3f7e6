"""Parameters without dimensions, such as CLIP's temperature, which torch refuses.

Expected results come from the plain module with averaged gradients. tests/parity/plain_programs.py trains such
parameters too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.optim import WholeParameters
from fsdp_c.wrap import ModuleWrapPolicy
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import SHARDED, assert_same, wrap

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        assert self.gain.dim() == self.offset.dim() == 0
        return torch.tanh(self.linear(x)) * self.gain + self.offset


class Alone(nn.Module):
    """A unit of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.alone = Alone()
        self.head = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.alone(x)) * self.logit_scale.exp()


Build = Callable[..., nn.Module]
POLICY = ModuleWrapPolicy({Block, Alone})


def units(module: nn.Module, strategy: str, use_orig_params: bool, **options: Any) -> Any:
    if strategy == "MESH":
        options["device_mesh"] = init_device_mesh(device().type, (dist.get_world_size(),))
    strategy = "FULL_SHARD" if strategy == "MESH" else strategy
    defaults = {"use_orig_params": use_orig_params, "auto_wrap_policy": POLICY}
    return wrap(module, strategy=strategy, **(defaults | options))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, amsgrad=True)


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator(device()).manual_seed(10 * index + rank))


def average_gradients(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    """Each step accumulates, where the model can."""
    is_plain = not isinstance(model, FSDP)
    for step in steps:
        for part in range(2):
            with nullcontext() if part or is_plain else model.no_sync():
                model(batch(dist.get_rank(), 2 * step + part)).square().mean().backward()
        if is_plain:
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, FSDP):
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_scalar_is_a_vector_of_one_or_no_element_between_steps() -> None:
    model = units(Scaled(), "FULL_SHARD", True)
    shapes: list[Any] = [None, None]
    dist.all_gather_object(shapes, model.module.logit_scale.shape)
    assert sorted(shapes) == [(0,), (1,)]
    (info,) = (
        info
        for fqn, info in zip(model._flat_param._fqns, model._flat_param._shard_param_infos, strict=True)
        if fqn == "logit_scale"
    )
    assert info.in_shard == bool(model.module.logit_scale.numel())
    shard = model.module.logit_scale.data
    shard.clamp_(0, 0.5)
    assert values(model)["logit_scale"].item() == 0.5


# ----------------------------------------------------------------- the optimizer's state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.02),
}
NUMBERS = ("step", "mu_product", "mu", "eta")


class Trained:
    """A plain model after some steps, its optimizer's state by name, and its parameters after two more steps."""

    def __init__(self, build: Build, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        model = build()
        made = optimizer(model.parameters())
        train(model, made)
        self.names = [name for name, _ in model.named_parameters()]
        self.values = values(model)
        self.by_id = copy.deepcopy(made.state_dict())
        self.optim = self.named(made)
        train(model, made, range(3, 5))
        self.later = values(model)

    def named(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = copy.deepcopy(optimizer.state_dict())
        group = {**found["param_groups"][0], "params": self.names}
        return {
            "state": {self.names[key]: state for key, state in found["state"].items()},
            "param_groups": [group],
        }

    def assert_state(self, found: dict[str, Any]) -> None:
        """Exactly: names, shapes, values."""
        assert found["state"].keys() == self.optim["state"].keys()
        for fqn, state in self.optim["state"].items():
            assert found["state"][fqn].keys() == state.keys()
            assert {key: value.shape for key, value in found["state"][fqn].items()} == {
                key: value.shape for key, value in state.items()
            }
            assert_same(state, {key: value.cpu() for key, value in found["state"][fqn].items()})

    def assert_resumed(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.assert_state(FSDP.optim_state_dict(model, optimizer))
        for param, state in optimizer.state.items():
            for key, value in state.items():
                assert value.shape == (() if key in NUMBERS else param.shape), key
        train(model, optimizer, range(3, 5))
        assert_close(values(model), self.later)


def fresh(
    trained: Trained,
    build: Build,
    optimizer: Callable[..., torch.optim.Optimizer],
    strategy: str,
    use_orig_params: bool,
) -> tuple[Any, torch.optim.Optimizer]:
    model = units(build(), strategy, use_orig_params)
    model.load_state_dict(trained.values)
    return model, optimizer(model.parameters())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "FULL_SHARD") for name in OPTIMIZERS), *(("AdamW", other) for other in ("NO_SHARD", "MESH"))],
)
@pytest.mark.parametrize("build", [Scaled, Alone])
@both_views
@on_ranks(2)
def test_optimizer_state_is_exchanged_with_the_plain_optimizer(
    build: Build, name: str, strategy: str, use_orig_params: bool, tmp_path: Path
) -> None:
    """Full, sharded and in checkpoints; numbers such as "step" stay numbers."""
    trained = Trained(build, OPTIMIZERS[name])
    start = (trained, build, OPTIMIZERS[name], strategy, use_orig_params)
    model, optimizer = fresh(*start)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, trained.optim))
    with FSDP.state_dict_type(model, SHARDED):
        rows, weights = FSDP.optim_state_dict(model, optimizer), model.state_dict()
    checkpoint.save(model, optimizer, tmp_path / "sharded")
    trained.assert_resumed(model, optimizer)

    model, optimizer = fresh(*start)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(weights)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, rows))
    trained.assert_resumed(model, optimizer)

    plain = build()
    its_optimizer = OPTIMIZERS[name](plain.parameters())
    checkpoint.load(plain, its_optimizer, tmp_path / "sharded")
    assert_same(trained.values, values(plain))
    trained.assert_state(trained.named(its_optimizer))
    checkpoint.save(plain, its_optimizer, tmp_path / "plain")
    for folder in ("sharded", "plain"):
        model, optimizer = fresh(*start)
        checkpoint.load(model, optimizer, tmp_path / folder)
        trained.assert_resumed(model, optimizer)


@on_ranks(2)
def test_state_that_is_nan_is_saved() -> None:
    """If every rank has the whole parameter, its state is a tensor, not a number that ranks compare."""
    model = units(Scaled(), "NO_SHARD", True)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    for state in optimizer.state.values():
        state["exp_avg"].fill_(torch.nan)
    assert FSDP.optim_state_dict(model, optimizer)["state"]["logit_scale"]["exp_avg"].isnan()


# ----------------------------------------------------------------- optimizers of whole parameters, averages


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor])
@all_strategies
@on_ranks(2)
def test_an_optimizer_of_whole_parameters_steps_and_resumes(
    strategy: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    trained = Trained(Scaled, lambda params: optimizer(params, lr=0.05))
    model = units(Scaled(), strategy, True)
    own = WholeParameters(model, optimizer, lr=0.05)
    train(model, own)
    assert_close(values(model), trained.values)
    saved = FSDP.optim_state_dict(model, own)
    for fqn, state in trained.optim["state"].items():
        assert_close(saved["state"][fqn], state)
    for given in (saved, trained.optim):
        again = units(Scaled(), strategy, True)
        again.load_state_dict(trained.values)
        resumed = WholeParameters(again, optimizer, lr=0.05)
        resumed.load_state_dict(FSDP.optim_state_dict_to_load(again, resumed, given))
        train(again, resumed, range(3, 5))
        assert_close(values(again), trained.later)
