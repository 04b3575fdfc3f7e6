"""Helpers for tests on ranks: wrapped models, batches, and comparison of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models import WIDTH, Block, Net
from tests.parity.engine import implementation, same_bits
from tests.ranks import device

PER_BLOCK = ModuleWrapPolicy({Block})
FULL, SHARDED, LOCAL = (StateDictType[f"{kind}_STATE_DICT"] for kind in ("FULL", "SHARDED", "LOCAL"))


def wrap(module: nn.Module, which: str = "fsdp_c", strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    """Wrap ``module`` as a unit on this rank's device, by default with use_orig_params."""
    defaults = {
        "device_id": device(),
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    return implementation(which)(module, **(defaults | arguments))


def plain(**options: Any) -> Net:
    torch.manual_seed(5)
    return Net(**options)


def sharded(
    which: str = "fsdp_c", strategy: str = "FULL_SHARD", net: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """Wrap ``plain(**net)`` with a unit per block."""
    return wrap(plain(**(net or {})), which, strategy, **({"auto_wrap_policy": PER_BLOCK} | arguments))


def batch(rank: int, index: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Return inputs that are unique to the rank and index."""
    generator = torch.Generator(device()).manual_seed(10 * index + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, steps: int = 2) -> None:
    """Run training steps on random batches from ``seed``."""
    generator = torch.Generator(device()).manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(3, WIDTH, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def average_gradients(module: nn.Module) -> None:
    """Average the gradients of a plain module over the ranks."""
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def full_state(model: Any) -> dict[str, Tensor]:
    """Return a copy of the full state dict."""
    with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def debug_level(level: dist.DebugLevel) -> Iterator[None]:
    """Set TORCH_DISTRIBUTED_DEBUG for units built in the body."""
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Assert that both dicts have the same names, in any order, and bitwise equal values."""
    assert expected.keys() == actual.keys()
    different = [name for name in expected if not same_bits(expected[name], actual[name])]
    assert not different, different[:4]
