"""Changes to a caller's containers by a wrapped module are visible as with the installed torch's FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_c
from tests.ranks import device, on_ranks

PRECISIONS = {"fp32": None, "bf16": fsdp_c.MixedPrecision(torch.bfloat16)}


class Greedy(nn.Module):
    """Removes labels from its batch, and appends to lists."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(
        self, batch: dict[str, Any], filled: list[Any], empty: list[Any], nested: tuple[Any, ...]
    ) -> Tensor:
        batch.pop("labels")
        for one in (filled, empty, nested[0], nested[1]["inner"]):
            one.append("seen")
        return self.linear(batch["x"])


def left_by(implementation: Any, precision: str) -> list[Any]:
    torch.manual_seed(0)
    model = implementation(Greedy(), device_id=device(), mixed_precision=PRECISIONS[precision])
    batch = {"x": torch.ones(2, 3), "labels": torch.ones(2)}
    filled, empty, nested = [1], [], ([1], {"inner": [2]})
    model(batch, filled, empty=empty, nested=nested)
    return [sorted(batch), filled, empty, nested]


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2)
def test_changes_to_the_callers_containers_equal_torchs(precision: str) -> None:
    assert left_by(fsdp_c.FullyShardedDataParallel, precision) == left_by(TorchFSDP, precision)
