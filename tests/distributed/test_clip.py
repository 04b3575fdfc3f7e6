"""clip_grad_norm_: norms and clipped gradients bitwise equal to torch's FSDP1, and the cases where torch is
wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.models import Net
from tests.parity.engine import Point, Run, Scenario, compare
from tests.parity.scenarios import PER_BLOCK, per_block
from tests.ranks import all_strategies, both_views, on_ranks
from tests.training import plain, wrap

# The coefficient of the first is 1. Each of the others clips what the one before has left.
NORMS = (
    (1e6, 2.0),
    (0.01, math.inf),
    (0.005, "inf"),
    (0.005, 3.0),
    (0.005, 2.0),
    (0.005, 1.5),
    (0.005, 1.0),
    (0.005, 0.5),
)


def clip_step(run: Run) -> None:
    run.forward_backward()
    for max_norm, norm_type in NORMS:
        norm = run.model.clip_grad_norm_(max_norm, norm_type)
        run.record(f"norm {norm_type!r} above {max_norm}", norm)
        run.record_grads(f"after norm {norm_type!r} above {max_norm}")
        if run.step == 1:
            assert (norm > max_norm) == (max_norm < 1)
    run.optimizer_step()


@all_strategies
@both_views
@on_ranks(2)
def test_norms_and_clipped_gradients_equal_torchs(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    point = Point("clip", strategy, use_orig_params)
    compare(point, Scenario(per_block(tied=True, tied_head=True), clip_step), rank, world_size)


@both_views
@on_ranks(2)
def test_unmanaged_gradients_count_once_as_torchs(rank: int, world_size: int, use_orig_params: bool) -> None:
    def build(run: Run) -> nn.Module:
        module = Net()
        ignored = [module.inp.bias, module.blocks[0].norm.weight]
        return run.wrap(module, auto_wrap_policy=PER_BLOCK, ignored_states=ignored)

    compare(Point("unmanaged", "FULL_SHARD", use_orig_params), Scenario(build, clip_step), rank, world_size)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_low_precision_gradients_equal_torchs(rank: int, world_size: int, strategy: str) -> None:
    point = Point("low", strategy, use_orig_params=False, precision="keep_low")
    compare(point, Scenario(per_block(), clip_step), rank, world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@on_ranks(2)
def test_rank_without_gradients_warns_and_returns_fp32(rank: int, dtype: torch.dtype) -> None:
    model = wrap(plain().to(dtype))
    with pytest.warns(UserWarning, match=f"rank {rank} with no gradients"):
        norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float32 and norm.item() == 0.0
