"""Accumulation under no_sync, where a later synchronised backward does not pass through every unit."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import both_views, device, on_ranks


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


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@both_views
@on_ranks(2)
def test_what_no_sync_left_goes_as_units_are_reduced(rank: int, use_orig_params: bool, low: bool) -> None:
    """Amid the backward already. What the user has kept of it stays."""
    from fsdp_c import FullyShardedDataParallel
    from fsdp_c.wrap import ModuleWrapPolicy

    mixed = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=False) if low else None
    model = FullyShardedDataParallel(
        plain(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        mixed_precision=mixed,
    )
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
    assert expired == [low] * len(parts)  # else it is what is being reduced
    assert all(part.expired() for part in parts)
    assert [grad.shape for grad in kept] == [value.shape for value in values]
    assert all(grad.isfinite().all() for grad in kept)
    assert all(param.grad is not None for param in model.parameters() if param.numel())
