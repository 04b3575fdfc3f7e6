"""Environment of fsdp_c on this machine: printed by ``python -m fsdp_c env``, for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.compat import upstream

SETTINGS = ("FSDP_C_", "FSDP_", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "NCCL_", "GLOO_", "OMP_NUM_THREADS")


def report() -> str:
    """Return one fact per line. Starts no process group, and does not initialize CUDA."""
    libraries = sorted(path.name for path in Path(_C.__file__).parent.glob("_cuda*.so"))
    facts = {
        "fsdp_c": f"{importlib.metadata.version('fsdp_c')} in {Path(_C.__file__).parent}",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} in {Path(torch.__file__).parent}",
        "torch's FSDP1": "present" if upstream.HAS_FSDP1 else f"missing ({upstream.WHY_NO_FSDP1})",
        "CUDA of torch": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "GPUs": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        "OS": f"{platform.platform()}, {' '.join(platform.libc_ver())}",
        "C compiler": shutil.which(os.environ.get("CC", "cc").split()[0]) or "not found",
        "nvcc": shutil.which("nvcc") or "not found",
        "CPU kernels": f"{', '.join(_C.cpu_capabilities())}; {_C.why_no_kernels('cpu') or 'in use'}",
        "CUDA kernels": f"built: {', '.join(libraries) or 'none'}; {_C.why_no_kernels('cuda') or 'in use'}",
        "settings": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)),
    }
    return "\n".join(f"{name + ':':<15} {fact or 'none'}" for name, fact in facts.items())
