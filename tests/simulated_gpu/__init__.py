"""A simulated GPU for a CPU build of torch, as device "cuda": see docs/testing.md.

``python -m tests.simulated_gpu ARGUMENTS OF PYTHON`` runs Python on it. ``environment()`` returns the
environment of such a process.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.simulated_gpu.build import built_folder

PROCESS = Path(__file__).resolve().parent / "process"


def environment(devices: int = 2) -> dict[str, str]:
    """Build the device if it is stale, and return the environment variables that load it before torch.

    Child processes inherit the variables.
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
    """Return True if this process runs on the simulated GPU."""
    return bool(os.environ.get("SIMULATED_GPU"))
