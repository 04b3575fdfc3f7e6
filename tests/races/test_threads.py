"""On a GPU autograd's own thread frees a backward that raised, at any later time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.races.scenarios import Trainer, raising_in

pytestmark = pytest.mark.usefixtures("one_of_four_ranks")


def test_a_forward_waits_while_the_backward_before_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage freed by autograd's thread lets the script run meanwhile."""
    resize, slow = torch.UntypedStorage.resize_, []

    def resize_slowly(storage: Any, nbytes: int) -> Any:
        if not nbytes and threading.current_thread() is not threading.main_thread():
            slow.append(nbytes)
            time.sleep(0.02)
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_slowly)
    trainer = Trainer(0)
    for _ in range(5):
        with raising_in(trainer.model.module.blocks[0], "register_full_backward_hook"):
            trainer.forward().backward()
        trainer.step()
    assert slow
