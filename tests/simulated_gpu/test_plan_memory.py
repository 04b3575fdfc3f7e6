"""What ``plan`` says that a step holds is what torch's allocator then shows, to the block: over random
trees."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.simulated_gpu import timeline

ROOT = Path(__file__).resolve().parents[2]
TREES = 80


def test_the_planned_peak_is_the_allocator_s_over_random_trees() -> None:
    """Nested, frozen, of several strategies and dtypes, with deeper prefetch, offloaded, accumulated under
    no_sync."""
    command = [sys.executable, "-m", "tests.simulated_gpu.unit_trees", "0", str(TREES)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | timeline.environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *differences, last = done.stdout.splitlines()
    assert differences == []
    counts = ast.literal_eval(last)
    assert min(counts.values()) >= 3 and counts["trees"] > TREES // 2, counts
