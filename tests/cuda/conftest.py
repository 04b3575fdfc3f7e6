"""Tests of this folder need a GPU, real or simulated (docs/testing.md). Elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp_c
from tests import real_cuda
from tests.simulated_gpu import races


def missing() -> str | None:
    built = Path(fsdp_c.__file__).parent / f"_cuda{(torch.version.cuda or '').partition('.')[0]}.so"
    kernels = os.environ.get("FSDP_C_CUDA_KERNELS") or built
    if not torch.cuda.is_available():
        return "torch finds no GPU here; python -m tests.simulated_gpu simulates one"
    if not Path(kernels).exists():
        return "fsdp_c was built without its CUDA kernels (FSDP_C_CUDA=1 demands them)"
    return None


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Fail tests that leave a race. Rank processes check for races themselves, in tests/ranks.py."""
    reason = missing()
    assert reason is None or not real_cuda.is_on(), reason
    if reason is not None:
        pytest.skip(reason)
    with races.none_found():
        yield
