"""What ``plan`` says that a step holds is what torch's allocator then shows, to the block: over random
trees."""

from __future__ import annotations

import ast

from tests.processes import ROOT, output_of_python
from tests.simulated_gpu import timeline

TREES = 80


def test_the_planned_peak_is_the_allocator_s_over_random_trees() -> None:
    """Nested, frozen, of several strategies and dtypes, with deeper prefetch, offloaded, accumulated under
    no_sync."""
    command = ["-m", "tests.simulated_gpu.unit_trees", "0", str(TREES)]
    said = output_of_python(*command, cwd=ROOT, timeout_s=1800, **timeline.environment())
    *differences, last = said.splitlines()
    assert differences == []
    counts = ast.literal_eval(last)
    assert min(counts.values()) >= 3 and counts["trees"] > TREES // 2, counts
