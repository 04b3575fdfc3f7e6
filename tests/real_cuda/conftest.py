"""Tests of torch's CUDA build without a real GPU. Processes without it skip these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import real_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not real_cuda.is_on():
            item.add_marker(
                pytest.mark.skip(reason="this process has no CUDA build of torch: make test-cuda-build")
            )
