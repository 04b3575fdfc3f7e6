"""Parameters without dimensions, such as CLIP's temperature, which torch refuses: shapes, and optimizer state.

tests/parity/plain_programs.py trains such parameters, and test_whole_parameters.py their optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.wrap import ModuleWrapPolicy
from tests.models import WIDTH
from tests.ranks import both_views, device, on_ranks
from tests.training import SHARDED, assert_same, train, wrap


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
        self.logit_scale = nn.Parameter(torch.tensor(0.4))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.alone = Alone()
        self.offset = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        assert self.logit_scale.dim() == self.offset.dim() == 0
        return self.alone(torch.tanh(self.linear(x))) * self.logit_scale.exp() + self.offset


def units(strategy: str, use_orig_params: bool) -> Any:
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "auto_wrap_policy": ModuleWrapPolicy({Alone}),
    }
    if strategy == "MESH":
        options["device_mesh"] = init_device_mesh(device().type, (dist.get_world_size(),))
    return wrap(Scaled(), strategy="FULL_SHARD" if strategy == "MESH" else strategy, **options)


def values(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@on_ranks(2)
def test_a_scalar_is_a_vector_of_one_or_no_element_between_steps() -> None:
    model = units("FULL_SHARD", True)
    shapes: list[Any] = [None, None]
    dist.all_gather_object(shapes, model.module.logit_scale.shape)
    assert sorted(shapes) == [(0,), (1,)]
    infos = dict(zip(model._flat_param._fqns, model._flat_param._shard_param_infos, strict=True))
    assert infos["logit_scale"].in_shard == bool(model.module.logit_scale.numel())
    model.module.logit_scale.data.clamp_(0, 0.25)
    assert values(model)["logit_scale"].item() == 0.25


# ----------------------------------------------------------------- the optimizer's state

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.02),
}
NUMBERS = ("step", "mu_product", "mu", "eta")


class Trained:
    """A plain model after some steps, its optimizer's state by name, and its parameters after two more steps."""

    def __init__(self, optimizer: Callable[..., Optimizer]) -> None:
        model = Scaled().to(device())
        made = optimizer(model.parameters())
        train(model, made)
        self.values = values(model)
        self.optim = self.named(made)
        train(model, made, seed=1)
        self.later = values(model)

    def named(self, optimizer: Optimizer) -> dict[str, Any]:
        found, names = copy.deepcopy(optimizer.state_dict()), list(self.values)
        group = {**found["param_groups"][0], "params": names}
        return {"state": {names[key]: one for key, one in found["state"].items()}, "param_groups": [group]}

    def assert_state(self, found: dict[str, Any]) -> None:
        """Exactly: names, shapes, values."""
        assert found["state"].keys() == self.optim["state"].keys()
        for fqn, state in self.optim["state"].items():
            assert_same(state, found["state"][fqn])

    def assert_resumed(self, model: Any, optimizer: Optimizer) -> None:
        self.assert_state(FSDP.optim_state_dict(model, optimizer))
        for param, state in optimizer.state.items():
            for key, value in state.items():
                assert value.shape == (() if key in NUMBERS else param.shape), key
        train(model, optimizer, seed=1)
        torch.testing.assert_close(values(model), self.later)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "FULL_SHARD") for name in OPTIMIZERS), *(("AdamW", other) for other in ("NO_SHARD", "MESH"))],
)
@both_views
@on_ranks(2)
def test_optimizer_state_is_exchanged_with_the_plain_optimizer(
    name: str, strategy: str, use_orig_params: bool, tmp_path: Path
) -> None:
    """Full, sharded and in checkpoints; numbers such as "step" stay numbers."""
    trained = Trained(OPTIMIZERS[name])

    def fresh() -> tuple[Any, Optimizer]:
        model = units(strategy, use_orig_params)
        model.load_state_dict(trained.values)
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = fresh()
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, trained.optim))
    with FSDP.state_dict_type(model, SHARDED):
        rows, weights = FSDP.optim_state_dict(model, optimizer), model.state_dict()
    scalars = [weights["logit_scale"], *rows["state"]["logit_scale"].values()]
    assert all(value.dim() == 0 for value in scalars)
    checkpoint.save(model, optimizer, tmp_path / "sharded")
    trained.assert_resumed(model, optimizer)

    model, optimizer = fresh()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(weights)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, rows))
    trained.assert_resumed(model, optimizer)

    plain = Scaled().to(device())
    its_optimizer = OPTIMIZERS[name](plain.parameters())
    checkpoint.load(plain, its_optimizer, tmp_path / "sharded")
    assert_same(trained.values, values(plain))
    trained.assert_state(trained.named(its_optimizer))
    checkpoint.save(plain, its_optimizer, tmp_path / "plain")
    for folder in ("sharded", "plain"):
        model, optimizer = fresh()
        checkpoint.load(model, optimizer, tmp_path / folder)
        trained.assert_resumed(model, optimizer)


@on_ranks(2)
def test_state_that_is_nan_is_saved() -> None:
    """If every rank has the whole parameter, its state is a tensor, not a number that ranks compare."""
    model = units("NO_SHARD", True)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].fill_(torch.nan)
    assert FSDP.optim_state_dict(model, optimizer)["state"]["logit_scale"]["exp_avg"].isnan()
