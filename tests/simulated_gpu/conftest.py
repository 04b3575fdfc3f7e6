"""Tests of the simulated GPU itself. Processes without it skip these tests."""

from __future__ import annotations

import pytest

from tests import simulated_gpu


@pytest.fixture(autouse=True)
def needs_the_simulated_gpu() -> None:
    if not simulated_gpu.is_on():
        pytest.skip("needs the simulated GPU: python -m tests.simulated_gpu")
