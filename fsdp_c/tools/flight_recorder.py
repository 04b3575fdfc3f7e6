"""The flight recorder: where each rank is, in a file per rank that survives it.

``FSDP_C_LEDGER=folder`` starts it, ``fsdp_c.where`` reads the files, which are called flight records. The
runtime in C writes phase, unit and step into a mapped page, a few stores per unit; where the file cannot be
had, a full disk for instance, a warning says so and nothing is recorded. A thread looks at the page every few
seconds: where no rank moves and they are not at one place, it logs where they are. A forked process leaves
the record of its parent alone, and keeps none of its own. For ranks to know where the others are, the folder
must be one for all: on several hosts, one on a shared file system.

Without a folder the page is in memory, and the threads tell each other by the store of the default process
group, for rank 0 to log it; ``FSDP_C_WATCH=0`` leaves that out.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.compat.errors import ranks_text, runs_text
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule
from fsdp_c.sharding.traversal import clean_path
from fsdp_c.tools.rank_entries import Entries, Entry, FolderEntries, StoreEntries, read_one

VARIABLE = "FSDP_C_LEDGER"
WATCH_VARIABLE = "FSDP_C_WATCH"
_PHASES = (  # enum recorder_phase: what a rank does
    "is between steps",
    "is in the forward of {}",
    "waits in the all-gather of {}",
    "is in the backward of {}",
    "waits in the all-gather for the backward of {}",
    "waits in the reduction of {}",
    "is saving a checkpoint",
    "is loading a checkpoint",
    "is in state_dict()",
    "is in load_state_dict()",
    "is in optim_state_dict()",
    "is in summon_full_params()",
    "waits for all ranks to wrap with sync_module_states=True",
)
_SEVERAL = {"is": "are", "waits": "wait"}  # ranks do it
_BETWEEN_STEPS, _IN_STEP = 0, 1  # phases: from the latter on those of a step, up to that of a save
_FORWARD_GATHER = 2
_TAKES_LESS = (
    "Smaller units (auto_wrap_policy=), a smaller batch and cpu_offload=CPUOffload(offload_params=True) take "
    "less; fsdp_c.plan() says what a step of the model takes."
)
_GATHERS_LESS = (
    "offload_to_cpu=True with rank0_only=True keeps what was gathered off the device; "
    "fsdp_c.iter_full_params() and fsdp_c.checkpoint.save() never hold the whole model."
)
_RAN_OUT = "memory ran out while this rank"
_SETTLING_S = 0.3
_THREAD = "fsdp_c.flight_recorder"
_LOOK_S = 2.0  # from one look at the own record to the next
_open_folder: str | None = None  # "": a record in memory
_unusable: str | None = None  # the folder in which there can be none
_closed = threading.Event()  # the thread's that looks at the open record
_thread: threading.Thread | None = None
logger = logging.getLogger(__name__)


# ----------------------------------------------------------------- writing


def keep(modules: Sequence[tuple[str, ShardedModule]]) -> None:
    """Record these units, with paths from the root, under their names, if recording is asked for."""
    _open_if_wanted()
    if _open_folder is None:
        return
    for path, module in modules:
        if module._unit.recorder_index < 0:
            module._unit.recorder_index = _C.add_recorder_name(clean_path(path) or "the root")


def _open_if_wanted() -> None:
    if _open_folder or not dist.is_initialized():
        return
    folder = os.environ.get(VARIABLE, "")
    if folder and folder != _unusable:
        _open(folder)
    elif _open_folder is None and dist.get_world_size() > 1 and os.environ.get(WATCH_VARIABLE) != "0":
        _open("")


def _open(folder: str) -> None:
    global _open_folder, _closed, _unusable
    try:
        path = _new_file(folder) if folder else None
        _C.open_flight_recorder(path, dist.get_rank(), dist.get_world_size())
    except OSError as error:  # an exception here would leave the other ranks waiting in a collective
        _unusable = folder
        warnings.warn(f"rank {dist.get_rank()}: no flight record in {folder}: {error}", stacklevel=3)
        return
    _end_thread()
    _open_folder, _closed = folder, threading.Event()
    if path is None:
        _start(_watch_by_store, _closed)
    else:
        _start(_watch, FolderEntries(Path(path), read), _closed)


def _new_file(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return str(Path(folder) / f"rank{dist.get_rank():05d}.ledger")


def _start(target: Callable[..., None], *args: Any) -> None:
    global _thread
    _thread = threading.Thread(target=target, args=args, name=_THREAD, daemon=True)
    _thread.start()


@atexit.register
def _end_thread() -> None:
    """Amid a call of the store it would be stopped in C++ when the interpreter ends."""
    _closed.set()
    if _thread is not None:
        _thread.join(_LOOK_S)


def close() -> None:
    """Record no more. The files stay."""
    global _open_folder
    _open_folder = None
    _closed.set()
    _C.close_flight_recorder()


@contextlib.contextmanager
def phase(number: int) -> Iterator[None]:
    """Record that in the body this rank is in a phase outside of its units."""
    _open_if_wanted()
    place = _C.enter_recorder_phase(number)
    try:
        yield
    finally:
        _C.leave_recorder_phase(place)


# ----------------------------------------------------------------- reading


def read(folder: str | os.PathLike[str]) -> list[Entry]:
    """The entries of all ranks in ``folder``, by rank. ValueError where there are none, or a damaged file."""
    entries = sorted(read_one(path) for path in Path(folder).glob("rank*.ledger"))
    if not entries:
        raise ValueError(f"{folder} holds no flight record: start the ranks with {VARIABLE}={folder}")
    return entries


def describe(entries: Sequence[Entry]) -> str:
    """One clause per place, the place of the fewest ranks first: the one that lags is found there."""
    places: dict[tuple[int, int, str, bool, str, bool], list[int]] = defaultdict(list)
    for entry in entries:
        places[entry.step, entry.phase, entry.unit, entry.failed, entry.process, entry.saving].append(
            entry.rank
        )
    parts = [_clause(ranks, *place) for place, ranks in sorted(places.items(), key=lambda item: len(item[1]))]
    if silent := _gaps({entry.rank for entry in entries}, entries[0].world_size):
        parts.append(f"{runs_text(silent)} kept no flight record")
    return ", ".join(parts)


def _gaps(ranks: Collection[int], world_size: int) -> list[tuple[int, int]]:
    """The runs, first and last, of ranks not among ``ranks``: as few as those, whatever a file claims."""
    known = sorted(rank for rank in ranks if rank < world_size)
    pairs = zip([-1, *known], [*known, world_size], strict=True)
    return [(before + 1, after - 1) for before, after in pairs if after - before > 1]


def _clause(
    ranks: list[int], step: int, number: int, unit: str, failed: bool, process: str, saving: bool
) -> str:
    verb, _, rest = (_PHASES[number] if number < len(_PHASES) else "is somewhere").partition(" ")
    notes = [f"step {step}", *(["its collective failed"] if failed else []), *([process] if process else [])]
    notes += ["saving a checkpoint in the background"] if saving and not process else []
    verb = verb if len(ranks) == 1 else _SEVERAL[verb]
    return f"{ranks_text(ranks)} {verb} {rest.format(unit)} ({', '.join(notes)})"


# ----------------------------------------------------------------- ranks that wait for each other


def _watch(entries: Entries, closed: threading.Event) -> None:
    """Until the record is closed, log where all ranks are once none moves and they disagree."""
    seen: list[Entry] = []
    own, looks, told = None, 0, False
    while not closed.wait(_LOOK_S):
        with contextlib.suppress(OSError, ValueError):  # somebody has removed the folder
            now = entries.own()
            if now != own:
                entries.moved()
                own, looks, told = now, 0, False
                continue
            looks += 1
            found = None if told else entries.everyone(now, looks)
            if found is None:
                continue
            seen, before = found, seen
            told = seen == before and _disagree(seen) and (looks >= entries.patience or _collide(seen))
            if told:
                logger.warning(
                    "rank %d has not moved for %.0f s: %s. What is collective is for all ranks to call, as "
                    "state_dict(), summon_full_params, saves and loads are; fsdp_c.join(model, batches) is "
                    "for unequal numbers of batches.",
                    now.rank,
                    looks * _LOOK_S,
                    describe(seen),
                )


def _watch_by_store(closed: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the group is gone, and the store with it, or it has no other
        _watch(StoreEntries(), closed)


def _coarse(phase: int) -> int:
    """All phases of a step as one."""
    return min(phase, _IN_STEP) if phase < _C.RECORDER_SAVE else phase


def _collide(entries: Sequence[Entry]) -> bool:
    """Whether ranks wait for each other in different places, which no rank between steps can end."""
    return len({(one.step, _coarse(one.phase)) for one in entries if one.phase != _BETWEEN_STEPS}) > 1


def _disagree(entries: Sequence[Entry]) -> bool:
    """Whether some are in a step, and others in another one, between steps or elsewhere, or have ended."""
    places = {(entry.step, _coarse(entry.phase)) for entry in entries}
    waits = any(entry.phase != _BETWEEN_STEPS for entry in entries)
    return waits and (len(places) > 1 or any(entry.process for entry in entries))


# ----------------------------------------------------------------- in errors


def explain(error: BaseException, number: int, step: int, handle: FlatParamHandle, enqueued: bool) -> None:
    """Add to a collective's error, in place, of which unit and phase it was and where the other ranks are.

    The runtime in C calls it. Only RuntimeError, as backends raise it, and while the collective is being
    enqueued only what nobody else raises, or that memory has run out; what user code raises stays as it is.
    """
    if isinstance(error, RuntimeError if enqueued else dist.DistError) or _is_of_memory(error):
        _explain(error, f", step {step}", _PHASES[number].format(handle.name))


def _is_of_memory(error: BaseException) -> bool:
    """Without a caching allocator torch raises another type than OutOfMemoryError, as backends do."""
    is_text = isinstance(error, RuntimeError) and "out of memory" in str(error)
    return is_text or isinstance(error, torch.OutOfMemoryError)


@contextlib.contextmanager
def gathering(*handles: FlatParamHandle) -> Iterator[None]:
    """For a body that gathers units outside of a step: adds to an error that there is no memory for them."""
    try:
        yield
    except RuntimeError as error:
        if _is_of_memory(error):
            others = len(handles) - 1
            more = f" and {others} unit{'s' * (others > 1)} after it" if others else ""
            _explain(error, "", f"gathers {handles[0].name}{more}", remedy=_GATHERS_LESS)
        raise


@contextlib.contextmanager
def told_of_memory(handle: FlatParamHandle) -> Iterator[None]:
    """For a body that takes the memory of a unit's first gather: adds to an error that there is none."""
    try:
        yield
    except RuntimeError as error:
        if _is_of_memory(error):
            explain(error, _FORWARD_GATHER, 0, handle, False)
        raise


def _read_settled(folder: str) -> list[Entry]:
    """Wait briefly: a connection closes a moment before the process that had it counts as ended."""
    deadline = time.monotonic() + _SETTLING_S
    while True:
        entries = read(folder)
        if any(entry.process for entry in entries) or time.monotonic() > deadline:
            return entries
        time.sleep(_SETTLING_S / 10)


@contextlib.contextmanager
def explained(doing: str, of_step: bool = True) -> Iterator[None]:
    """For a body that only calls collectives, outside of units: adds to RuntimeErrors what they were for.

    Without ``of_step`` a thread beside the training calls them, and where that is does not count as failed.
    """
    try:
        yield
    except RuntimeError as error:
        if dist.is_initialized():
            _explain(error, "", f"is {doing}", of_step)
        raise


def _explain(
    error: BaseException, step: str, doing: str, of_step: bool = True, remedy: str = _TAKES_LESS
) -> None:
    is_memory = _is_of_memory(error)
    if of_step and not is_memory:
        _C.note_recorder_failure()
    if len(error.args) != 1 or _RAN_OUT in str(error):
        return
    what = _RAN_OUT if is_memory else "a collective failed or timed out while this rank"
    text = f"{error}\nrank {dist.get_rank()}{step}: {what} {doing}."
    if is_memory:
        text += f" {remedy}"
    elif not _open_folder:
        text += f" Start the ranks with {VARIABLE}=folder to be told where the others are."
    else:
        with contextlib.suppress(OSError, ValueError):
            text += f" By the flight records, {describe(_read_settled(_open_folder))}."
        text += f" python -m fsdp_c.where {_open_folder} shows where they are now."
    error.args = (text,)
