"""torch's own CUDA build without a real GPU: see docs/testing.md.

``python -m tests.real_cuda ARGUMENTS OF PYTHON`` runs the Python of its own environment. ``environment()``
returns the environment variables of such a process.
"""

from __future__ import annotations

import os
from pathlib import Path

PROCESS = Path(__file__).resolve().parent / "process"
SETTING = "FAKE_CUDA"


def environment(libraries: Path, devices: int = 2) -> dict[str, str]:
    """Return the environment variables of a Python process whose torch matches these libraries.

    Child processes inherit them.
    """
    path = [str(PROCESS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        SETTING: str(libraries),
        "FAKE_CUDA_DEVICES": os.environ.get("FAKE_CUDA_DEVICES", str(devices)),
        "FSDP_C_CUDA_KERNELS": str(libraries / "_cuda.so"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }


def is_on() -> bool:
    """Return True if this process uses the CUDA build."""
    return bool(os.environ.get(SETTING))
