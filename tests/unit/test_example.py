"""Messages of examples/train_lm.py for unusable input, and the distribution of its text to ranks."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import lm_checkpoint  # noqa: E402
import lm_data  # noqa: E402
import train_lm  # noqa: E402

TEXT = ROOT / "LICENSE"
CONTEXT = 16


def test_every_rank_sees_its_own_part_of_the_text() -> None:
    text = lm_data.load_text(str(TEXT), CONTEXT)
    of_rank = [lm_data.Batches(text, CONTEXT, 2, 0, rank, 2).training(3, 2) for rank in (0, 1)]
    again = lm_data.Batches(text, CONTEXT, 2, 0, 1, 2).training(3, 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(of_rank[1], again, strict=True))
    assert not torch.equal(of_rank[0][0][0], of_rank[1][0][0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "0 is not a positive number"),
        (["--strategy", "zero3"], "invalid choice: 'zero3'"),
        (["--width", "30"], "--width 30 is not divisible by --heads 4"),
        (["--resume", "auto", "--overwrite"], "exclude each other"),
        (["--against", "fsdp_c"], "compares fsdp_c with itself"),
        (["--lr", "nan"], "nan is not a positive number"),
    ],
)
def test_bad_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_lm.parse_arguments(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def write_checkpoint(folder: Path) -> Path:
    """Make a folder look like a complete checkpoint."""
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    return folder


open_folder = partial(lm_checkpoint.open_run_folder, resumed=None, resume=None, overwrite=False)


def test_an_existing_run_is_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    checkpoint = write_checkpoint(tmp_path / "step-000002")
    with pytest.raises(lm_data.InputError, match="use --overwrite, --resume auto or another --out"):
        open_folder(tmp_path)
    open_folder(tmp_path, resumed=checkpoint, resume=str(checkpoint))
    assert checkpoint.exists()
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / ".saving.lock").touch()  # left by a killed save
    open_folder(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_resuming_from_an_older_checkpoint_keeps_the_newer_ones(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    older, newer = (write_checkpoint(tmp_path / name) for name in ("step-000002", "step-000004"))
    with pytest.raises(lm_data.InputError, match="another --out"):
        open_folder(tmp_path, resumed=older, resume=str(older))
    assert newer.exists()
    open_folder(tmp_path / "other", resumed=older, resume=str(older))


@pytest.mark.parametrize("option", ["overwrite", "resume"])
def test_a_folder_of_something_else_is_never_touched(option: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(lm_data.InputError, match="not a run of this script"):
        open_folder(tmp_path, **{option: option == "overwrite" or "auto"})
    assert (tmp_path / "thesis.tex").read_text() == "mine"
