"""TORCH_DISTRIBUTED_DEBUG=INFO: what the runtime says it does, where torch says it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.training import debug_level, sharded

BOTH = ("torch", "fsdp_c")
X = torch.ones(3, WIDTH)


def build(which: str, level: dist.DebugLevel = dist.DebugLevel.INFO, **arguments: Any) -> Any:
    with debug_level(level):
        return sharded(which, **arguments)


def said(record: list[warnings.WarningMessage], text: str) -> list[str]:
    return [message for one in record if text in (message := str(one.message))]


def held(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.numel()]


@on_ranks(2)
def test_parameters_and_gradients_taken_over_are_warned_of(rank: int) -> None:
    """One warning per parameter or gradient, and none without the level."""
    counts = {}
    for which in BOTH:
        for level in (dist.DebugLevel.INFO, dist.DebugLevel.OFF):
            model = build(which, level)
            model(X).sum().backward()
            held(model)[0].data = torch.zeros_like(held(model)[0])
            held(model)[1].grad = torch.zeros_like(held(model)[1])
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                with torch.no_grad():
                    model(X)
            found = said(record, "needs writeback")
            counts[which, level.name] = sorted(text.split()[2] for text in found)
            assert all(f"[Rank {rank}]" in text for text in found)
    wanted = {"INFO": ["Gradient", "Parameter"], "OFF": []}
    assert counts == {(which, level): kinds for which in BOTH for level, kinds in wanted.items()}
