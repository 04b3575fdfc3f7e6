"""Install the fake GPU before torch is imported, in a Python with this folder on PYTHONPATH.

dlopen() returns a library of the requested name that is loaded already, so torch uses these libraries as
driver, runtime and NCCL.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("FAKE_CUDA")
LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1", "libnccl.so.2")


class AfterTorch(importlib.abc.MetaPathFinder):
    """Import hook that replaces torch's operators once torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            replace_operators(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def replace_operators(torch: Any) -> None:
    assert FOLDER is not None and torch.version.cuda
    ctypes.CDLL(os.path.join(FOLDER, "liboperators.so"))
    torch.backends.cudnn.enabled = False  # selects ATen's kernels, e.g. for convolutions
    for kind in (
        "flash",
        "mem_efficient",
        "cudnn",
    ):  # leaves the math kernel of attention, the only one on the CPU
        getattr(torch._C, f"_set_sdp_use_{kind}")(False)


if FOLDER:
    for _name in LIBRARIES:
        try:
            ctypes.CDLL(os.path.join(FOLDER, _name), ctypes.RTLD_GLOBAL)
        except OSError as error:  # Python would only print it and continue
            raise SystemExit(f"no GPU can be made: {error}") from error
    sys.meta_path.insert(0, AfterTorch())

# Run the sitecustomize that this one hides.
_here = Path(__file__).resolve().parent
_other = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _here])
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
