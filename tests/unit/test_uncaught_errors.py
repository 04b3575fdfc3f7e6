"""An error that ends a script says that a layer was called while its unit kept its parameters sharded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_c import FullyShardedDataParallel as FSDP

def shown(kind, error, traceback):
    print("shown:", kind.__name__ + ":", error)

sys.excepthook = shown
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model = FSDP(plain, use_orig_params={use_orig_params}, device_id=torch.device("cpu"))
model(torch.ones(2, 8)).sum().backward()
{statement}
"""


def last_words(statement: str, use_orig_params: bool = True) -> str:
    script = SCRIPT.format(use_orig_params=use_orig_params, statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_layer_called_at_the_top_of_a_script_names_its_unit_and_the_remedy(use_orig_params: bool) -> None:
    said = last_words("plain[1](torch.ones(2, 8))", use_orig_params)
    assert said.startswith("shown: RuntimeError: ")  # by the hook that was there before
    for part in ("rank 0, unit Sequential", "'1' are sharded now", "outside of that unit's forward", "Call the unit"):
        assert part in said


@pytest.mark.parametrize(
    "statement", ["raise ValueError('mine')", "model(torch.ones(2, 7))", "torch.ones(2) + torch.ones(3)"]
)
def test_other_errors_stay_as_they_are(statement: str) -> None:
    said = last_words(statement)
    assert said.startswith("shown: ") and "sharded now" not in said
