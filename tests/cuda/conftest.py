"""Everything here needs a GPU, and torch and fsdp_c with CUDA; elsewhere it is skipped, and says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdp_c

HERE = Path(__file__).parent


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if not (Path(fsdp_c.__file__).parent / "_cuda.so").exists():
        return "fsdp_c was built without its CUDA kernels (FSDP_C_CUDA=1 demands them)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
