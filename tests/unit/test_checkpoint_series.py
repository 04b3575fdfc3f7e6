"""Series of checkpoints: selection of the newest, and removal of old ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import folder


def save(path: Path, **options: Any) -> None:
    checkpoint.save(nn.Linear(2, 2), None, path, **options).wait()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_largest_last_number_is_the_latest_whatever_its_width(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "none") is None
    for name in ("step-9", "step-100", "2-step-20", "final"):
        save(tmp_path / name)
    (tmp_path / "step-300").mkdir()
    (tmp_path / "step-400").write_text("a file")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"


def test_a_checkpoint_of_which_a_file_is_missing_is_not_the_latest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-3" / ".metadata").unlink()
    (file,) = (tmp_path / "step-2").rglob("*.distcp")
    file.unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    save(tmp_path / "step-3")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"


@pytest.mark.parametrize("background", [False, True])
def test_the_last_are_kept_and_nothing_else_is_touched(tmp_path: Path, background: bool) -> None:
    save(tmp_path / "best-1")
    save(tmp_path / "elsewhere" / "step")
    (tmp_path / "step-1").symlink_to("elsewhere/step")
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "model.safetensors").write_text("somebody else's")
    for step in (8, 9, 10, 11):
        save(tmp_path / f"step-{step}", keep=2, background=background)
        if step == 9:
            (tmp_path / "step-9" / "notes").write_text("mine")
    save(tmp_path / "step-12", keep=2)
    assert names(tmp_path) == ["best-1", "elsewhere", "step-0", "step-1", "step-11", "step-12", "step-9"]
    assert folder.is_complete(tmp_path / "step-1")
    assert names(tmp_path / "step-9") == ["notes"] and names(tmp_path / "step-0") == ["model.safetensors"]


def test_a_checkpoint_of_a_smaller_number_is_kept_when_it_is_saved(tmp_path: Path) -> None:
    for step in (300, 400, 500, 250):
        save(tmp_path / f"step-{step}", keep=3)
    assert names(tmp_path) == ["step-250", "step-400", "step-500"]


def test_what_a_kill_inside_a_removal_or_a_first_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    for name in ("fsdp_c-data-0123456789ab/__0_0.distcp", ".saving.lock"):
        left = tmp_path / f"step-{'0' * len(names(tmp_path))}1" / name
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
    with mock.patch.object(Path, "iterdir", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        folder.remove_checkpoint(tmp_path / "step-1")
    assert checkpoint.latest(tmp_path) is None and names(tmp_path / "step-1")
    save(tmp_path / "step-2", keep=2)
    assert names(tmp_path) == ["step-2"]


def test_one_that_another_job_saves_to_is_left_with_a_warning(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    with folder.new_data_folder(tmp_path / "step-1"):
        with pytest.warns(UserWarning, match="step-1: could not be removed for keep=1: .* is saving there"):
            save(tmp_path / "step-2", keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "step-3", keep=1)
    assert names(tmp_path) == ["step-3"]


def test_names_without_a_number_and_nothing_kept_are_refused_before_any_write(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="keep=3: .*final has no number in its name"):
        save(tmp_path / "final", keep=3)
    with pytest.raises(ValueError, match="keep=0 would remove the checkpoint that is saved"):
        save(tmp_path / "step-1", keep=0)
    assert not names(tmp_path)
    assert folder.latest(str(tmp_path)) is None
