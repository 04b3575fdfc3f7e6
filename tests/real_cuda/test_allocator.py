"""torch's own caching allocator, in its settings: fsdp_c trains to FSDP1's bits, and plan's peak is the allocator's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.real_cuda.programs import ROOT, run

TREES = 8
SETTINGS = {
    "default": "",
    "expandable segments": "expandable_segments:True",
    "split": "max_split_size_mb:21",
    "rounded": "roundup_power2_divisions:4",
    "collected": "garbage_collection_threshold:0.6",
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_is_fsdp1s_to_the_bit(setting: str) -> None:
    for status, said in run("both", PYTORCH_ALLOC_CONF=setting):
        assert status == 0 and "equal: 4" in said, said[-3000:]


def test_the_planned_peak_is_the_allocator_s_over_random_trees() -> None:
    command = [sys.executable, "-m", "tests.real_cuda.unit_trees", "0", str(TREES)]
    settings = os.environ | {"FAKE_NCCL_ALONE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    *differences, counts = done.stdout.splitlines()
    assert differences == []
    assert ast.literal_eval(counts)["trees"] > TREES // 2
