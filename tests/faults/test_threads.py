"""Reference counts and the GIL with units in several threads at once: see tests/faults/threads.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import output_of_python
from tests.settings import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800 if EXHAUSTIVE else 400


@pytest.mark.timeout(TIMEOUT_S)
def test_threads_that_build_step_and_drop_units_get_their_own_results() -> None:
    rounds = 1000 if EXHAUSTIVE else 20
    command = f"-W ignore -X faulthandler -m tests.faults.threads {rounds}".split()
    printed = output_of_python(*command, cwd=ROOT, timeout_s=TIMEOUT_S, OMP_NUM_THREADS="1")
    assert json.loads(printed) == {"wrong": [0, 0, 0, 0], "units": 0, "live": 0}
