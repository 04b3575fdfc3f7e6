"""Runs Python on the simulated GPU: ``python -m tests.simulated_gpu -m pytest tests/cuda``, or ``...
script.py``.

Without arguments the device is built if it is stale, and nothing is run.
"""

from __future__ import annotations

import os
import sys

from tests.simulated_gpu import environment

settings = environment()
if len(sys.argv) > 1:
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | settings)
