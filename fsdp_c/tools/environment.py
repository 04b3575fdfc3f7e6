"""What fsdp_c finds on this machine: ``python -m fsdp_c env`` prints it, for reports of bugs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.compat import upstream

SETTINGS = ("FSDP_C_", "FSDP_", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "NCCL_", "GLOO_", "OMP_NUM_THREADS")


def report() -> str:
    """One fact per line. Starts no process group, and does not initialise CUDA."""
    libraries = sorted(path.name for path in Path(_C.__file__).parent.glob("_cuda*.so"))
    facts = {
        "fsdp_c": f"{_version()} in {Path(_C.__file__).parent}",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} in {Path(torch.__file__).parent}",
        "torch's FSDP1": "used for names, enums and policies" if upstream.HAS_FSDP1 else _without_fsdp1(),
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if _has_backend("nccl") else "none",
        "GPUs": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        "backends": ", ".join(name for name in ("gloo", "nccl", "mpi", "ucc") if _has_backend(name))
        or "none",
        "OS": f"{platform.platform()}, {' '.join(platform.libc_ver())}",
        "C compiler": _tool(os.environ.get("CC", "cc").split()[0]),
        "nvcc": _tool("nvcc"),
        "CPU kernels": _kernels("cpu", f"of {', '.join(_C.cpu_capabilities())}"),
        "CUDA kernels": _kernels("cuda", f"built: {', '.join(libraries) or 'none'}"),
        "settings": " ".join(
            f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(SETTINGS)
        ),
    }
    width = max(map(len, facts)) + 1
    return "\n".join(f"{name + ':':<{width}} {fact or 'none'}" for name, fact in facts.items())


def _version() -> str:
    try:
        return importlib.metadata.version("fsdp_c")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, from sources"


def _without_fsdp1() -> str:
    return f"not there ({upstream.WHY_NO_FSDP1}); fsdp_c's own stand in"


def _has_backend(name: str) -> bool:
    return dist.is_available() and getattr(dist, f"is_{name}_available")()


def _tool(name: str) -> str:
    """A tool's version and path."""
    path = shutil.which(name)
    if path is None:
        return f"not found ({name})"
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not run ({error})"
    lines = answer.strip().splitlines()
    return (
        f"{next((line for line in lines if 'release' in line), lines[0] if lines else 'no version')} ({path})"
    )


def _kernels(device_type: str, which: str) -> str:
    reason = _C.why_no_kernels(device_type)
    use = "in use" if reason is None else f"not in use, torch's operators are: {reason}"
    return f"{use}; {which}"
