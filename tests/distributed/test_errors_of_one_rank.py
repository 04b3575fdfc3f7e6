"""A check that can fail on a single rank runs before the collective, and its error names the rank.

Only the last rank makes the mistake and calls the runtime. If it sent anything before the error, later
collectives of the two ranks would not pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.training import batch, wrap


def build(**arguments: Any) -> Any:
    torch.manual_seed(5)
    return wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))), **arguments)


def held(model: nn.Module) -> nn.Parameter:
    return next(param for param in model.parameters() if param.numel())


def data_of_another_shape(model: FSDP) -> None:
    held(model).data = torch.zeros(2, 2)


def data_where_nothing_is_held(model: FSDP) -> None:
    for param in model.parameters():
        if param.numel() == 0:
            param.data = torch.zeros(3)


def sparse_gradient(model: FSDP) -> None:
    param = held(model)
    param.grad = torch.zeros_like(param).to_sparse()


def flat_data_of_another_shape(model: FSDP) -> None:
    model._flat_param.data = torch.zeros(3)


def summon_in_summon(model: FSDP) -> None:
    model._unit.set_summoning(True)  # busy, without the collectives that normally lead there
    with FSDP.summon_full_params(model):
        pass


def clip_in_summon(model: FSDP) -> None:
    model._unit.set_summoning(True)
    model.clip_grad_norm_(1.0)


WRONG: dict[str, tuple[Callable[[FSDP], None], type[Exception], dict[str, Any]]] = {
    "data_of_another_shape": (data_of_another_shape, RuntimeError, {}),
    "data_where_nothing_is_held": (data_where_nothing_is_held, RuntimeError, {}),
    "sparse_gradient": (sparse_gradient, RuntimeError, {}),
    "flat_data_of_another_shape": (flat_data_of_another_shape, RuntimeError, {"use_orig_params": False}),
    "summon_in_summon": (summon_in_summon, AssertionError, {}),
    "clip_in_summon": (clip_in_summon, ValueError, {}),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_ranks(2)
def test_error_is_raised_before_the_collective_and_names_the_rank(
    rank: int, world_size: int, wrong: str
) -> None:
    act, kind, arguments = WRONG[wrong]
    model = build(**arguments)
    with torch.no_grad():
        expected = model(batch(rank))
    if rank == world_size - 1:
        with pytest.raises(kind, match=f"rank {rank}"):
            act(model)
            model(batch(rank))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))
    with torch.no_grad():  # a separate model, as the wrong one keeps its changes
        assert torch.equal(build(**arguments)(batch(rank)), expected)
