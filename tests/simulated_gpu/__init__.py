"""A simulated GPU under a torch that was built for the CPU, as device "cuda": docs/testing.md is about
it.

``python -m tests.simulated_gpu ARGUMENTS OF PYTHON`` runs Python on it; ``environment()`` is what a process
needs.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.simulated_gpu.build import built_folder

PROCESS = Path(__file__).resolve().parent / "process"


def environment(devices: int = 2) -> dict[str, str]:
    """What to add to the environment of a Python process, built if it is stale: the device is there before
    torch is.

    Child processes inherit it.
    """
    folder = built_folder()
    path = [str(PROCESS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "SIMULATED_GPU": str(folder),
        "SIMULATED_GPU_DEVICES": str(devices),
        "FSDP_C_CUDA_KERNELS": str(folder / "_cuda.so"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }


def is_on() -> bool:
    """Whether this process has the device."""
    return bool(os.environ.get("SIMULATED_GPU"))
