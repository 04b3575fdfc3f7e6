"""torch.compile around, inside and in place of the modules of units: eager results, without repeated
recompilation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.training import PER_BLOCK, batch, plain, wrap

STEPS = 4


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def model(where):
    net = plain(blocks=2)
    if where == "inside":
        net.blocks = nn.ModuleList(wrap(compiled(block)) for block in net.blocks)
    if where == "in place":
        for one in (net.inp, *net.blocks, net.head):
            one.compile(backend="aot_eager")
    return wrap(net, auto_wrap_policy=None if where == "inside" else PER_BLOCK)


def losses(where, rank):
    torch._dynamo.reset()
    wrapped = model(where)
    called = compiled(wrapped) if where == "outside" else wrapped
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        loss = called(batch(rank, step)).square().mean()
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
