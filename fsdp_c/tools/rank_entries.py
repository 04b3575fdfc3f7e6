"""From where a rank's thread of the flight recorder has the entries of all ranks: a folder, or the store."""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_c import _C

_PROCESS_STATES = {  # proc(5); a killed process stays as Z until its parent asks for it
    "T": "the process is stopped",
    "X": "the process has ended",
    "Z": "the process has ended",
}


class Entry(NamedTuple):
    """What one rank recorded last."""

    rank: int
    world_size: int
    step: int
    phase: int
    unit: str
    failed: bool  # a collective failed there
    process: str  # "the process has ended" or "the process is stopped", where it is on this host
    events: int = 0  # how many places it has entered
    saving: bool = False  # a checkpoint, in the background


def read_one(path: Path | None) -> Entry:
    """Of the file ``path``, or with None of this process's memory. OSError or ValueError for none."""
    rank, world_size, pid, step, phase, unit, failed, host, events, saving = _C.read_flight_recorder(path)
    is_here = path is not None and host == socket.gethostname()
    process = _process_state(pid) if is_here else ""
    where = unit or "a unit without a name"
    return Entry(rank, world_size, step, phase, where, failed, process, events, saving)


def _process_state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        state = "X"
    return _PROCESS_STATES.get(state, "")


class Entries(Protocol):
    """What the thread of one rank asks every few seconds."""

    patience: int  # so many looks are waited for ranks between steps, which may come by themselves

    def own(self) -> Entry: ...

    def moved(self) -> None:
        """This rank is at another place than at the last look."""

    def everyone(self, own: Entry, looks: int) -> list[Entry] | None:
        """Those of all ranks, if it is time to read them: this rank has not moved for so many looks."""


class FolderEntries:
    """Read by each rank at the first look, the second, fourth, eighth and so on: all ranks of a large job may
    be amid a long save."""

    patience = 0

    def __init__(self, path: Path, read: Callable[[Path], list[Entry]]) -> None:
        self._path, self._read = path, read

    def own(self) -> Entry:
        return read_one(self._path)

    def moved(self) -> None:
        pass

    def everyone(self, own: Entry, looks: int) -> list[Entry] | None:
        return None if looks & (looks - 1) else self._read(self._path.parent)


class StoreEntries:
    """A rank that does not move puts its entry into the default group's store, once; rank 0 reads them when
    all are there.

    Over a connection of its own, which no collective's set-up waits for. RuntimeError where the store has no
    second connection, or where it or the group is gone.
    """

    patience = 8

    def __init__(self) -> None:
        self._group = weakref.ref(distributed_c10d._get_default_group())
        self._store: dist.Store | None = None
        self._is_told = False

    def own(self) -> Entry:
        return read_one(None)

    def moved(self) -> None:
        if self._is_told:
            self._put(dist.get_rank(), "")

    def everyone(self, own: Entry, looks: int) -> list[Entry] | None:
        if not self._is_told:
            self._put(own.rank, json.dumps(own))
        if own.rank != 0:
            return None
        keys = [_key(rank) for rank in range(own.world_size)]
        if not self._connection().check(keys):
            return None
        texts = self._connection().multi_get(keys)
        return [Entry(*json.loads(text)) for text in texts] if all(texts) else None

    def _put(self, rank: int, text: str) -> None:
        self._connection().set(_key(rank), text)
        self._is_told = bool(text)

    def _connection(self) -> dist.Store:
        if self._group() is not dist.group.WORLD:
            raise RuntimeError("the process groups are others by now")
        if self._store is None:
            self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # of torch 2.10 on
        return self._store


def _key(rank: int) -> str:
    return f"fsdp_c/where/{rank}"
