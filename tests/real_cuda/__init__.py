"""torch's own CUDA build on a GPU that is not there: docs/testing.md is about it.

``python -m tests.real_cuda ARGUMENTS OF PYTHON`` runs its Python, in an environment of its own;
``environment()`` is what a process of it needs.
"""

from __future__ import annotations

import os
from pathlib import Path

PROCESS = Path(__file__).resolve().parent / "process"
SETTING = "FAKE_CUDA"


def environment(libraries: Path, devices: int = 2) -> dict[str, str]:
    """What to add to the environment of a Python process whose torch these libraries were built for.

    Child processes inherit it.
    """
    path = [str(PROCESS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        SETTING: str(libraries),
        "FAKE_CUDA_DEVICES": os.environ.get("FAKE_CUDA_DEVICES", str(devices)),
        "FSDP_C_CUDA_KERNELS": str(libraries / "_cuda.so"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }


def is_on() -> bool:
    """Whether this process has such a torch."""
    return bool(os.environ.get(SETTING))
