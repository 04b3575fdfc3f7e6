"""Runs the Python of a CUDA build of torch without a GPU: ``python -m tests.real_cuda -m pytest tests/cuda``.

``FAKE_CUDA_TORCH`` selects the version of torch, by default 2.13.0. Without arguments the environment and the
libraries are built if they are stale, and nothing is run. With ``FAKE_CUDA_CLIENTS=1`` the environment also
contains the libraries of tests/clients.
"""

from __future__ import annotations

import os
import sys

from tests.real_cuda import environment
from tests.real_cuda.build import Build

build = Build(os.environ.get("FAKE_CUDA_TORCH", "2.13.0"))
build.make()
python = build.make_clients() if os.environ.get("FAKE_CUDA_CLIENTS") == "1" else build.python
if len(sys.argv) > 1:
    os.execve(python, [str(python), *sys.argv[1:]], os.environ | environment(build.folder))
