"""Each allocation of the C layers and of tensors fails once in turn while units are built, stepped and saved.

Each failure is a MemoryError or torch's own error, and leaves nothing: see tests/faults/allocations.py.
Only every 37th one is tried, unless pytest has --exhaustive.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.faults.allocations import RUNS
from tests.processes import run_python
from tests.settings import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
STRIDE = 1 if EXHAUSTIVE else 37
TIMEOUT_S = 1800 if EXHAUSTIVE else 400
COMPILER = shutil.which(os.environ.get("CC", "cc"))

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux", reason="the trampolines are x86-64"
    ),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library that counts calls of allocating functions."""
    target = tmp_path_factory.mktemp("fail_calls") / "fail_calls.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    source = ROOT / "tests/native/fail_calls.c"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([str(COMPILER), *flags, include, str(source), "-o", str(target)], check=True, timeout=200)
    return target


@pytest.fixture(scope="module")
def outcomes(library: Path) -> dict[str, dict[str, Any]]:
    """Run all trials and return the results by name."""
    command = [*"-W ignore -X faulthandler -m tests.faults.allocations".split(), library, str(STRIDE)]
    done = run_python(*command, cwd=ROOT, timeout_s=TIMEOUT_S - 10, OMP_NUM_THREADS="1")
    results = {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}
    assert results.keys() == RUNS.keys(), done.stderr
    return results


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("run", RUNS)
def test_an_allocation_that_fails_leaves_nothing_behind(
    run: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    assert outcomes[run]["allocations"] > (50 if run == "save" else 200)  # a save allocates boxes only
    assert outcomes[run]["wrong"] == {}
