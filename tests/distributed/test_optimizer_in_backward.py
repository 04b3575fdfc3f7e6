"""_apply_optimizer_in_backward: steps at each reduction, bit for bit as with torch's FSDP1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.distributed.test_use_orig_params import backward, named
from tests.ranks import STRATEGIES, all_strategies, device, on_ranks
from tests.training import assert_same, batch, sharded


class Trace(dict[str, Any]):
    """The record of a run of one implementation, by moment."""

    def record(self, moment: str, model: nn.Module) -> None:
        for name, param in named(model).items():
            self[f"{moment} {name}"] = param.detach().clone()
            self[f"{moment} {name} grad"] = None if param.grad is None else param.grad.clone()


def compare(rank: int, body: Callable[[Any, Trace, int], None], strategy: str, **arguments: Any) -> Trace:
    """Run the body on torch's FSDP1 and on fsdp_c, require equal records, return fsdp_c's."""
    traces = {which: Trace() for which in ("torch", "fsdp_c")}
    for which, trace in traces.items():
        body(sharded(which, strategy, **arguments), trace, rank)
    assert_same(traces["torch"], traces["fsdp_c"])
    return traces["fsdp_c"]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_steps_equal_torchs(rank: int, strategy: str) -> None:
    def body(model: Any, trace: Trace, rank: int) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05, "momentum": 0.9})
        for step in range(4):
            backward(model, step, rank)
            trace.record(f"step {step}", model)

    mesh = init_device_mesh(device().type, (2, 2)) if "HYBRID" in strategy else None
    trace = compare(rank, body, strategy, device_mesh=mesh)
    assert all(value is None for moment, value in trace.items() if moment.endswith("grad"))


@all_strategies
@on_ranks(2)
def test_steps_at_each_reduction_equal_torchs(rank: int, strategy: str) -> None:
    """The second recomputation of a unit sees its first step."""

    def body(model: Any, trace: Trace, rank: int) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        for step in range(2):
            outputs = [model(batch(rank, 2 * step + each).requires_grad_()) for each in range(2)]
            sum(outputs).square().mean().backward()
            trace.record(f"step {step}", model)

    compare(rank, body, strategy, net={"around": "reentrant"})


@on_ranks(2)
def test_gradients_that_come_after_the_units_own_are_used(rank: int) -> None:
    """The loss has a term of the parameters themselves."""
    models = [sharded("fsdp_c") for _ in range(2)]
    _apply_optimizer_in_backward(torch.optim.SGD, models[0].parameters(), {"lr": 0.05})
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for step in range(2):
        for model in models:
            term = sum(param.sum() for param in model.parameters())
            (model(batch(rank, step)).square().mean() + term).backward()
        assert all(param.grad is None for param in models[0].parameters())
        optimizer.step()
        optimizer.zero_grad()
    inside, after = map(named, models)
    for name, param in after.items():  # added in another order
        torch.testing.assert_close(inside[name], param)


@on_ranks(2)
def test_a_step_waits_for_the_synced_backward(rank: int) -> None:
    model = sharded("fsdp_c")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    before = {name: param.detach().clone() for name, param in named(model).items()}
    with model.no_sync():
        backward(model, 0, rank)
    assert all(torch.equal(before[name], param) for name, param in named(model).items())
    backward(model, 1, rank)
    assert not all(torch.equal(before[name], param) for name, param in named(model).items())


@all_strategies
@on_ranks(2)
def test_an_optimizer_of_several_parameters_steps_once(rank: int, strategy: str) -> None:
    steps_taken: dict[int, int] = {}

    class Counting(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> None:
            steps_taken[id(self)] = steps_taken.get(id(self), 0) + 1
            super().step(*args, **kwargs)

    def body(model: Any, trace: Trace, rank: int) -> None:
        steps_taken.clear()
        for unit in (model.module.blocks[0], model.module.blocks[1]):
            optimizer = Counting(unit.parameters(), lr=0.05)
            for param in unit.parameters():
                param._in_backward_optimizers = [optimizer]
        for step in range(2):
            backward(model, step, rank)
            trace.record(f"step {step}", model)
        assert set(steps_taken.values()) == {2}

    compare(rank, body, strategy)


@on_ranks(2)
def test_offloaded_parameters_are_stepped(rank: int) -> None:
    models = [sharded("fsdp_c", cpu_offload=CPUOffload(offload)) for offload in (False, True)]
    for model in models:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        for step in range(2):
            backward(model, step, rank)
    plain, offloaded = map(named, models)
    assert_same(plain, offloaded)
    assert all(param.grad is None for param in offloaded.values())
