"""A checkpoint as a folder: put in its place at once, by one writer at a time.

[Note: In place at once]
A new checkpoint is written into a folder beside its path, ``.NAME.saving-TOKEN``, and brought to the disk; a
rename then gives it its name. Where there is a folder already, be it a checkpoint, a mount point, or one with
other things in it, the checkpoint is saved in there: the data and their checksums go into a new
``fsdp_c-data-TOKEN`` of that folder, and one rename of a new ``.metadata`` over the old one publishes them.
Then what the old ``.metadata`` named and the new one does not is removed, and nothing else ever is. (Its
names lie in the new folder of data until that is done, for whoever comes after a kill.) So a kill at any time
leaves the old checkpoint or the new; whatever else is in the folder, its mode and owner are left alone.

Who saves holds a lock (flock) on ``.saving.lock`` in the folder, or on ``.NAME.saving.lock`` beside what is
not there yet; the next one raises CheckpointError before anything is touched. Under the lock what killed
saves left is removed. Folders are renamed first: if their writer lives on all the same, a zombie whose lock
the file server gave away, its own last step is a rename out of there, which then fails. Where the file system
has no flock, only what was replaced is removed.

Who loads opens the files that it needs, and begins anew if one is gone because ``.metadata`` was replaced
meanwhile: ``unless_replaced()``. From then on it reads what it has opened, whatever writers do.

This assumes a file system that all ranks share, on which a rename within a folder is atomic, fsync brings
data to stable storage, and what one host has written, synced and closed is seen by another that opens it
afterwards (NFS's close-to-open consistency). Local disks of several hosts are no such file system, and are
refused. NFS also takes open files away when another host removes them: a load raises then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
StrPath = str | os.PathLike[str]
METADATA = ".metadata"
CHECKSUMS = "checksums.json"
LAYOUT = "fsdp_c.layout"
LAYOUT_MAGIC = b"fsdp_c.layout 1\n"
FORMAT = "fsdp_c.checkpoint"  # is told by the file of checksums

_REPLACED = "replaced"  # in a folder of data: names of what its checkpoint replaced
_DATA = "fsdp_c-data-[0-9a-f]{12}"
_FILE = r"__[0-9]+_[0-9]+\.distcp"
_GONE = ".removed"
# as pickles have them: spelled out where they come first, behind a byte of length, which is no part of a
# name; two patterns of fixed beginnings, which are found at several times the speed of one
_NAMED = [re.compile(pattern.encode()) for pattern in (f"{_DATA}(?=/{_FILE})", _FILE)]
_OF_A_NAME = re.compile(rb"[\w./-]")
_EXPORTED = r"model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?"
_OWN_FILE = re.compile(
    "|".join([_FILE, _EXPORTED, *map(re.escape, (METADATA, CHECKSUMS, LAYOUT, _REPLACED))])
)
_TRIES = 100


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names rank, file and FQN."""


@contextmanager
def refusing(say: Callable[[Exception], str]) -> Iterator[None]:
    """Around reading what a stranger may have written, which can fail in any way: but for an OSError that is
    a CheckpointError, in which ``say`` says why."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(say(error)) from error


def require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


# ----------------------------------------------------------------- paths


def check_path(path: StrPath) -> None:
    """ValueError for what is no path of a file system: "s3://bucket/name" would become a folder "s3:"."""
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path of a checkpoint is empty")
    scheme = re.match("[A-Za-z][A-Za-z0-9+.-]*:/", text)
    # a Path has one slash left of two
    if scheme and (text.startswith("/", scheme.end()) or not os.path.isdir(scheme[0])):
        raise ValueError(f"{text}: an address; checkpoints are folders of a file system that all ranks share")


def absolute(path: StrPath) -> Path:
    """The same with a name, beside which there is room. Links are followed before ``..``, as systems do."""
    path = Path(path)
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def check_target(path: StrPath) -> None:
    """Raise ValueError or FileExistsError for a path to which no checkpoint can be saved without loss."""
    check_path(path)
    folder = absolute(path)
    if not folder.name:
        raise ValueError(f"{path}: not the path of a checkpoint")
    if os.path.lexists(folder) and not folder.is_dir():
        raise FileExistsError(f"{folder}: exists and is not a folder, so it is not overwritten")
    metadata = folder / METADATA
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


def locate(path: Path) -> Path:
    """``path`` if it is a checkpoint. FileNotFoundError for none."""
    if is_checkpoint(path):
        return path
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: a file; sharded checkpoints are folders")
    raise FileNotFoundError(f"{path}: not a checkpoint: it has no {METADATA} file (an interrupted copy?)")


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` has what is written last."""
    return (folder / METADATA).is_file()


def is_whole(folder: Path) -> bool:
    """Whether all is there that it names."""
    return is_checkpoint(folder) and all((folder / name).exists() for name in named_in(_metadata(folder)))


def lies_in(folder: Path, path: Path) -> bool:
    """Whether ``path`` is a file of ``folder``, and no link out of it."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def unless_replaced(path: Path, work: Callable[[], T]) -> T:
    """What ``work``, which reads the checkpoint ``path``, returns; done anew where another took its place."""
    for _ in range(_TRIES):
        before = _generation(path)
        try:
            return work()
        except (CheckpointError, OSError):
            if _generation(path) == before:
                raise
    raise CheckpointError(f"{path}: replaced {_TRIES} times while it was read")


def _generation(path: Path) -> tuple[int, ...] | None:
    """Differs from one ``.metadata`` to the next. The file is opened, as servers' attributes may be old."""
    try:
        descriptor = os.open(path / METADATA, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime_ns, found.st_size
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------- writing


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The folder to write a checkpoint at ``path`` into, for ``publish``; see [Note: In place at once].

    What is not published is removed at the end. Raises CheckpointError where someone else saves to ``path``.
    """
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        with beside(path) as temporary:
            if not path.is_dir():  # another may have been published just now
                temporary.mkdir()
                try:
                    yield temporary
                finally:
                    if temporary.exists():
                        _remove(temporary)
                return
    with _locked(path / ".saving.lock", path) as locked:
        if locked:
            _remove_leftovers(path)
        temporary = path / f"fsdp_c-data-{_token()}"
        temporary.mkdir()
        try:
            yield temporary
        except BaseException:
            if temporary.name not in named_in(_metadata(path)):
                _remove(temporary)
            raise


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """The name beside ``path`` under which one writer at a time makes it. What killed ones left goes."""
    with _locked(_lock_beside(path), path) as locked:
        if locked:
            for left in _left_beside(path):
                _remove(left)
        yield path.with_name(f".{path.name}.saving-{_token()}")


def data_file(temporary: Path, path: Path, rank: int) -> str:
    """The name of a rank's file in ``temporary``, as seen from the folder of the checkpoint ``path``."""
    name = f"__{rank}_0.distcp"
    return f"{temporary.name}/{name}" if temporary.parent == path else name


def write_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb", buffering=2**20) as file:
        for part in (content,) if isinstance(content, bytes) else content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, path: Path) -> None:
    """Make what is complete in ``temporary`` the checkpoint ``path``; see [Note: In place at once]."""
    if temporary.parent != path:
        _sync_folder(temporary)
        os.rename(temporary, path)
        sync_published(path.parent, path)
        return
    replaced = sorted({*named_in(_metadata(path)), CHECKSUMS, LAYOUT} - {temporary.name})
    write_file(temporary / _REPLACED, "\n".join(replaced).encode())
    _sync_folder(temporary)
    _sync_folder(path)
    os.rename(temporary / METADATA, path / METADATA)
    if sync_published(path, path):
        _remove_replaced(temporary, {temporary.name})


def sync_published(folder: Path, path: Path) -> bool:
    """Bring the new name ``path`` in ``folder`` to the disk; a warning where that fails: it has the name."""
    try:
        _sync_folder(folder)
        return True
    except OSError as error:
        warnings.warn(
            f"{path}: saved and in its place, but after a power failure the old one may be back: {folder} "
            f"could not be flushed to the disk ({error.strerror})",
            stacklevel=2,
        )
        return False


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _token() -> str:
    return uuid.uuid4().hex[:12]


# ----------------------------------------------------------------- one writer


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[bool]:
    """Holds the file ``lock``, and removes it; False without locks. CheckpointError if another holds it."""
    descriptor = _lock(lock, path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                if _is_at(descriptor, lock):
                    lock.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
            os.close(descriptor)


def _lock(lock: Path, path: Path) -> int | None:
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
            if _is_at(descriptor, lock):  # or its last holder has removed it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                stack.pop_all()
                return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.saving.lock")


# ----------------------------------------------------------------- what earlier saves left


def named_in(metadata: bytes) -> set[str]:
    """The folders of data and the files of ranks that a ``.metadata`` names; it is not unpickled."""
    found = (match for pattern in _NAMED for match in pattern.finditer(metadata))
    return {
        each[0].decode() for each in found if not _OF_A_NAME.match(metadata, each.start() - 1, each.start())
    }


def data_folders(metadata: bytes) -> list[str]:
    """Of what it names, the folders."""
    return sorted(name for name in named_in(metadata) if re.fullmatch(_DATA, name))


def _metadata(folder: Path) -> bytes:
    return (folder / METADATA).read_bytes() if is_checkpoint(folder) else b""


def _remove_leftovers(path: Path) -> None:
    """Remove what saves into the folder ``path`` left when they were killed."""
    metadata = _metadata(path)
    named = named_in(metadata)
    # a damaged .metadata does not tell what belonged to it
    if not metadata or (named and all((path / name).exists() for name in named)):
        for data in [each for each in path.iterdir() if re.fullmatch(f"{_DATA}({_GONE})?", each.name)]:
            if data.name in named:
                _remove_replaced(data, named)
            else:
                _remove(data)
    with contextlib.suppress(OSError, CheckpointError):  # the folder around it need not be ours
        if _lock_beside(path).exists() or _left_beside(path):
            with beside(path):
                pass


def has_data(folder: Path) -> bool:
    """Whether there are data of a checkpoint, whole or not."""
    return any(re.fullmatch(f"{_DATA}({_GONE})?|{_FILE}", each.name) for each in folder.iterdir())


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint ``path``, or what is left of one; anything else in its folder stays.
    CheckpointError where someone saves to it."""
    with _locked(path / ".saving.lock", path):
        named = named_in(_metadata(path))
        (path / METADATA).unlink(missing_ok=True)  # from here on it is none
        for each in list(path.iterdir()):
            if re.fullmatch(f"{_DATA}({_GONE})?", each.name):
                _remove(each)
            elif each.name in named or re.fullmatch(_FILE, each.name):
                each.unlink()
            elif each.name in (CHECKSUMS, LAYOUT) and _is_own(each):
                each.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def _left_beside(path: Path) -> list[Path]:
    left = re.compile(rf"\.{re.escape(path.name)}\.saving-[0-9a-f]{{12}}({_GONE})?")
    return [each for each in path.parent.iterdir() if left.fullmatch(each.name)]


def _remove_replaced(data: Path, named: set[str]) -> None:
    """Remove what the checkpoint whose folder of data this is has replaced, but for what is ``named``."""
    if not (data / _REPLACED).is_file():
        return
    for name in set((data / _REPLACED).read_text().split("\n")) - named:
        path = data.parent / name
        if re.fullmatch(_DATA, name):
            _remove(path)
        elif re.fullmatch(_FILE, name) or (name in (CHECKSUMS, LAYOUT) and _is_own(path)):
            path.unlink(missing_ok=True)
    (data / _REPLACED).unlink()


def _is_own(path: Path) -> bool:
    """Whether a file of the name of one of ours is one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(256)
    return f'"{FORMAT}"'.encode() in start or start.startswith(LAYOUT_MAGIC)


def _remove(path: Path) -> None:
    """Remove a file or folder of data to which nothing refers. What is not a checkpoint's stays in it."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        if not path.name.endswith(_GONE):
            path = path.rename(path.with_name(path.name + _GONE))
        for file in list(path.iterdir()):
            if _OWN_FILE.fullmatch(file.name):
                file.unlink()
        path.rmdir()
