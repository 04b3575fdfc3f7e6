"""pytorch_optimizer: SOAP and Shampoo on shards through WholeParameters. Their factors are those of whole
matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_leaves

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.optim import WholeParameters
from tests.clients.support import require
from tests.ranks import device, on_ranks

require("pytorch_optimizer")

LIBRARY = "pytorch_optimizer"
WIDTH = 12


def optimizer_of(kind: str) -> Callable[..., torch.optim.Optimizer]:
    import pytorch_optimizer

    if kind == "SOAP":
        return lambda params: pytorch_optimizer.SOAP(params, lr=0.01, precondition_frequency=2)
    return lambda params: pytorch_optimizer.Shampoo(
        params, lr=0.01, momentum=0.5, preconditioning_compute_steps=2
    )


def plain_model() -> nn.Module:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH))


def wrapped(plain: nn.Module, policy: ModuleWrapPolicy | None) -> Any:
    return FSDP(copy.deepcopy(plain), auto_wrap_policy=policy, use_orig_params=True, device_id=device())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with the same batch on all ranks, so that gradients are bitwise those of a single rank."""
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator(device()).manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_values(model: Any, plain: nn.Module) -> None:
    with type(model).summon_full_params(model):
        for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", ["SOAP", "Shampoo"])
@on_ranks(2)
def test_factors_are_those_of_the_plain_model_and_resume(kind: str, tmp_path: Path) -> None:
    make = optimizer_of(kind)
    plain = plain_model()
    model = wrapped(plain, ModuleWrapPolicy({nn.Sequential}))
    expected = make(list(plain.parameters()))
    optimizer = WholeParameters(model, lambda named: make([param for _, param in named]))
    train(plain, expected, range(5))
    train(model, optimizer, range(5))
    same_values(model, plain)

    saved = FSDP.optim_state_dict(model, optimizer)
    for name, param in plain.named_parameters():
        assert set(saved["state"][name]) == set(expected.state[param])
        for key, value in expected.state[param].items():
            pairs = zip(tree_leaves(saved["state"][name][key]), tree_leaves(value), strict=True)
            assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs), (name, key)

    checkpoint.save(model, optimizer, tmp_path / "checkpoint")
    other = wrapped(plain_model(), None)
    resumed = WholeParameters(other, lambda named: make([param for _, param in named]))
    checkpoint.load(other, resumed, tmp_path / "checkpoint")
    train(plain, expected, range(5, 8))
    train(other, resumed, range(5, 8))
    same_values(other, plain)
