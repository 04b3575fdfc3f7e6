"""examples/train_lm.py as a user runs it: outputs, resuming, equality with torch's FSDP1, one message for bad input."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import lm_data  # noqa: E402
import train_lm  # noqa: E402

TEXT = ROOT / "LICENSE"
CONTEXT = 16
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", str(CONTEXT), "--data", str(TEXT)]
SHORT = ["--steps", "4", "--warmup", "1", "--eval-every", "2", "--eval-batches", "1", "--checkpoint-every", "2"]


def train(*flags: str, world_size: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the script on ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [*launcher, str(EXAMPLES / "train_lm.py"), *SMALL, *SHORT, "--sample-bytes", "8", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)


def succeed(*flags: str) -> str:
    """Run the script; what it printed. A failure shows what it said."""
    done = train(*flags)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run compared with torch's FSDP1, and what was printed."""
    out = tmp_path_factory.mktemp("lm") / "run"
    return out, succeed("--out", str(out), "--against", "torch")


def model_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint / "model.pt", weights_only=True)


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


def test_a_checkpoint_holds_the_plain_model(finished_run: tuple[Path, str]) -> None:
    out, _ = finished_run
    plain = train_lm.GPT(train_lm.ModelConfig(layers=1, width=16, heads=2, context=CONTEXT))
    plain.load_state_dict(model_of(out / "step-000004"), strict=True)


def test_resuming_continues_as_if_never_interrupted(finished_run: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = finished_run
    succeed("--out", str(tmp_path / "resumed"), "--resume", str(out / "step-000002"))
    whole, resumed = out / "step-000004", tmp_path / "resumed" / "step-000004"
    expected, actual = model_of(whole), model_of(resumed)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    read = [json.loads((checkpoint / "checkpoint.json").read_text()) for checkpoint in (whole, resumed)]
    assert read[0] == read[1]


def test_missing_data_is_one_error_and_writes_nothing(tmp_path: Path) -> None:
    done = train("--out", str(tmp_path / "run"), "--data", str(tmp_path / "nowhere.txt"))
    assert done.returncode != 0
    assert done.stderr.count(f"error: {tmp_path}/nowhere.txt: no such file or folder") == 1
    assert list(tmp_path.iterdir()) == []
