"""Gradients that backwards under no_sync accumulate are freed as a synchronised backward reduces their units."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import both_views, device, on_ranks
from tests.training import wrap


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@both_views
@on_ranks(2)
def test_gradients_of_no_sync_are_freed_as_units_are_reduced(
    rank: int, use_orig_params: bool, low: bool
) -> None:
    """They are freed during the backward. Tensors that the user keeps stay valid."""
    torch.manual_seed(0)
    model = wrap(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if low else None,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    first, second = model[0], model[2]
    x = torch.randn(4, 3, generator=torch.Generator(device()).manual_seed(rank))
    with model.no_sync():
        model(x).square().sum().backward()
    kept = [param.grad for param in first.parameters()]
    values = [grad.clone() for grad in kept]
    parts = [StorageWeakRef(param.grad.untyped_storage()) for param in second.parameters()]
    shown, expired = [], []

    def look(grad: Tensor) -> None:
        shown.extend(param.grad for param in second.parameters())
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
