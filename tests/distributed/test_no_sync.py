"""Accumulation under no_sync, where a later synchronised backward does not pass through every unit."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import wrap

PER_LAYER = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y) if both else y


def plain() -> Branches:
    torch.manual_seed(0)
    return Branches()


def backward(model: nn.Module, rank: int, seed: int, both: bool) -> None:
    x = torch.randn(4, 3, generator=torch.Generator(device()).manual_seed(10 * seed + rank))
    model(x, both).square().sum().backward()


@both_views
@all_strategies
@on_ranks(2)
def test_a_unit_that_the_synchronised_backward_skips_is_reduced(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    model, reference = wrap(plain(), strategy=strategy, use_orig_params=use_orig_params, **PER_LAYER), plain()
    with model.no_sync():
        backward(model, rank, 1, True)
    backward(model, rank, 2, False)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for each in range(world_size):
        backward(reference, each, 1, True)
        backward(reference, each, 2, False)
    torch.optim.SGD(reference.parameters(), lr=1.0 / world_size).step()
    with model.summon_full_params(model):
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.view_as(expected), expected)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@both_views
@on_ranks(2)
def test_gradients_of_no_sync_are_freed_as_units_are_reduced(
    rank: int, use_orig_params: bool, low: bool
) -> None:
    """They are freed during the backward. Tensors that the user keeps stay valid."""
    mixed = MixedPrecision(torch.bfloat16, torch.float32) if low else None
    model = wrap(plain(), use_orig_params=use_orig_params, mixed_precision=mixed, **PER_LAYER)
    with model.no_sync():
        backward(model, rank, 1, True)
    kept = [param.grad for param in model.first.parameters()]
    values = [grad.clone() for grad in kept]
    parts = [StorageWeakRef(param.grad.untyped_storage()) for param in model.second.parameters()]
    shown, expired = [], []

    def look(grad: Tensor) -> None:
        shown.extend(param.grad for param in model.second.parameters())
        expired.extend(part.expired() for part in parts)

    x = torch.randn(4, 3, requires_grad=True)
    x.register_hook(look)
    model(x).square().sum().backward()
    assert shown == [None] * len(parts)
    assert expired == [low] * len(parts)  # in fp32 the reduction still reads them
    assert all(part.expired() for part in parts)
    assert [grad.shape for grad in kept] == [value.shape for value in values]
    assert all(grad.isfinite().all() for grad in kept)
    assert all(param.grad is not None for param in model.parameters() if param.numel())
