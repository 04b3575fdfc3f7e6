"""FSDP_USE_FAKE_ALL_GATHER and FSDP_USE_FAKE_REDUCE measure a step without its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tests.collectives import ALL_GATHER, REDUCE_SCATTER
from tests.ranks import device, on_ranks
from tests.training import wrap

GATHER, REDUCE = "FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE"
COLLECTIVES = {"gather": ALL_GATHER, "scatter": REDUCE_SCATTER, "reduce": "all_reduce"}


def linear(strategy: str = "FULL_SHARD", gather: str = "1", reduce: str = "1", **arguments: Any) -> Any:
    with mock.patch.dict("os.environ", {GATHER: gather, REDUCE: reduce}):
        return wrap(nn.Linear(3, 2), strategy=strategy, use_orig_params=False, **arguments)


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()


def fakes(run: Callable[[], None]) -> dict[str, list[bool]]:
    """Return for each kind of collective in ``run`` whether each call uses a fake group."""
    calls: dict[str, list[bool]] = {}

    def recorder(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            fake = isinstance(group, FakeProcessGroup)
            calls.setdefault(kind, []).append(fake)
            return None if fake else original(*args, group=group, **kwargs)

        return record

    replaced = {name: recorder(kind, getattr(dist, name)) for kind, name in COLLECTIVES.items()}
    with mock.patch.multiple(dist, **replaced):
        run()
    return calls


@pytest.mark.parametrize("gather", ["1", "0"])
@pytest.mark.parametrize("reduce", ["1", "true"])
@on_ranks(2)
def test_only_the_value_one_at_construction_fakes_a_collective(gather: str, reduce: str) -> None:
    model = linear(gather=gather, reduce=reduce)
    assert fakes(lambda: backward(model)) == {"gather": [gather == "1"], "scatter": [reduce == "1"]}
    assert model._handle._use_fake_all_gather is (gather == "1")
    assert model._handle._use_fake_reduce is (reduce == "1")


@on_ranks(2)
def test_all_reduces_stay_real() -> None:
    mesh = DeviceMesh(device().type, torch.arange(2, device="cpu").view(2, 1))
    for model in (linear("NO_SHARD"), linear("HYBRID_SHARD", device_mesh=mesh)):
        assert fakes(lambda model=model: backward(model)) == {"reduce": [False]}


@on_ranks(2)
def test_a_fake_all_gather_repeats_the_local_shard() -> None:
    model = linear(reduce="0")
    with model.summon_full_params(model):
        first, second = torch.cat([model.module.weight.flatten(), model.module.bias]).chunk(2)
        assert torch.equal(first, second)
    backward(model)
