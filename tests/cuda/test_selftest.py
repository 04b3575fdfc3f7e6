"""python -m fsdp_c selftest on a GPU, with fsdp_c's kernels and with torch's operators."""

from __future__ import annotations

import pytest

from tests.processes import output_of_python


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["", "torch"], ids=["kernels", "operators"])
def test_selftest_passes_on_a_gpu(kernels: str) -> None:
    settings = {"FSDP_C_KERNELS": kernels, "OMP_NUM_THREADS": "1"}
    said = output_of_python("-m", "fsdp_c", "selftest", "--width", "8", **settings)
    assert "streams: kernels run on the current stream" in said
