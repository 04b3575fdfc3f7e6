"""A checkpoint is the old one, the new one, or refused: kills, flipped bytes, torn files, half copies."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli, folder
from tests.checkpoints import fill, save_versions

KILLS = 60


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


def save(path: Path, version: int) -> None:
    checkpoint.save(*model_of(version), path, extra={"version": version})


def loaded_version(path: Path) -> int:
    """What is there; an assertion fails if it is not of one piece."""
    model, optimizer = model_of(-1)
    extra = checkpoint.load(model, optimizer, path)
    assert values_of(model, optimizer) == {extra["version"]}
    return extra["version"]


def saver(path: Path, first: int, report: int) -> None:
    """In a child: one save after the other, telling which are done."""
    model, optimizer = model_of(first)
    save_versions(model, optimizer, path, first, report)


def killed_saver(path: Path, first: int, delay: float) -> list[str]:
    """What the child told before it was killed, ``delay`` seconds after it began to save."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads: they are idle
        child = os.fork()
    if child == 0:
        try:
            saver(path, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    first_told = os.read(reading, 4096).decode()
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        return (first_told + told.read()).split("\n")


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.timeout(280)
def test_a_kill_at_any_time_leaves_the_old_checkpoint_or_the_new(can_exchange: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    rng = random.Random(0)
    save(path, 0)
    current, partial, kept = 0, 0, 0
    exchange = folder._exchange if can_exchange else lambda one, other: False
    with mock.patch.object(folder, "_exchange", exchange):
        for _ in range(KILLS // 2):
            told = killed_saver(path, current + 1, 10 ** rng.uniform(-3.5, -1.0))
            done = [int(line.split()[1]) for line in told if line.startswith("done")]
            begun = [int(line.split()[1]) for line in told if line.startswith("begin")]
            low, high = max([current, *done]), max([current, *begun])
            current = loaded_version(path)
            assert low <= current <= high
            kept += current == low < high
            partial += any(tmp_path.glob(".ckpt.saving-*"))
        save(path, current + 1)
    assert kept and partial  # some kills did hit a save
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_kill_between_two_renames_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)

    class Killed(BaseException):
        pass

    original = os.rename

    def killed_rename(source: Any, target: Any) -> None:
        if Path(target) == path:
            raise Killed
        original(source, target)

    with mock.patch.object(folder, "_exchange", return_value=False), mock.patch("os.rename", killed_rename):
        with pytest.raises(BaseException):  # noqa: B017
            save(path, 2)
    assert not path.exists() and loaded_version(path) == 1
    save(path, 3)
    assert loaded_version(path) == 3
    save(path, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def files_of(path: Path) -> list[Path]:
    found = sorted(path.iterdir())
    assert [file.name for file in found] == [".metadata", "__0_0.distcp", "checksums.json"]
    return found


def outcome(path: Path) -> str:
    """Either what was saved, or refused: anything else fails."""
    try:
        assert loaded_version(path) == 7
        return "loaded"
    except CheckpointError as error:
        assert str(path) in str(error)
        return "refused"


def test_a_flipped_byte_anywhere_is_refused_or_harmless_and_always_found_by_verify(tmp_path, capsys) -> None:
    path, work = tmp_path / "ckpt", tmp_path / "work"
    save(path, 7)
    rng = random.Random(0)
    outcomes = []
    for file in files_of(path):
        content = file.read_bytes()
        for position in rng.sample(range(len(content)), 70):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(path, work)
            flipped = bytearray(content)
            flipped[position] ^= 1 << rng.randrange(8)
            (work / file.name).write_bytes(flipped)
            outcomes.append(outcome(work))
            if file.name != "checksums.json":  # a space more or less there is no damage
                assert cli.main(["verify", str(work)]) in (1, 2)
    capsys.readouterr()
    assert outcomes.count("refused") > 150


def test_a_torn_or_missing_file_is_refused(tmp_path: Path) -> None:
    path, work = tmp_path / "ckpt", tmp_path / "work"
    save(path, 7)
    for file in files_of(path):
        size = file.stat().st_size
        for length in (0, 1, size // 2, size - 1):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(path, work)
            os.truncate(work / file.name, length)
            assert outcome(work) == "refused"
        (work / file.name).unlink()
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
    with mock.patch("fsdp_c.checkpoint.storage.write_file", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(CheckpointError, match="rank 0: OSError: .*No space left"):
            save(path, 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".ckpt.saving-abc").mkdir()
    (tmp_path / ".ckpt.saving-abc" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        loaded_version(path)
    with pytest.raises(FileNotFoundError, match="not a checkpoint: it has no .metadata"):
        loaded_version(tmp_path / ".ckpt.saving-abc")
    save(path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="is not a checkpoint, so it is not overwritten"):
        save(tmp_path / "mine", 1)
    with pytest.raises(FileExistsError, match="not a folder"):
        save(tmp_path / "mine" / "thesis.tex", 1)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", 3)
    assert loaded_version(tmp_path / "empty") == 3


def test_everything_is_on_disk_before_the_rename(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def publish(temporary: Path, final: Path) -> None:
        assert set(synced) == {file.name for file in temporary.iterdir()}
        synced.clear()
        original(temporary, final)

    original = folder.publish
    with mock.patch("os.fsync", noted), mock.patch("fsdp_c.checkpoint.storage.publish", publish):
        save(path, 1)
    assert synced[0].startswith(".ckpt.saving-") and synced[1] == tmp_path.name


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
