"""A checkpoint is the old one, the new one, or refused: kills, flipped bytes, torn files, half copies."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli, metadata, saving
from fsdp_c.checkpoint.folder import LAYOUT
from tests.checkpoints import fill, killed_at, save_version


def model_of(version: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every parameter and every tensor of the optimizer's state is ``version``."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    fill(model, optimizer, version)
    return model, optimizer


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors = [*model.state_dict().values()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return {value for tensor in tensors for value in tensor.unique().tolist()}


def save(path: Path, version: int, background: bool = False) -> None:
    save_version(*model_of(version), path, version, background)


def loaded_version(path: Path) -> int:
    """What is there; an assertion fails if it is not of one piece."""
    model, optimizer = model_of(-1)
    extra = checkpoint.load(model, optimizer, path)
    assert values_of(model, optimizer) == {extra["version"]}
    return extra["version"]


@pytest.fixture(autouse=True)
def quick_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is flushed, but where a test looks at that: no power fails here."""
    if "disk" in request.keywords:
        yield
        return
    with mock.patch("os.fsync", lambda descriptor: None):
        yield


def prepare(path: Path, kind: str) -> int:
    """Brings about what a save finds: the version there, 0 for none."""
    if kind == "new":
        return 0
    if kind in ("a folder", "one saved in place"):
        path.mkdir()
    version = 0 if kind == "a folder" else 1
    if version:
        save(path, version)
    (path / "notes.txt").write_text("mine")
    return version


def kinds_in(folder: Path) -> set[str]:
    return {name.split("-")[0] for name in os.listdir(folder)}


@pytest.mark.parametrize(
    ("kind", "background"),
    [
        *((kind, False) for kind in ("new", "a folder", "a checkpoint", "one saved in place")),
        *((kind, True) for kind in ("new", "one saved in place")),
    ],
)
@pytest.mark.timeout(1200)
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new(
    kind: str, background: bool, tmp_path: Path
) -> None:
    path, template = tmp_path / "in" / "ckpt", tmp_path / "template"
    old = prepare(template, kind)
    in_place = template.exists()
    at_first = kinds_in(template) if in_place else set()
    inside, flat = (
        {".metadata", "fsdp_c", "notes.txt"},
        {".metadata", "checksums.json", "__0_0.distcp", "fsdp_c.layout"},
    )
    found, rubbish = [], 0
    for call in itertools.count(1):
        path.parent.mkdir()
        if in_place:
            shutil.copytree(template, path)
        killed = killed_at(call, lambda: save(path, 2, background))
        assert (path / ".metadata").exists() or not old
        found.append(loaded_version(path) if (path / ".metadata").exists() else 0)
        assert found[-1] in (old, 2)
        if killed:
            rubbish += os.listdir(path.parent) != ["ckpt"] or kinds_in(path) not in (at_first, inside)
        else:
            assert kinds_in(path) == (inside if in_place else flat)
        save(path, 3)  # removes what is left, and nothing else
        assert loaded_version(path) == 3
        assert os.listdir(path.parent) == ["ckpt"]
        assert kinds_in(path) == (inside if in_place else {".metadata", "fsdp_c"} if found[-1] else flat)
        assert len(list(path.glob("fsdp_c-*"))) <= 1
        shutil.rmtree(path.parent)
        if not killed:
            break
    changes = [one != other for one, other in itertools.pairwise(found)]
    assert changes.count(True) == 1 and found[0] == old and found[-1] == 2  # it comes about in one step
    assert len(found) > 15 and rubbish > 5  # kills did hit the save


def files_of(path: Path) -> list[Path]:
    """Relative to ``path``."""
    found = sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.name)
    assert [file.name for file in found] == [".metadata", "__0_0.distcp", "checksums.json", "fsdp_c.layout"]
    return [file.relative_to(path) for file in found]


def outcome(path: Path) -> str:
    """Either what was saved, or refused: anything else fails."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{LAYOUT}: damaged")
            assert loaded_version(path) == 7
        return "loaded"
    except CheckpointError as error:
        assert str(path) in str(error)
        return "refused"


in_either_layout = pytest.mark.parametrize("in_place", [False, True])


@in_either_layout
def test_a_flipped_byte_anywhere_is_refused_or_harmless_and_always_found_by_verify(
    in_place, tmp_path, capsys
) -> None:
    path, work = tmp_path / "ckpt", tmp_path / "work"
    path.mkdir() if in_place else None
    save(path, 7)
    rng = random.Random(0)
    outcomes = []
    for file in files_of(path):
        content = (path / file).read_bytes()
        for position in rng.sample(range(len(content)), 70):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(path, work)
            flipped = bytearray(content)
            flipped[position] ^= 1 << rng.randrange(8)
            (work / file).write_bytes(flipped)
            outcomes.append(outcome(work))
            if file.name != "checksums.json":  # a space more or less there is no damage
                assert cli.main(["verify", str(work)]) in (1, 2)
    capsys.readouterr()
    assert outcomes.count("refused") > 150


@in_either_layout
def test_a_torn_or_missing_file_is_refused(in_place: bool, tmp_path: Path) -> None:
    path, work = tmp_path / "ckpt", tmp_path / "work"
    path.mkdir() if in_place else None
    save(path, 7)
    for file in files_of(path):
        size = (path / file).stat().st_size
        for length in (0, 1, size // 2, size - 1):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(path, work)
            os.truncate(work / file, length)
            assert outcome(work) == ("refused" if file.name != LAYOUT else "loaded")
        (work / file).unlink()
        if file.name == LAYOUT:
            assert outcome(work) == "loaded"
            continue
        with pytest.raises((CheckpointError, FileNotFoundError), match="missing|not a checkpoint"):
            loaded_version(work)


def test_the_error_names_file_and_parameter(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 7)
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    bias = torch.full((30,), 7.0).numpy().tobytes()
    at = content.rindex(bias, 0, content.rindex(bias) + len(bias))
    file.write_bytes(content[:at] + b"!" + content[at + 1 :])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: the data of \S*1.bias\S* are damaged"):
        loaded_version(path)


def test_a_temporary_folder_is_no_checkpoint_and_is_cleaned_up_by_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with mock.patch(
        "fsdp_c.checkpoint.writing.write_file", side_effect=OSError(28, "No space left on device")
    ):
        with pytest.raises(CheckpointError, match="rank 0: OSError: .*No space left"):
            save(path, 1)
    assert list(tmp_path.iterdir()) == []
    left = tmp_path / ".ckpt.saving-0123456789ab"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        loaded_version(path)
    with pytest.raises(FileNotFoundError, match="not a checkpoint: it has no .metadata"):
        loaded_version(left)
    save(path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_nothing_is_flushed_too_late(tmp_path: Path) -> None:
    """Whatever a published name leads to is on the disk before the rename, and the old data go once it is,
    too."""
    path = tmp_path / "ckpt"
    done: list[tuple[str, str]] = []
    rename, unlink = os.rename, os.unlink

    def noted(descriptor: int) -> None:
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0]))

    def renamed(source: Path, target: Path) -> None:
        done.append(("rename", Path(target).name.split("-")[0]))
        rename(source, target)

    def unlinked(target: Path, **others: int) -> None:
        done.append(("unlink", Path(target).name))
        unlink(target, **others)

    patches = (
        mock.patch("os.fsync", noted),
        mock.patch("os.rename", renamed),
        mock.patch("os.unlink", unlinked),
    )
    with patches[0], patches[1], patches[2]:
        save(path, 1)
        first, done[:] = done[:], []
        save(path, 2)
    files = [("fsync", name) for name in ("__0_0.distcp", "fsdp_c.layout", ".metadata", "checksums.json")]
    beside = [("fsync", ".ckpt.saving"), ("rename", "ckpt"), ("fsync", tmp_path.name.split("-")[0])]
    assert first == [*files, *beside, ("unlink", ".ckpt.saving.lock")]
    within = [
        ("fsync", "replaced"),
        ("fsync", "fsdp_c"),
        ("fsync", "ckpt"),
        ("rename", ".metadata"),
        ("fsync", "ckpt"),
    ]
    assert done[:9] == [*files, *within]
    assert {what for what, _ in done[9:]} == {"unlink"} and {name for _, name in done[9:]} == {
        "__0_0.distcp",
        "checksums.json",
        "fsdp_c.layout",
        "replaced",
        ".saving.lock",
    }


@in_either_layout
def test_a_folder_that_cannot_be_flushed_is_told_of_once_the_checkpoint_is_there(
    in_place, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    if in_place:
        save(path, 1)

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path if in_place else tmp_path):
            if not in_place or b"fsdp_c-data-" in (path / ".metadata").read_bytes():
                raise OSError(5, "Input/output error")

    with (
        mock.patch("os.fsync", failing),
        pytest.warns(UserWarning, match=f"{re.escape(str(path))}: saved and in its place.*output"),
    ):
        save(path, 2)
    assert loaded_version(path) == 2
    assert not in_place or (path / "__0_0.distcp").exists()  # the old data stay: the old name may come back
    save(path, 3)
    assert loaded_version(path) == 3 and not (path / "__0_0.distcp").exists()


def test_a_load_looks_only_at_the_parts_of_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 7)
    model, _ = model_of(-1)
    looked_at: list[str] = []
    chunk = metadata._Reader._chunk

    def noted(self: metadata._Reader, key: str, *rest: Any) -> metadata.Chunk:
        looked_at.append(key)
        return chunk(self, key, *rest)

    without_layout = mock.patch.object(saving, "checked_layout", return_value=None)
    with mock.patch.object(metadata._Reader, "_chunk", noted), without_layout:
        checkpoint.load(model, None, path)
    assert sorted(looked_at) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
    assert all((param == 7).all() for param in model.parameters())


def test_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = model_of(1)
    checkpoint.save(model, optimizer, tmp_path / "ckpt", progress=True)
    checkpoint.load(model, optimizer, tmp_path / "ckpt", progress=True)
    shown = capsys.readouterr().err
    assert "saving: 100%" in shown and "loading: 100%" in shown


def test_bad_extra_is_refused(tmp_path: Path) -> None:
    model, _ = model_of(1)
    with pytest.raises(TypeError, match="extra: expected a dict, got list"):
        checkpoint.save(model, None, tmp_path / "ckpt", extra=[1])  # type: ignore[arg-type]
