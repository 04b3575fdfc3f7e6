"""Setup for all programs on the simulated GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests import simulated_gpu


@pytest.fixture(autouse=True)
def needs_the_simulated_gpu() -> None:
    if not simulated_gpu.is_on():
        pytest.skip("needs the simulated GPU: python -m tests.simulated_gpu")


@pytest.fixture
def one_of_four_ranks() -> Iterator[None]:
    """Make this process one of four simulated ranks. Work on the device is finished after each test."""
    from tests.races.programs import one_of_four

    with one_of_four():
        yield
        gc.collect()
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
            torch.cuda.set_stream(torch.cuda.default_stream(index))
        torch.cuda.set_device(0)
