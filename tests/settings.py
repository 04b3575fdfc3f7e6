"""Settings of a test run: options of pytest, which tests/conftest.py puts into the environment for rank processes
and other child processes.

FSDP_C_TEST_PATIENCE=3 makes timeouts three times as long. It is not an option, because fuzzers read it, too.
"""

from __future__ import annotations

import os

PREFIX = "FSDP_C_TEST_"
DEVICE = PREFIX + "DEVICE"  # read at each use: tests of one process set it

EXHAUSTIVE = os.environ.get(PREFIX + "EXHAUSTIVE") == "1"
PATIENCE = float(os.environ.get(PREFIX + "PATIENCE", "1"))
# 640: units above 1 MiB, which take memory from the arena on a GPU
WIDTH = int(os.environ.get(PREFIX + "WIDTH", "5"))
