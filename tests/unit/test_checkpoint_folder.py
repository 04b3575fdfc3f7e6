"""The folder around a checkpoint: unrelated files, other writers, readers, and torch's own checkpoints."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli, contents, folder, layout_file, loading, saving, storage
from tests.checkpoints import listed, model_of, quick_disk, save, torch_save
from tests.checkpoints import loaded_version as loaded
from tests.processes import as_nobody

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*overwriting since"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
existing = pytest.mark.parametrize("exists", [False, True])
quick_disk = pytest.fixture(autouse=True)(quick_disk)


def torch_loaded(path: Path) -> int:
    state = {"model": model_of(-1)[0].state_dict(), "extra": {"version": -1}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    version = state["extra"]["version"]
    assert all((value == version).all() for value in state["model"].values())
    return version


# ----------------------------------------------------------------- other files in the folder


def test_what_is_not_the_checkpoints_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 1)
    save(path / "best", 9)
    mine = {
        "notes.txt": "x",
        "config.json": "{}",
        "checksums.json": "y",
        "__0.metadata": "z",
        "data-202401010000/0": "0",
        "fsdp_c-data-0123456789ab/notes": "n",
        ".removed/1": "1",
    }
    for name, content in mine.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)
    (tmp_path / ".run.saving-notes").write_text("s")
    (tmp_path / ".run.old").mkdir()
    path.chmod(0o2750)  # may be a mount point: a save replaces files in it, and never the folder
    best, before = listed(path / "best"), path.stat()
    for version in (2, 3):
        save(path, version)
        assert loaded(path) == version and loaded(path / "best") == 9
        assert listed(path / "best") == best
        found = listed(path)
        kept = {Path(name).name: content for name, content in found.items() if not name.startswith("best/")}
        assert {Path(name).name: content.encode() for name, content in mine.items()}.items() <= kept.items()
        own = set(found) - set(mine) - {f"best/{name}" for name in best}
        assert {Path(name).name for name in own if not name.endswith("/notes")} == {
            ".metadata",
            "__0_0.distcp",
            "fsdp_c.layout",
        }
    for name in ("st_ino", "st_mode", "st_uid", "st_gid"):
        assert getattr(path.stat(), name) == getattr(before, name), name
    assert sorted(os.listdir(tmp_path)) == [".run.old", ".run.saving-notes", "run"]


def test_a_path_is_followed_as_the_system_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with ``link/..`` leads to the parent of the link's target."""
    (tmp_path / "far" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/runs")
    monkeypatch.chdir(tmp_path)
    paths = [
        ("link/../ckpt", "far/ckpt"),
        ("link/../ckpt", "far/ckpt"),
        ("link/..", "far"),
        ("link", "far/runs"),
    ]
    for version, (path, target) in enumerate(paths):
        save(path, version)
        assert loaded(path) == loaded(target) == version
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "far" / "runs")
    save(".", 9)
    assert loaded(".") == loaded(tmp_path / "link") == 9
    assert sorted(os.listdir(tmp_path)) == ["far", "link"]


def test_a_background_save_goes_where_its_path_led_at_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    over, run = threading.Event(), checkpoint.BackgroundSave._run
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    (tmp_path / "after" / "ckpt").write_text("a file: a save to it fails")
    monkeypatch.chdir(tmp_path / "before")
    with mock.patch.object(checkpoint.BackgroundSave, "_run", lambda own: (over.wait(600), run(own))):
        handle = checkpoint.save(*model_of(1), "ckpt", extra={"version": 1}, background=True)
    monkeypatch.chdir(tmp_path / "after")
    over.set()
    handle.wait()
    assert loaded(tmp_path / "before" / "ckpt") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork with threads warns; the threads are idle
def test_a_folder_in_one_that_is_not_writable_is_saved_to_and_none_is_made_there() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mine"
        path.mkdir()
        save(Path(name) / "first", 0)  # imports modules, which may be unreadable for the other user
        assert loaded(Path(name) / "first") == 0
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        Path(name).chmod(0o555)

        def work() -> None:
            for version in (1, 2):
                save(path, version)
                assert loaded(path) == version
            with pytest.raises(PermissionError), mock.patch.object(saving, "Writer") as written:
                save(Path(name) / "other", 1)
            path.chmod(0o555)
            before = listed(path)
            with pytest.raises(PermissionError), mock.patch.object(saving, "Writer") as written:
                save(path, 3)
            assert not written.called and listed(path) == before

        try:
            as_nobody(work)
        finally:
            Path(name).chmod(0o755)


def test_what_would_be_lost_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "workspace" / ".metadata").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").write_text("title: a thesis")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / ".metadata").symlink_to("nowhere")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("workspace", "other", "dangling", "file", "link"):
        is_folder = (tmp_path / name).is_dir()
        reason = ".metadata: exists and is not a checkpoint's" if is_folder else "exists and is not a folder"
        with pytest.raises(FileExistsError, match=reason):
            save(tmp_path / name, 1)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "other" / ".metadata").read_text() == "title: a thesis"


def test_an_address_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    save("source", 1)
    for path in ("s3://bucket/run", Path("s3://bucket/run"), "gs://b", "file:///tmp/run", "HDFS+x://a/b"):
        for work in (save, lambda path, version: loaded(path)):
            with pytest.raises(ValueError, match="is a URL"):
                work(path, 1)
        assert cli.main(["verify", str(path)]) == 2
        assert "is a URL, but checkpoints are folders" in capsys.readouterr().err
    for work in (save, lambda path, version: loaded(path)):
        with pytest.raises(ValueError, match="empty"):
            work("", 1)
    assert os.listdir(tmp_path) == ["source"]
    (tmp_path / "s3:").mkdir()  # an existing folder of this name is meant
    save(Path("s3:/run"), 2)
    assert loaded("s3:/run") == 2


@existing
def test_a_save_that_fails_leaves_the_folder_as_it_was(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ckpt"
    path.parent.mkdir()
    if exists:
        save(path, 1)
    before = listed(tmp_path)
    full = OSError(28, "No space left on device")
    for name in ("writing.write_file", "writing.layout_content", "folder.with_footer", "folder.os.rename"):
        with mock.patch(f"fsdp_c.checkpoint.{name}", side_effect=full):
            with pytest.raises(CheckpointError, match="rank 0: OSError: .*No space left"):
                save(path, 2)
        # the folder of data is renamed before its removal, which failed too
        assert listed(tmp_path) == before or name == "folder.os.rename"
        assert path.exists() == exists or name == "folder.os.rename"
    save(path, 2)
    assert loaded(path) == 2 and len(listed(tmp_path)) == 3


def test_data_of_a_damaged_checkpoint_stay_until_the_new_one_is_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    content = (tmp_path / ".metadata").read_bytes()
    (data,) = tmp_path.glob("fsdp_c-data-*")
    for damaged in (content[: len(content) // 2], content.replace(data.name[-3:].encode(), b"fff")):
        (tmp_path / ".metadata").write_bytes(damaged)
        with (
            mock.patch("fsdp_c.checkpoint.writing.write_file", side_effect=OSError),
            pytest.raises(CheckpointError),
        ):
            save(tmp_path, 2)
        assert data.is_dir()
    (tmp_path / ".metadata").write_bytes(content)
    assert loaded(tmp_path) == 1


# ----------------------------------------------------------------- torch's own


def test_torch_reads_what_is_saved_and_saves_over_it(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for version in range(1, 7, 2):
        save(path, version)
        assert torch_loaded(path) == version
        torch_save(path, version + 1)
        assert loaded(path) == torch_loaded(path) == version + 1
        assert cli.main(["verify", str(path)]) == 0
    save(path, 9)
    assert loaded(path) == 9 and len(listed(path)) == 3


# ----------------------------------------------------------------- who else writes


@existing
def test_a_second_writer_is_refused_by_name_and_touches_nothing(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    if exists:
        save(path, 1)
    with folder.new_data_folder(path) as temporary:
        (temporary / "__0_0.distcp").write_bytes(b"of the first")
        before = listed(tmp_path)
        with pytest.raises(
            CheckpointError, match=f"ckpt: process {os.getpid()} on {os.uname().nodename} is saving"
        ):
            save(path, 2)
        assert listed(tmp_path) == before
        save(tmp_path / "ckpt2", 4)  # a different path
    save(path, 2)
    assert loaded(path) == 2 and sorted(os.listdir(tmp_path)) == ["ckpt", "ckpt2"]


@pytest.mark.parametrize("is_written", [False, True])
@existing
def test_a_writer_that_lost_its_lock_publishes_nothing(
    exists: bool, is_written: bool, tmp_path: Path
) -> None:
    """A file server takes the lock from a host that it cannot reach, before or during the end of the save."""
    path = tmp_path / "ckpt"
    if exists:
        save(path, 1)

    def lose() -> None:
        (path / ".saving.lock").unlink()
        save(path, 2)

    with folder.new_data_folder(path) as data:
        (data / "__0_0.distcp").write_bytes(b"1")
        lose() if not is_written else None
        syncing = once(lose, folder.sync_folder) if is_written else folder.sync_folder
        with pytest.raises(FileNotFoundError), mock.patch.object(folder, "sync_folder", syncing):
            folder.publish(data, [b"of the zombie"], {})
        assert loaded(path) == 2
        with folder.new_data_folder(path):
            lock_of_the_other = set(tmp_path.rglob("*.lock"))
    assert loaded(path) == 2 and lock_of_the_other
    assert len(listed(tmp_path)) == 3


@existing
def test_without_locks_only_what_was_replaced_is_removed(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    if exists:
        save(path, 1)
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOTSUP, "Operation not supported")):
        with folder.new_data_folder(path) as temporary:
            (temporary / "__0_0.distcp").write_bytes(b"1")
            save(path, 2)
            save(path, 3)
            assert loaded(path) == 3
            assert (temporary / "__0_0.distcp").exists()  # may belong to another job
    save(path, 4)
    assert loaded(path) == 4 and len(listed(tmp_path)) == 3
    with mock.patch("fcntl.flock", side_effect=OSError(errno.EIO, "Input/output error")):
        with pytest.raises(OSError, match="Input/output"):
            save(path, 4)


def test_a_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)
    (tmp_path / "mine").write_text("mine")
    (path / ".saving.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        save(path, 2)
    assert (tmp_path / "mine").read_text() == "mine" and loaded(path) == 1


# ----------------------------------------------------------------- who reads meanwhile


def once(work: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with a call of ``work`` after its first call."""
    pending = [work]

    def called(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if pending:
            pending.pop()()
        return result

    return called


@pytest.mark.parametrize(
    ("owner", "at"),
    [
        (storage, "read_footer"),
        (contents.Checkpoint, "size"),
        (storage, "read_layout"),
        (layout_file, "size_and_crc32"),
        (layout_file._Layout, "_read"),
        (loading, "read_checkpoint"),
    ],
)
def test_a_load_whose_checkpoint_is_replaced_begins_anew(owner: Any, at: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)
    original = getattr(owner, at)
    with mock.patch.object(owner, at, once(lambda: save(path, 2), original)):
        assert loaded(path) == 2
    if owner is not loading:
        with mock.patch.object(owner, at, once(lambda: save(path, 3), original)):
            assert cli.main(["verify", str(path)]) == 0


def test_a_load_reads_what_it_found_whatever_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)
    read = loading._Loading.read_tensors

    def replaced(self: Any) -> Any:
        save(path, 2)
        return read(self)

    with mock.patch.object(loading._Loading, "read_tensors", replaced):
        assert loaded(path) == 1
    assert loaded(path) == 2
    before = set(os.listdir("/proc/self/fd"))
    loaded(path)
    # descriptors left by earlier tests may be closed meanwhile
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_could_not_be_held_open_and_is_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, 1)
    with mock.patch("resource.getrlimit", return_value=(1, 1)):
        found = storage.read_checkpoint(path)
        found.keep_open(found.sizes)
    save(path, 2)
    (name,) = [name for name in found.sizes if name.endswith(".distcp")]
    with pytest.raises(CheckpointError, match="__0_0.distcp: disappeared while the checkpoint was read"):
        with found.open(name):
            pass
    with pytest.raises(OSError, match="Input/output error"), found.open(folder.METADATA):
        raise OSError(errno.EIO, "Input/output error")
