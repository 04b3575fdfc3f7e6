"""The garbage collector may find a dropped model inside any call of C that allocates. A failure ends the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.ranks import both_views

WIDTH = 4
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def collector_is_off() -> Iterator[None]:
    """Garbage of a test stays young, so that the first collection finds it. A test enables the collector."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


class WithoutOutputs(nn.Module):
    """A module that returns nothing, so that no hook of an output keeps its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: list[Tensor]) -> None:
        kept.append(self.layer(x))


def live_objects() -> int:
    return sum(issubclass(type(found), (_C.Unit, _C.Runtime, _C.Handle)) for found in gc.get_objects())


def collect_later(allocations: int) -> None:
    """Let the collector run once this number of containers was allocated."""
    count = gc.get_count()[0]
    gc.enable()
    gc.set_threshold(max(count + allocations, 1), 10_000, 10_000)


class Hooked(nn.Linear):
    """A layer whose output has a hook with an object that ``held`` refers to."""

    held: weakref.ref[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        output, kept = super().forward(x), nn.Module()
        output.register_hook(lambda _, kept=kept: None)
        self.held = weakref.ref(kept)
        return output


@both_views
def test_the_graph_of_a_first_forward_without_backward_ends_with_its_output(use_orig_params: bool) -> None:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    inner = FSDP(nn.Linear(WIDTH, WIDTH), **options)
    hooked = Hooked(WIDTH, WIDTH)
    model = FSDP(nn.Sequential(hooked, inner), **options)
    model(torch.ones(2, WIDTH))
    assert hooked.held() is None


@both_views
def test_a_model_may_be_collected_during_its_backward(
    use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of a profiler run Python in the unit's hooks, before anything else refers to the unit."""
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    ends = set()
    for allocations in range(-2, 16):
        gc.disable()
        gc.collect()
        kept: list[Tensor] = []
        model: Any = FSDP(WithoutOutputs(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        model(torch.ones(2, WIDTH), kept)
        del model
        output = kept.pop()
        output.register_hook(lambda _, count=allocations: collect_later(count))
        loss = output.sum()
        del output
        try:
            loss.backward()
            ends.add("ran")
        except RuntimeError as error:
            assert "backward through a FullyShardedDataParallel that was freed" in str(error)
            ends.add("refused")
    assert ends == {"ran", "refused"}


def test_a_handle_may_be_collected_while_a_gradient_of_its_parameters_is_cleared() -> None:
    model: Any = FSDP(nn.Linear(WIDTH, WIDTH), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    params = list(model.parameters())
    del model
    assert live_objects()
    collect_later(-1_000_000)
    params[-1].grad = None  # the end of the last exposed gradient is a callback of C
    gc.disable()
    gc.collect()
    assert not live_objects()
    assert params[0].grad is not None
