"""A checkpoint is the old one, the new one, or refused: after kills, torn files and partial copies."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, metadata
from tests.checkpoints import killed_at, loaded_version, model_of, pickle_of, quick_disk, save, torch_save

quick_disk = pytest.fixture(autouse=True)(quick_disk)


def prepare(path: Path, kind: str) -> int:
    """Prepare the folder for a save and return the version in it, 0 for none."""
    if kind == "new":
        return 0
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    if kind == "a checkpoint":
        save(path, 1)
    elif kind == "torch's":
        torch_save(path, 1)
    return int(kind != "a folder")


def kinds_in(folder: Path) -> set[str]:
    return {name.split("-")[0] for name in os.listdir(folder)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "background"),
    [
        *((kind, False) for kind in ("new", "a folder", "a checkpoint", "torch's")),
        *((kind, True) for kind in ("new", "a checkpoint")),
    ],
)
@pytest.mark.timeout(1200)
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new(
    kind: str, background: bool, tmp_path: Path
) -> None:
    path, template = tmp_path / "in" / "ckpt", tmp_path / "template"
    old = prepare(template, kind)
    at_first = kinds_in(template) if template.exists() else set()
    clean = {".metadata", "fsdp_c", *({"notes.txt"} & at_first)}
    found, rubbish = [], 0
    for call in itertools.count(1):
        path.parent.mkdir()
        if template.exists():
            shutil.copytree(template, path)
        killed = killed_at(call, lambda: save(path, 2, background))
        assert (path / ".metadata").exists() or not old
        found.append(loaded_version(path) if (path / ".metadata").exists() else 0)
        assert found[-1] in (old, 2)
        if killed:
            rubbish += path.exists() and kinds_in(path) not in (at_first, clean)
        else:
            assert kinds_in(path) == clean
        save(path, 3)  # removes leftovers and nothing else
        assert loaded_version(path) == 3
        assert os.listdir(path.parent) == ["ckpt"] and kinds_in(path) == clean
        assert len(list(path.glob("fsdp_c-*"))) == 1
        shutil.rmtree(path.parent)
        if not killed:
            break
    changes = [one != other for one, other in itertools.pairwise(found)]
    assert changes.count(True) == 1 and found[0] == old and found[-1] == 2  # the change happens in one step
    assert len(found) > 15 and rubbish > 5  # kills did hit saves


def files_of(path: Path) -> list[Path]:
    """Return the files relative to ``path``."""
    found = sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.name)
    assert [file.name for file in found] == [".metadata", "__0_0.distcp", "fsdp_c.layout"]
    return [file.relative_to(path) for file in found]


def test_a_torn_or_missing_file_is_refused(tmp_path: Path) -> None:
    path, work = tmp_path / "ckpt", tmp_path / "work"
    save(path, 7)
    for file in files_of(path):
        content = (path / file).read_bytes()
        lengths = {0, 1, len(content) // 2, len(content) - 30, len(content) - 1}
        if file.name == ".metadata":  # without the end it would be torch's, which has no checksums
            lengths |= {len(pickle_of(content)), content.rindex(b"fsdp_c 1 ")}
        for length in lengths:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(path, work)
            os.truncate(work / file, length)
            with pytest.raises(CheckpointError, match=re.escape(str(work))):
                loaded_version(work)
        (work / file).unlink()
        with pytest.raises((CheckpointError, FileNotFoundError), match=": missing|: not a checkpoint"):
            loaded_version(work)


def test_nothing_is_flushed_too_late(tmp_path: Path) -> None:
    """All files are flushed before the rename, and the rename before the old data are removed."""
    path = tmp_path / "ckpt"
    done: list[str] = []

    def noted(name: str, original: Any, target: Callable[..., str | Path]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            done.append(f"{name} {Path(target(*args)).name.split('-')[0]}")
            original(*args, **options)

        return mock.patch(f"os.{name}", call)

    with (
        noted(
            "fsync", lambda descriptor: None, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")
        ),
        noted("rename", os.rename, lambda source, target: target),
        noted("unlink", os.unlink, lambda target: target),
    ):
        save(path, 1)
        first, done[:] = done[:], []
        save(path, 2)
    # the parent folder, which contains the new folder's name
    around = [f"fsync {tmp_path.name.split('-')[0]}"]
    published = [f"fsync {name}" for name in ("__0_0.distcp", "fsdp_c.layout", ".metadata", "fsdp_c", "ckpt")]
    published += ["rename .metadata", "fsync ckpt"]
    assert first == [*around, *published, "unlink .saving.lock"]
    assert done[:8] == [*published, "rename fsdp_c"]  # renames the old data, which are removed afterwards
    assert sorted(done[8:]) == [
        f"unlink {name}" for name in (".saving.lock", "__0_0.distcp", "fsdp_c.layout")
    ]


def test_a_folder_that_cannot_be_flushed_is_told_of_once_the_checkpoint_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)
    (old,) = path.glob("fsdp_c-data-*")

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            if old.name.encode() not in (path / ".metadata").read_bytes():
                raise OSError(5, "Input/output error")

    with (
        mock.patch("os.fsync", failing),
        pytest.warns(UserWarning, match=f"{re.escape(str(path))}: saved and in its place.*output"),
    ):
        save(path, 2)
    assert loaded_version(path) == 2
    assert (old / "__0_0.distcp").exists()  # the old data stay, as the old name may come back
    save(path, 3)
    assert loaded_version(path) == 3 and not old.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_looks_only_at_the_parts_of_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    prepare(path, "torch's")
    model, _ = model_of(-1)
    looked_at: list[str] = []
    check_boxes = metadata.check_boxes

    def noted(key: str, *rest: Any) -> None:
        looked_at.append(key)
        check_boxes(key, *rest)

    with mock.patch.object(metadata, "check_boxes", noted):
        checkpoint.load(model, None, path)
    assert sorted(looked_at) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
    assert all((param == 1).all() for param in model.parameters())


def test_bad_extra_is_refused(tmp_path: Path) -> None:
    model, _ = model_of(1)
    with pytest.raises(TypeError, match="extra: expected a dict, got list"):
        checkpoint.save(model, None, tmp_path / "ckpt", extra=[1])  # type: ignore[arg-type]
