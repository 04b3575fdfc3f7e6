"""Install the simulated GPU before torch is imported, in a Python with this folder on PYTHONPATH."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if os.environ.get("SIMULATED_GPU"):
    import simulated_gpu

    simulated_gpu.wait_for_torch()

# Run the sitecustomize that this one hides.
_here = Path(__file__).resolve().parent
_other = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _here])
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
