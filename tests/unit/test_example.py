"""What examples/train_lm.py says to input that is no use, and which pieces of a text it shows to whom."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import lm_checkpoint  # noqa: E402
import lm_data  # noqa: E402
import train_lm  # noqa: E402

import fsdp_c  # noqa: E402
from fsdp_c import checkpoint  # noqa: E402

TEXT = ROOT / "LICENSE"
CONTEXT = 16


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "no text"), (b"short", "5 bytes; at least 360"), (b"\0" * 999, "no text")]
)
def test_unusable_text_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(lm_data.InputError, match=message):
        lm_data.load_text(str(tmp_path), CONTEXT)


def test_a_folder_is_read_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("h" * 999)
    (tmp_path / "a.txt").write_text("a" * 999)
    text = lm_data.load_text(str(tmp_path), CONTEXT)
    assert set(torch.cat([text.train, text.held_out]).tolist()) == {ord("a")}


def test_every_rank_sees_its_own_part_of_the_text() -> None:
    text = lm_data.load_text(str(TEXT), CONTEXT)
    of_rank = [lm_data.Batches(text, CONTEXT, 2, 0, rank, 2).training(3, 2) for rank in (0, 1)]
    again = lm_data.Batches(text, CONTEXT, 2, 0, 1, 2).training(3, 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(of_rank[1], again, strict=True))
    assert not torch.equal(of_rank[0][0][0], of_rank[1][0][0])


def test_targets_are_the_inputs_one_byte_on() -> None:
    batches = lm_data.Batches(lm_data.load_text(str(TEXT), CONTEXT), CONTEXT, 2, 0, 0, 1)
    for inputs, targets in [*batches.training(0, 1), *batches.evaluation(2)]:
        assert inputs.shape == targets.shape == (2, CONTEXT)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


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
    """What makes a folder look like a complete checkpoint."""
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    return folder


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint.save(torch.nn.Linear(2, 3), None, tmp_path / "step-000002")
    wrapped = fsdp_c.FullyShardedDataParallel
    with (
        pytest.raises(lm_data.InputError, match="shape"),
        mock.patch.object(fsdp_c, "FullyShardedDataParallel", torch.nn.Linear),
    ):
        lm_checkpoint.load_checkpoint(tmp_path / "step-000002", model, optimizer)
    assert fsdp_c.FullyShardedDataParallel is wrapped


def test_resume_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-000002")
    newest = write_checkpoint(tmp_path / "step-000010")
    (tmp_path / "step-000020").mkdir()
    assert lm_checkpoint.find_checkpoints("auto", tmp_path) == [newest, tmp_path / "step-000002"]
    assert lm_checkpoint.find_checkpoints(str(tmp_path), tmp_path / "other") == [newest]
    assert lm_checkpoint.find_checkpoints(str(newest), tmp_path / "other") == [newest]
    assert lm_checkpoint.find_checkpoints("auto", tmp_path / "other") == []
    with pytest.raises(lm_data.InputError, match="no checkpoint there"):
        lm_checkpoint.find_checkpoints(str(tmp_path / "other"), tmp_path)


def open_folder(
    out: Path, *, resumed: Path | None = None, resume: str | None = None, overwrite: bool = False
) -> None:
    lm_checkpoint.open_run_folder(out, resumed=resumed, resume=resume, overwrite=overwrite)


def test_an_existing_run_is_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    checkpoint = write_checkpoint(tmp_path / "step-000002")
    with pytest.raises(lm_data.InputError, match="use --overwrite, --resume auto or another --out"):
        open_folder(tmp_path)
    open_folder(tmp_path, resumed=checkpoint, resume=str(checkpoint))
    assert checkpoint.exists()
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / ".saving.lock").touch()  # of a save that was killed
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
