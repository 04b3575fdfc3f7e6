"""examples/train_lm.py run as by a user: outputs, resuming, equality with torch's FSDP1, and one message for
bad input.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT, output_of_script, run_script

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import lm_data  # noqa: E402
import train_lm  # noqa: E402

from fsdp_c import checkpoint  # noqa: E402
from tests.checkpoints import differences  # noqa: E402
from tests.ranks import device_type  # noqa: E402
from tests.training import assert_same  # noqa: E402

pytestmark = pytest.mark.slow

TEXT = ROOT / "LICENSE"
CONTEXT = 16
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", str(CONTEXT), "--data", str(TEXT)]
SHORT = "--steps 4 --warmup 1 --eval-every 2 --eval-batches 1 --checkpoint-every 2".split()


def train(*flags: str, world_size: int = 2, run: Callable[..., Any] = output_of_script) -> Any:
    """Run the script on ranks of this machine and return its output."""
    command = [*SMALL, *SHORT, "--sample-bytes", "8", *flags, "--device", device_type()]
    return run(EXAMPLES / "train_lm.py", *command, ranks=world_size)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a complete run compared with torch's FSDP1, and its output."""
    out = tmp_path_factory.mktemp("lm") / "run"
    return out, train("--out", str(out), "--against", "torch")


def plain_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, loaded without FSDP."""
    plain = train_lm.GPT(train_lm.ModelConfig(layers=1, width=16, heads=2, context=CONTEXT))
    checkpoint.load(plain, None, path)
    return plain.state_dict()


def test_a_run_leaves_checkpoints_curve_and_sample(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    names = {path.name for path in out.iterdir()}
    assert names == {"run.json", "loss.png", "sample.txt", "step-000002", "step-000004"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text()


def test_held_out_loss_stands_beside_the_unigram_entropy(finished_run: tuple[Path, str]) -> None:
    _, printed = finished_run
    entropy = lm_data.load_text(str(TEXT), CONTEXT).unigram_entropy() / math.log(2)
    lines = [line for line in printed.splitlines() if "held-out loss" in line]
    assert len(lines) == 4  # twice in each of the two runs
    assert all(f"unigram entropy of the text {entropy:.3f} bits" in line for line in lines)


def test_training_equals_torch_fsdp1_bit_for_bit(finished_run: tuple[Path, str]) -> None:
    _, printed = finished_run
    assert "largest difference between fsdp_c and torch, 4 steps: losses 0, parameters 0\n" in printed


def test_resuming_continues_as_if_never_interrupted(finished_run: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = finished_run
    train("--out", str(tmp_path / "resumed"), "--resume", str(out / "step-000002"))
    assert differences(out / "step-000004", tmp_path / "resumed" / "step-000004") == []


def test_resume_auto_passes_over_a_damaged_checkpoint(finished_run: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = finished_run
    shutil.copytree(out, tmp_path / "run")
    for file in (tmp_path / "run" / "step-000004").rglob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    printed = train("--out", str(tmp_path / "run"), "--resume", "auto")
    assert "trying the one before" in printed
    assert "resumed from" in printed
    assert differences(out / "step-000004", tmp_path / "run" / "step-000004") == []


def test_resuming_with_another_number_of_ranks_strategy_and_implementation(
    finished_run, tmp_path: Path
) -> None:
    """The first step after a resume starts from the same parameters, also in torch's FSDP."""
    out, _ = finished_run
    flags = ["--resume", str(out / "step-000002"), "--steps", "2"]
    train(
        "--out", str(tmp_path / "1"), *flags, "--strategy", "shard_grad_op", "--use-orig-params", world_size=1
    )
    printed = train("--out", str(tmp_path / "2"), *flags, "--impl", "torch", "--steps", "4")
    assert "2 of 4 steps done" in printed
    assert_same(*(plain_state(path / "step-000004") for path in (out, tmp_path / "2")))


def test_missing_data_is_one_error_and_writes_nothing(tmp_path: Path) -> None:
    done = train("--out", str(tmp_path / "run"), "--data", str(tmp_path / "nowhere.txt"), run=run_script)
    assert done.returncode != 0
    assert done.stderr.count(f"error: {tmp_path}/nowhere.txt: no such file or folder") == 1
    assert list(tmp_path.iterdir()) == []
