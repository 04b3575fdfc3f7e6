"""Large pages for large tensors: an advice to the system, given for whole pages only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fsdp_c import _C

MAPS = Path("/proc/self/smaps")
SUPPORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE_PAGE_NBYTES = 2 * 2**20

pytestmark = pytest.mark.skipif(
    not (MAPS.exists() and SUPPORT.exists()), reason="the system has no such pages"
)


def wants_large_pages(address: int) -> bool:
    """Return True if the mapping that contains ``address`` was advised to use large pages."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", MAPS.read_text())[1:]:
        start, end = (int(one, 16) for one in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return " hg" in mapping.rpartition("VmFlags:")[2]
    raise AssertionError(f"{address:#x} is not mapped")


def test_pages_inside_a_large_tensor_are_asked_for_and_no_others() -> None:
    tensor = torch.empty(48 * 2**20, dtype=torch.uint8).view(torch.float32)
    middle, last = tensor.data_ptr() + tensor.nbytes // 2, tensor.data_ptr() + tensor.nbytes - 1
    _C.prefer_large_pages(tensor[tensor.numel() // 2 :][: 2**18])  # too small
    assert not wants_large_pages(middle)
    _C.prefer_large_pages(tensor)
    assert wants_large_pages(middle)
    ends_with_a_page = (last + 1) % LARGE_PAGE_NBYTES == 0
    assert wants_large_pages(last) == ends_with_a_page
