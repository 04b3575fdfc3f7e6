"""Tests of the simulated GPU itself. Processes without it skip these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import simulated_gpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not simulated_gpu.is_on():
            item.add_marker(pytest.mark.skip(reason="needs the simulated GPU: python -m tests.simulated_gpu"))
