"""python -m fsdp_c selftest on a GPU."""

from __future__ import annotations

import pytest

from tests.processes import output_of_python


@pytest.mark.slow
def test_selftest_passes_on_a_gpu() -> None:
    said = output_of_python("-m", "fsdp_c", "selftest", "--width", "8", OMP_NUM_THREADS="1")
    assert "streams: kernels run on the current stream" in said
