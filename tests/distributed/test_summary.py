"""The numbers of ``summary`` are those that ranks hold, all-gather and reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import _C, optional, summary
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.distributed.test_collectives import calls
from tests.models import WIDTH, Block, Net
from tests.ranks import all_strategies, device, on_ranks
from tests.storage import settled_nbytes

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Stage(nn.Module):
    """A unit with units inside, and its own parameters before and after them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(3 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(torch.tanh(self.inp(x)))
        for block in self.blocks:
            x = block(x)
        return x


def stages() -> nn.Module:
    """Return a root without its own parameters, over units of several sizes."""
    return nn.Sequential(Block(extra=True), Stage(2), Block(tied=True), Stage(1), nn.Sequential(Block()))


def frozen_in_the_middle() -> nn.Module:
    net = Net(4)
    net.blocks[2].requires_grad_(False)
    return net


def unequal_blocks() -> nn.Module:
    return nn.Sequential(Block(extra=True), Block(tied=True), Block(), Block(extra=True))


def optional_blocks() -> nn.Module:
    net = Net(4)
    for index in (0, 2):
        optional(net.blocks[index])
    net.skip = frozenset({2})
    return net


def optional_stages() -> nn.Module:
    """Return stages whose optional module has units inside, below a root without parameters."""
    net = stages()
    optional(net[1])
    return net


UNITS = ModuleWrapPolicy({Block, Stage, nn.Sequential})
MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: Net(4),
    "unequal blocks": unequal_blocks,
    "stages": stages,
    "frozen in the middle": frozen_in_the_middle,
    "optional blocks": optional_blocks,
    "optional stages": optional_stages,
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "use_orig_params": True},
    {"backward_prefetch": None, "mixed_precision": BF16},
    {"forward_prefetch": True, "backward_prefetch": None, "use_orig_params": True, "mixed_precision": BF16},
    {"auto_wrap_policy": None, "use_orig_params": True},
]


def wrap(build: Callable[[], nn.Module], strategy: str, settings: dict[str, Any]) -> FSDP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy_of = ShardingStrategy[strategy]
        return FSDP(build(), device_id=device(), sharding_strategy=strategy_of, **settings)


def step(model: FSDP) -> None:
    model(torch.ones(2, WIDTH)).float().sum().backward()


def measured_peak(model: FSDP, held_before: int) -> int:
    """Return the peak of the second step. The first step has no recorded order for prefetching."""
    step(model)
    _C.peak_unsharded_nbytes(reset=True)
    step(model)
    return _C.peak_unsharded_nbytes() - held_before


MEASURED = [
    *((name, "FULL_SHARD") for name in MODELS),
    ("stages", "SHARD_GRAD_OP"),
    ("stages", "NO_SHARD"),
    ("unequal blocks", "SHARD_GRAD_OP"),
    ("blocks", "NO_SHARD"),
    ("optional blocks", "SHARD_GRAD_OP"),
]


@pytest.mark.parametrize(("name", "strategy"), MEASURED)
@on_ranks(2)
def test_the_estimated_peak_is_near_what_a_step_holds(name: str, strategy: str) -> None:
    build, held_before = MODELS[name], settled_nbytes()
    for settings in SETTINGS:
        settings = {"auto_wrap_policy": UNITS} | settings
        if "frozen" in name and not settings.get("use_orig_params") and not settings["auto_wrap_policy"]:
            continue
        model = wrap(build, strategy, settings)
        told, held = summary(model), measured_peak(model, held_before)
        error = 0.2 if "stages" in name else 0.1
        assert abs(told.peak_unsharded_nbytes - held) <= error * held, (settings, held, str(told))
        flat_params = [unit._flat_param for unit in FSDP.fsdp_modules(model) if unit._has_params]
        assert sum(flat_param.nbytes for flat_param in flat_params) == told.sharded_nbytes


@all_strategies
@on_ranks(2)
def test_a_step_sends_what_the_summary_tells(strategy: str) -> None:
    settings = {"auto_wrap_policy": UNITS, "mixed_precision": BF16, "use_orig_params": True}
    model = wrap(stages, strategy, settings)
    told = summary(model)
    step(model)
    with calls() as seen:
        step(model)
    kinds = ("AG", "RS", "AR")
    gathered, scattered, reduced = ([numel for kind, numel in seen if kind == one] for one in kinds)
    assert {2 * numel for numel in gathered} == {unit.all_gather_nbytes for unit in told.units} - {0}
    assert 4 * sum(scattered) == sum(unit.reduce_scatter_nbytes for unit in told.units)
    assert 4 * sum(reduced) == sum(unit.all_reduce_nbytes for unit in told.units)
