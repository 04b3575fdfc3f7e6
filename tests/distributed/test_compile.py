"""torch.compile around, inside and in place of the modules of units: eager results, without repeated
recompilation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.ranks import on_ranks

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def model(where):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4)]
    if where == "inside":
        layers = [
            FSDP(compiled(one), use_orig_params=True) if isinstance(one, Block) else one for one in layers
        ]
        return FSDP(nn.Sequential(*layers), use_orig_params=True)
    if where == "in place":
        for one in layers:
            one.compile(backend="aot_eager")
    return FSDP(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def losses(where, rank):
    torch._dynamo.reset()
    wrapped = model(where)
    called = compiled(wrapped) if where == "outside" else wrapped
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(STEPS):
        loss = called(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("where", ["outside", "inside", "in place"])
@on_ranks(2)
def test_compiled_training_equals_eager_and_compiles_once(rank, where):
    eager = losses("eager", rank)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    assert losses(where, rank) == eager
    # blocks share their code; layers around them may add a graph each, but steps add none
    assert 1 <= graphs["unique_graphs"] - before <= 3
