"""No C type leaks objects or memory in cycles of building, using and dropping it. Each cycle runs in a fresh
process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cycles import CYCLES
from tests.processes import run_python
from tests.settings import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600 if EXHAUSTIVE else 400
CHUNK_NBYTES = 16  # the smallest chunk of malloc
QUIET = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1", "OMP_NUM_THREADS": "1"}


def total(name: str) -> int:
    return 10_000 if EXHAUSTIVE else 2000 if name == "layouts" else 450


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Measure the cycles of the chosen tests and return the results by name."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in tests if isinstance(item, pytest.Function)]
    runs = [f"{name}={total(name)}" for name in names]
    command = ["-W", "ignore", "-m", "tests.faults.cycles", *runs]
    done = run_python(*command, cwd=ROOT, timeout_s=TIMEOUT_S - 10, **QUIET)
    results = {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}
    assert [*results] == names, done.stderr
    return results


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_leaks_no_object_and_no_memory(name: str, measured: dict[str, dict[str, Any]]) -> None:
    result = measured[name]
    assert result["objects"] == {}
    assert result["blocks"] < result["cycles"]
    assert result["nbytes"] < CHUNK_NBYTES * result["cycles"]
