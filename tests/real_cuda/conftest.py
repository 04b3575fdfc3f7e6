"""Tests of torch's CUDA build without a real GPU. Processes without it skip these tests."""

from __future__ import annotations

import pytest

from tests import real_cuda


@pytest.fixture(autouse=True)
def needs_the_cuda_build() -> None:
    if not real_cuda.is_on():
        pytest.skip("this process has no CUDA build of torch: make test-cuda-build")
