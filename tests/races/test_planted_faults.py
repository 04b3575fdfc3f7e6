"""Planted faults of order, memory and devices. The simulated GPU must detect each."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_c import operator_kernels
from tests.models import WIDTH
from tests.races.scenarios import Trainer
from tests.simulated_gpu import races

pytestmark = pytest.mark.usefixtures("one_of_four_ranks")


def step(trainer: Any) -> None:
    trainer.forward().backward()


def test_early_free_of_memory_read_by_another_stream_is_found() -> None:
    """The detector also reports early frees of memory that is never reused, as sizes differ."""
    aside = torch.cuda.Stream()
    with pytest.raises(AssertionError, match="early free"), races.none_found():
        held = torch.ones(1000)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            held.sum()
        del held


def test_early_free_is_reported_when_the_owning_stream_allocates() -> None:
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        held = torch.ones(1000)
    torch.cuda.current_stream().wait_stream(aside)
    held.sum()
    del held
    with races.none_found():
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            held = torch.ones(10)
    held.sum()
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        held = torch.ones(1000)
    torch.cuda.current_stream().wait_stream(aside)
    with pytest.raises(AssertionError, match="early free"), races.none_found():
        held.sum()
        del held
        with torch.cuda.stream(aside):
            torch.ones(10)


@pytest.mark.parametrize("in_order", [False, True])
def test_reshard_while_another_stream_reads_the_parameters_is_found(in_order: bool) -> None:
    def read_aside(module: Any, *_: Any) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside), torch.no_grad():
            for param in module.parameters():
                param.sum()
        if in_order:
            torch.cuda.current_stream().wait_stream(aside)

    aside = torch.cuda.Stream()
    trainer = Trainer(0, limit_all_gathers=False)
    trainer.model.module.blocks[0].module.register_forward_hook(read_aside)
    found = contextlib.nullcontext() if in_order else pytest.raises(AssertionError, match="race")
    with found, races.none_found():
        for _ in range(2):
            step(trainer)


def test_a_gpu_that_the_kernels_have_no_code_for_runs_operators_of_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = ctypes.CDLL(os.environ["FSDP_C_CUDA_KERNELS"])
    expected, trainer = Trainer(0), Trainer(0)
    torch.manual_seed(5)
    step(expected)
    torch.manual_seed(5)
    kernels.simulated_gpu_without_code(0)
    operator_kernels.warn_if_used.cache_clear()
    try:
        with races.none_found():
            step(trainer)
    finally:
        kernels.simulated_gpu_without_code(-1)
    assert "on cuda torch's operators replace" in caplog.text and "no code for this GPU" in caplog.text
    for param, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert param.numel() == 0 or torch.equal(param.grad, other.grad)


def step_on_the_device_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps on a stream of the model's device while a different device is current."""
    model = torch.device("cuda", 1)
    monkeypatch.setattr("tests.races.scenarios.device", lambda: model)
    with model:
        trainer = Trainer(0)
    aside = torch.cuda.Stream(model)
    aside.wait_stream(torch.cuda.default_stream(model))
    with torch.cuda.stream(aside), torch.cuda.device(0):
        for _ in range(2):
            trainer.model(torch.ones(3, WIDTH, device=model)).square().mean().backward()


def test_work_for_the_stream_of_the_wrong_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsdp_c queries the current stream of the model's device and gets a stream of the other one."""
    wrong = torch.cuda.Stream(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: wrong)
    with pytest.raises((AssertionError, RuntimeError), match="race|device"), races.none_found():
        step_on_the_device_that_is_not_current(monkeypatch)


def test_a_model_on_a_device_that_is_not_the_current_one_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with races.none_found():
        step_on_the_device_that_is_not_current(monkeypatch)
    assert torch.cuda.current_device() == 0


def test_a_copy_to_pinned_memory_that_is_read_at_once_is_found() -> None:
    there: Tensor = torch.ones(8, device="cuda")
    here = torch.empty(8, device="cpu", pin_memory=True)
    with pytest.raises(AssertionError, match="copy_ to the host writes"), races.none_found():
        here.copy_(there, non_blocking=True)
        assert here.sum() == 8
