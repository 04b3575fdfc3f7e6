"""clip_grad_norm_: norms and clipped gradients bitwise equal to torch's FSDP1, and the cases where torch is
wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from tests.distributed.test_state_dict import plain, wrap
from tests.models import WIDTH
from tests.parity.engine import same_bits
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import assert_same


def backward(model: nn.Module, rank: int, scale: float = 10.0) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator(device()).manual_seed(rank))
    (model(x).float() * scale).square().mean().backward()


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def clip_with_both(build: Any, rank: int, *arguments: float) -> None:
    norms, clipped = [], []
    for which in ("torch", "fsdp_c"):
        model = build(which)
        backward(model, rank)
        before = grads(model)
        norms.append(model.clip_grad_norm_(*arguments))
        clipped.append(grads(model))
        assert before
    assert same_bits(*norms), norms
    assert norms[1].dim() == 0
    assert_same(*clipped)


@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [*((0.5, kind) for kind in (2.0, 1.0, 1.5, 3.0, math.inf, "inf")), (1e6, 2.0)]
)
@all_strategies
@both_views
@on_ranks(2)
def test_norm_and_clipped_gradients_equal_torchs(
    rank: int, strategy: str, use_orig_params: bool, max_norm: float, norm_type: float
) -> None:
    """The coefficient of a small norm is 1."""

    def build(which: str) -> nn.Module:
        return wrap(plain(), use_orig_params, which, sharding_strategy=strategy)

    clip_with_both(build, rank, max_norm, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@both_views
@on_ranks(2)
def test_unmanaged_gradients_count_once_as_torchs(rank: int, use_orig_params: bool, norm_type: float) -> None:
    def build(which: str) -> nn.Module:
        module = plain()
        return wrap(
            module, use_orig_params, which, ignored_states=[module.inp.bias, module.blocks[0].norm.weight]
        )

    clip_with_both(build, rank, 0.5, norm_type)


@both_views
@on_ranks(2)
def test_units_of_several_strategies_equal_torchs(rank: int, use_orig_params: bool) -> None:
    def build(which: str) -> nn.Module:
        module = plain()
        options = {"auto_wrap_policy": None}
        module.blocks[0] = wrap(
            module.blocks[0], use_orig_params, which, sharding_strategy="NO_SHARD", **options
        )
        module.blocks[1] = wrap(module.blocks[1], use_orig_params, which, **options)
        return wrap(module, use_orig_params, which, **options)

    clip_with_both(build, rank, 0.5)
    clip_with_both(build, rank, 0.5, math.inf)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_low_precision_gradients_equal_torchs(rank: int, strategy: str) -> None:
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)

    def build(which: str) -> nn.Module:
        return wrap(plain(), False, which, sharding_strategy=strategy, mixed_precision=precision)

    for norm_type in (2.0, 1.0, 0.5, math.inf):
        clip_with_both(build, rank, 0.5, norm_type)
    model = build("fsdp_c")
    backward(model, rank)
    assert model.clip_grad_norm_(0.5).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@on_ranks(2)
def test_rank_without_gradients_warns_and_returns_fp32(rank: int, dtype: torch.dtype) -> None:
    model = wrap(plain().to(dtype))
    with pytest.warns(UserWarning, match=f"rank {rank} with no gradients"):
        norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float32 and norm.item() == 0.0
