"""python -m fsdp_c selftest on these devices, with fsdp_c's kernels and with torch's operators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("kernels", ["", "torch"], ids=["kernels", "operators"])
def test_it_passes_on_this_device(kernels: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_c", "selftest", "--width", "8"],
        env=os.environ | {"FSDP_C_KERNELS": kernels, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "streams: kernels run on the current one" in done.stdout
    assert ("a CUDA graph: its replays give" in done.stdout) == (kernels == "")
