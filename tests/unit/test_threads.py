"""While one thread steps a model, access from another thread raises, and the step continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.collectives import fake_ranks
from tests.ranks import both_views

_group = fake_ranks(0, 2, scope="function")

CPU = torch.device("cpu")
STEPS = 3
LOOKS: dict[str, Callable[[FSDP], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of an inner unit": lambda model: model.module[0].state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}),
    "summon_full_params": lambda model: FSDP.summon_full_params(model).__enter__(),
}


def built(use_orig_params: bool) -> FSDP:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": use_orig_params}
    return FSDP(nn.Sequential(FSDP(nn.Linear(4, 4), **options), nn.Linear(4, 4)), **options)


def stepped(model: FSDP) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def raised_in_a_thread(function: Callable[[], Any]) -> list[str]:
    errors: list[str] = []

    def run() -> None:
        try:
            function()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@both_views
def test_a_look_from_another_thread_inside_a_step_is_refused_and_the_step_goes_on(
    use_orig_params: bool, phase: str, look: str
) -> None:
    expected = stepped(built(use_orig_params))
    model = built(use_orig_params)
    errors: list[str] = []
    layer = model.module[0].module
    register = layer.register_forward_hook if phase == "forward" else layer.register_full_backward_hook
    register(lambda *_: errors.extend(raised_in_a_thread(lambda: LOOKS[look](model))))
    assert stepped(model) == expected
    assert len(errors) == STEPS
    words = "rank 0, unit Sequential: another thread is inside a forward or backward of this model"
    assert all(words in error for error in errors)


class Saved(nn.Linear):
    """Calls ``meanwhile`` as it is saved."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.meanwhile()
        super()._save_to_state_dict(*args)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@both_views
def test_a_step_that_begins_while_another_thread_saves_is_refused(use_orig_params: bool, phase: str) -> None:
    def saved_built() -> FSDP:
        torch.manual_seed(0)
        return FSDP(Saved(4, 4), device_id=CPU, use_orig_params=use_orig_params)

    expected = stepped(saved_built())
    model = saved_built()
    loss = model(torch.ones(2, 4)).sum()
    errors: list[str] = []
    begin = loss.backward if phase == "backward" else lambda: model(torch.ones(2, 4))
    model.module.meanwhile = lambda: errors.extend(raised_in_a_thread(begin))
    values = model.state_dict()
    del model.module.meanwhile
    assert len(errors) == 1
    assert "rank 0, unit Saved: another thread is inside a state dict of this model, and" in errors[0]
    assert [value.shape for value in values.values()] == [(4, 4), (4,)]
    del loss
    model.zero_grad()
    assert stepped(model) == expected


def test_a_thread_that_trains_after_another_may_save() -> None:
    model = built(True)
    assert not raised_in_a_thread(lambda: stepped(model))
    assert len(model.state_dict()) == 4
    stepped(model)
