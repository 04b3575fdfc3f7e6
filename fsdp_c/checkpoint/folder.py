"""A checkpoint as a folder: made under another name, then put in its place at once; and what is in one, checked.

[Note: In place at once]
Files are written to a folder beside the final one, ``.NAME.saving-...``, and brought to the disk. A rename then gives
it its name; where a checkpoint is there already, the two are exchanged, which is one step for the file system, and the
old one is removed under the other name. Where the file system cannot exchange (NFS), the old one becomes ``.NAME.old``
first, and between the two renames it is what is read. So a kill at any time leaves the old checkpoint or the new.

This assumes a file system that all ranks share, on which a rename within a folder is atomic, fsync brings data to
stable storage, and what one host has written, synced and closed is seen by another that opens it afterwards (NFS's
close-to-open consistency). Local disks of several hosts are no such file system, and are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from pathlib import Path

METADATA = ".metadata"
CHECKSUMS = "checksums.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names rank, file and FQN."""


def locate(path: Path) -> Path:
    """Where the checkpoint ``path`` is; see [Note: In place at once]. FileNotFoundError for none."""
    for folder in (path, _replaced(path)):
        if is_checkpoint(folder):
            return folder
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: a file; sharded checkpoints are folders")
    raise FileNotFoundError(f"{path}: not a checkpoint: it has no {METADATA} file (an interrupted copy?)")


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` has what is written last."""
    return (folder / METADATA).is_file()


def _replaced(path: Path) -> Path:
    full = Path(os.path.abspath(path))
    return full.parent / f".{full.name}.old"


def check_target(path: Path) -> None:
    """Raise FileExistsError for what is there and no checkpoint: it would be replaced."""
    if not path.name:
        raise ValueError(f"{path}: not the path of a checkpoint")
    if path.is_dir() and not path.is_symlink():
        if not is_checkpoint(path) and any(path.iterdir()):
            raise FileExistsError(f"{path}: exists and is not a checkpoint, so it is not overwritten")
    elif path.exists() or path.is_symlink():
        raise FileExistsError(f"{path}: exists and is not a folder, so it is not overwritten")


def make_temporary(path: Path) -> Path:
    """A new folder beside ``path``. What earlier interrupted saves of ``path`` left is removed."""
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{_escaped(path.name)}.saving-*"):
        shutil.rmtree(left, ignore_errors=True)
    if is_checkpoint(path):
        shutil.rmtree(_replaced(path), ignore_errors=True)
    temporary = path.with_name(f".{path.name}.saving-{uuid.uuid4().hex[:12]}")
    temporary.mkdir()
    return temporary


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Give a complete folder its name; see [Note: In place at once]."""
    sync_folder(temporary)
    if not is_checkpoint(path):
        os.rename(temporary, path)  # an empty folder gives way
        sync_folder(path.parent)
        return
    if _exchange(temporary, path):
        old = temporary
    else:
        old = _replaced(path)
        os.rename(path, old)
        os.rename(temporary, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(temporary: Path) -> None:
    """Remove what was not published."""
    shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: exchanging {one} and {other}")
