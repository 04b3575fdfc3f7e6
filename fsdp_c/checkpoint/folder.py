"""Folder of a checkpoint: publication by one rename, lock, footer of ``.metadata``, and sibling checkpoints.

[Note: In place at once]
A save creates a new data folder, ``fsdp_c-data-TOKEN``, inside the checkpoint's folder. Ranks write their
files into it, the first rank the layout and a new ``.metadata``. One rename of that file over the old
``.metadata`` publishes the checkpoint; then the data folder named by the old one is removed. A kill at any
time leaves the old checkpoint or the new. Other files in the folder, its mode and its owner are unchanged. A
folder without ``.metadata`` is not a checkpoint: a first save is running there, or was killed.

The saving process holds a lock (flock) on ``.saving.lock`` in the folder; a second process raises
CheckpointError before any change. Data of killed saves is removed under the lock. Data folders are renamed
before removal: a zombie writer, whose lock the file server has released, publishes by a rename out of its
folder, which then fails. Only the replaced data is removed on a file system without flock.

Readers open the files that they need, and start again if one is missing because ``.metadata`` was replaced
meanwhile: ``retry_if_replaced()``. Opened files are then read regardless of writers.

The file system must be shared by all ranks, rename atomically within a folder, and flush data to stable
storage by fsync. A file that one host has written, synced and closed must be visible to another host that
opens it afterwards (NFS's close-to-open consistency). Local disks of several hosts are refused. NFS also
removes open files when another host unlinks them: a load raises then.

[Note: The end of .metadata]
fsdp_c's ``.metadata`` has a footer after its pickle, ignored by readers of pickles: a line of JSON (the data
folder, size and CRC-32 of each file in it), and a last line with the length of the
JSON and a CRC-32 of all bytes before. One rename thus replaces data and checksums together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from fsdp_c.checkpoint.pieces import crc32_of

T = TypeVar("T")
StrPath = str | os.PathLike[str]
METADATA = ".metadata"
LAYOUT = "fsdp_c.layout"
LOCK = ".saving.lock"

DATA = re.compile("fsdp_c-data-[0-9a-f]{12}")  # name of a data folder
_REMOVED = ".removed"  # suffix of a data folder's name during its removal
_FILE = r"__[0-9]+_[0-9]+\.distcp"
_OWN_FILE = re.compile("|".join([_FILE, re.escape(METADATA), re.escape(LAYOUT)]))
_LAST_LINE = re.compile(rb"fsdp_c 1 ([0-9a-f]{10}) ([0-9a-f]{8})\n")
_LAST_LINE_NBYTES, _CRC32_NBYTES = 29, 9
_TRIES = 100


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names rank, file and FQN."""


@contextmanager
def convert_errors(problem: str) -> Iterator[None]:
    """Context of parsing untrusted data: raise CheckpointError for any error but OSError."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{problem} ({error})") from error


def require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


# ----------------------------------------------------------------- paths


def check_path(path: StrPath) -> None:
    """Raise ValueError for a path outside of file systems: "s3://bucket/name" would become a folder "s3:"."""
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path of a checkpoint is empty")
    scheme = re.match("[A-Za-z][A-Za-z0-9+.-]*:/", text)
    # Path reduces two slashes to one
    if scheme and (text.startswith("/", scheme.end()) or not os.path.isdir(scheme[0])):
        raise ValueError(
            f"{text}: is a URL, but checkpoints are folders of a file system that all ranks share"
        )


def absolute_path(path: StrPath) -> Path:
    """Return the absolute path, with a name and a parent folder. Links are resolved before ``..``, as by the system."""
    path = Path(path)
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def check_target(target: Path) -> None:
    """Raise ValueError or FileExistsError for a path where a save is impossible or would overwrite other data."""
    if not target.name:
        raise ValueError(f"{target}: not the path of a checkpoint")
    if os.path.lexists(target) and not target.is_dir():
        raise FileExistsError(f"{target}: exists and is not a folder, so it is not overwritten")
    metadata = target / METADATA
    if os.path.lexists(metadata) and not _is_of_dcp(metadata):
        raise FileExistsError(
            f"{metadata}: exists and is not a checkpoint's, so it is not overwritten: move it away"
        )


def _is_of_dcp(metadata: Path) -> bool:
    if not metadata.is_file():
        return False
    with metadata.open("rb") as file:
        start = file.read(4096)
    return not start or b"torch.distributed.checkpoint.metadata" in start


def check_is_checkpoint(path: Path) -> None:
    """Raise FileNotFoundError or NotADirectoryError for a path that is not a checkpoint."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: is a file, but sharded checkpoints are folders")
    if not is_checkpoint(path):
        raise FileNotFoundError(
            f"{path}: not a checkpoint: it has no {METADATA} file (an interrupted save or copy?)"
        )


def is_checkpoint(folder: Path) -> bool:
    """Return True if ``folder`` has ``.metadata``, the file that is published last."""
    return (folder / METADATA).is_file()


def is_complete(folder: Path) -> bool:
    """Return True if ``.metadata`` exists, and, if fsdp_c wrote it, all data files that it names."""
    if not is_checkpoint(folder):
        return False
    with contextlib.suppress(CheckpointError):
        footer = read_footer(folder)
        return footer is None or all(
            (folder / footer.data / name).exists() for name in footer.files if name != LAYOUT
        )
    return False


def retry_if_replaced(path: Path, work: Callable[[], T]) -> T:
    """Return the result of ``work``, a reader of the checkpoint ``path``; repeat it if the checkpoint was replaced."""
    for _ in range(_TRIES):
        before = _generation(path)
        try:
            return work()
        except (CheckpointError, OSError):
            if _generation(path) == before:
                raise
    raise CheckpointError(f"{path}: replaced {_TRIES} times while it was read")


def _generation(path: Path) -> tuple[int, ...] | None:
    """Return an identity of ``.metadata``. The file is opened, because a file server's attributes may be stale."""
    with contextlib.suppress(OSError), (path / METADATA).open("rb") as file:
        found = os.fstat(file.fileno())
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


# ----------------------------------------------------------------- footer of .metadata


class Footer(NamedTuple):
    """Footer of a ``.metadata`` written by fsdp_c: see [Note: The end of .metadata]."""

    data: str  # name of the data folder
    # (size, CRC-32 of all bytes except the data of pieces) of its files, by name
    files: dict[str, tuple[int, int]]
    identity: tuple[int, int] = (0, 0)  # size and CRC-32 of ``.metadata``


def with_footer(pickled: Iterable[bytes], footer: Footer) -> Iterator[bytes]:
    """Yield the parts of a ``.metadata`` with footer."""
    text = json.dumps(footer[:2]).encode() + b"\n"
    crc32 = 0
    for part in itertools.chain(pickled, (text, b"fsdp_c 1 %010x " % len(text))):
        crc32 = zlib.crc32(part, crc32)
        yield part
    yield b"%08x\n" % crc32


def read_footer(folder: Path, *, compare: bool = False) -> Footer | None:
    """Return the footer, None for a ``.metadata`` without one. Raise CheckpointError for damage.

    ``compare``: verify the checksum of the whole file.
    """
    path = folder / METADATA
    with convert_errors(f"{path}: damaged at its end"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _LAST_LINE_NBYTES))
        if (line := _LAST_LINE.fullmatch(file.read(_LAST_LINE_NBYTES))) is None:
            return None
        nbytes, crc32 = (int(each, 16) for each in line.groups())
        if compare and crc32_of(file, 0, size - _CRC32_NBYTES) != crc32:
            raise CheckpointError(f"{path}: damaged: its checksum is not the one in its last line")
        file.seek(max(0, size - _LAST_LINE_NBYTES - nbytes))
        data, files = json.loads(file.read(min(nbytes, size)))
        names = (DATA.fullmatch(data), *map(_OWN_FILE.fullmatch, files))
        require(all(names) and all(len(info) == 2 for info in files.values()), "it names other files")
        return Footer(data, {name: tuple(info) for name, info in files.items()}, (size, crc32))


def _valid_footer(folder: Path) -> Footer | None:
    """Return the footer, None for a missing or damaged ``.metadata``, or torch's."""
    with contextlib.suppress(CheckpointError):
        return read_footer(folder, compare=True) if is_checkpoint(folder) else None
    return None


# ----------------------------------------------------------------- writing


@contextmanager
def new_data_folder(path: Path) -> Iterator[Path]:
    """Yield a new data folder for a checkpoint at ``path``, for ``publish``. See [Note: In place at once].

    Removed unless published. Raises CheckpointError if another process saves to ``path``.
    """
    with _hold_lock(path) as locked:
        if locked:
            _remove_leftovers(path)
        data = path / f"fsdp_c-data-{uuid.uuid4().hex[:12]}"
        data.mkdir()
        try:
            yield data
        except BaseException:
            footer = _valid_footer(path)
            if footer is None or footer.data != data.name:
                _remove(data)
            raise


def file_of(rank: int) -> str:
    """Return the name of a rank's file in the data folder."""
    return f"__{rank}_0.distcp"


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a file and flush it to disk. Return its size and CRC-32."""
    size = crc32 = 0
    with path.open("wb", buffering=2**20) as file:
        for part in content:
            file.write(part)
            size, crc32 = size + len(part), zlib.crc32(part, crc32)
        file.flush()
        os.fsync(file.fileno())
    return size, crc32


def size_and_crc32(path: Path) -> tuple[int, int]:
    """Return size and CRC-32 of a whole file, which need not fit into memory."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size, crc32_of(file, 0, size)


def publish(data: Path, pickled: Iterable[bytes], files: dict[str, tuple[int, int]]) -> None:
    """Write ``.metadata``, rename it into place, and remove the replaced data. See [Note: In place at once].

    ``files``: see ``Footer``.
    """
    path, old = data.parent, _valid_footer(data.parent)
    write_file(data / METADATA, with_footer(pickled, Footer(data.name, files)))
    sync_folder(data)
    sync_folder(path)
    os.rename(data / METADATA, path / METADATA)
    try:
        sync_folder(path)
    except OSError as error:
        warnings.warn(
            f"{path}: saved and in its place, but a power failure could restore the old one: the "
            f"folder could not be flushed to the disk ({error.strerror})",
            stacklevel=2,
        )
        return
    if old:
        _remove(path / old.data)
    _remove_files_of_torch(path)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------- lock


@contextmanager
def _hold_lock(path: Path) -> Iterator[bool]:
    """Hold the lock in the folder ``path``. Yield False on a file system without locks.

    The folder is created if missing, and removed again if empty. Raises CheckpointError if another process
    holds the lock.
    """
    is_new = not path.is_dir()
    descriptor = _lock(path)
    try:
        if is_new:
            sync_folder(path.parent)
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                if _is_at(descriptor, path / LOCK):
                    (path / LOCK).unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # releases it also in a process forked meanwhile
            os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):
                path.rmdir()


def _lock(path: Path) -> int | None:
    lock = path / LOCK
    while True:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:  # a failed first save has just removed the folder
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"
                raise CheckpointError(
                    f"{path}: {holder} is saving there (a job that still runs?): save elsewhere, or end it "
                    "first"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK):
                    raise
                lock.unlink(missing_ok=True)
                return None
            if _is_at(descriptor, lock):  # otherwise the last holder has removed it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                stack.pop_all()
                return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


# ----------------------------------------------------------------- removal


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint ``path``, or the leftovers of one; other files in its folder are kept.

    Raises CheckpointError if a save to it is running.
    """
    with _hold_lock(path):
        (path / METADATA).unlink(missing_ok=True)  # not a checkpoint from here on
        for data in _data_in(path):
            _remove(data)
        _remove_files_of_torch(path)
    with contextlib.suppress(OSError):
        path.rmdir()


def _remove_leftovers(path: Path) -> None:
    """Remove data of killed saves and of replaced checkpoints: all that ``.metadata`` does not name."""
    footer = _valid_footer(path)
    if is_checkpoint(path) and footer is None and not _files_of_torch(path):
        return  # damaged: its data may be the only copy
    for data in _data_in(path):
        if footer is None or data.name != footer.data:
            _remove(data)
    if footer is not None:
        _remove_files_of_torch(path)


def _data_in(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if re.fullmatch(f"{DATA.pattern}({_REMOVED})?", each.name)]


def _files_of_torch(path: Path) -> list[Path]:
    """Return the files that torch's DCP writes into the checkpoint's folder itself."""
    return [each for each in path.iterdir() if re.fullmatch(_FILE, each.name)]


def _remove_files_of_torch(path: Path) -> None:
    for each in _files_of_torch(path):
        each.unlink(missing_ok=True)


def _remove(data: Path) -> None:
    """Remove an unreferenced data folder. Files of other programs are kept in it."""
    with contextlib.suppress(OSError):
        if data.is_symlink() or not data.is_dir():
            data.unlink()
            return
        if not data.name.endswith(_REMOVED):
            data = data.rename(data.with_name(data.name + _REMOVED))
        for file in [*data.iterdir()]:
            if _OWN_FILE.fullmatch(file.name):
                file.unlink()
        data.rmdir()


# ----------------------------------------------------------------- sibling checkpoints: runs/lm/step-000200


# (text before the last number, the number, text after it)
_NAME = re.compile(r"(?!\.)(.*?)([0-9]+)([^0-9]*)")


def latest(folder: StrPath) -> Path | None:
    """Return the complete checkpoint in ``folder`` whose name has the largest last number, such as step-200.

    Returns None if no checkpoint is complete. A checkpoint of fsdp_c is complete if all files that it names
    exist, one of torch if it has ``.metadata``; ``load`` detects damage. Not collective: call it before a
    save may run, so that all ranks find the same.
    """
    check_path(folder)
    try:
        names = [(_NAME.fullmatch(path.name), path) for path in Path(folder).iterdir()]
    except FileNotFoundError:
        return None
    found = sorted(((int(name[2]), path) for name, path in names if name), reverse=True)
    return next((path for _, path in found if is_complete(path)), None)


def check_keep(path: Path, keep: int | None) -> None:
    """Raise ValueError if ``keep`` does not select checkpoints next to ``path``."""
    if keep is None:
        return
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint that is saved. Pass 1 or more, or None")
    if _NAME.fullmatch(path.name) is None:
        raise ValueError(
            f"keep={keep}: {path} has no number in its name, by which older checkpoints are found. "
            "Choose a name such as step-100"
        )


def remove_older(path: Path, keep: int) -> None:
    """Remove all but ``keep`` checkpoints: ``path`` and those with the largest numbers.

    Only siblings whose names differ from its name in the last number are considered, links to folders
    excepted. Warns if one cannot be removed.
    """
    own = _NAME.fullmatch(path.name)
    assert own is not None
    others = []
    for each in path.parent.iterdir():
        name = _NAME.fullmatch(each.name)
        is_folder = each != path and each.is_dir() and not each.is_symlink()
        if name and name.group(1, 3) == own.group(1, 3) and is_folder:
            others.append((int(name[2]), each))
    kept = 1
    for number, each in sorted(others, reverse=True):
        try:
            if is_complete(each) and kept < keep:
                kept += 1
            # an incomplete one with a larger number may be another job's save
            elif is_complete(each) or number < int(own[2]):
                if _data_in(each) or _files_of_torch(each) or (each / LOCK).exists():
                    remove_checkpoint(each)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{each}: could not be removed for keep={keep}: {error}", stacklevel=2)
