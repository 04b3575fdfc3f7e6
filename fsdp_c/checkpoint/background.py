"""Background saves: thread, process group and error reporting.

[Note: Saves in the background]
A thread of this process writes from copies that no other code modifies: see [Note: A copy beside the next
step]. One save runs at a time. Its ranks communicate over a gloo group, created by the first background save
and unregistered in torch.distributed, so that collectives of a step and ``destroy_process_group`` do not
interfere. The thread is not a daemon: the interpreter waits for it at exit. An error is raised by ``wait``,
by the next save or, without either, at exit.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store

from fsdp_c import _C
from fsdp_c.tools import phases


class BackgroundSave:
    """Running or finished save, returned by ``fsdp_c.checkpoint.save``."""

    def __init__(self, what: str, work: Callable[[], object] = lambda: None) -> None:
        """Prepare a save with ``work``, for the save's thread; a finished save without one."""
        self._what, self._work = what, work
        self._error: BaseException | None = None
        self._is_raised = False
        self._thread = threading.Thread(target=self._run, name=f"fsdp_c {what}", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # frees all that it references

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is on disk, in its place. Not collective.

        Raises the errors of ``save`` without ``background``, or TimeoutError after ``timeout`` seconds.
        """
        with phases.enter(_C.PROGRESS_SAVE):
            if self._thread.ident is not None:
                self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._what} is not finished after {timeout:g} s")
        self._is_raised = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if the save has ended, successfully or not. ``wait`` raises its error."""
        return not self._thread.is_alive()


_last: BackgroundSave | None = None


def start(what: str, work: Callable[[], object]) -> BackgroundSave:
    """Run ``work`` in the background. The last save must have ended."""
    global _last
    _last = BackgroundSave(what, work)
    _last._thread.start()
    return _last


def finish(raises: bool = True) -> None:
    """Wait for the last save. Raise its error if no call has raised it before."""
    if _last is not None:
        _last._thread.join()
        if raises and not _last._is_raised:
            _last.wait()


def _at_exit() -> None:
    try:
        finish()
    finally:
        if _last is None or _last._error is None:
            _groups.clear()  # ends their threads before the interpreter's end


atexit.register(_at_exit)


# ----------------------------------------------------------------- ranks


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the ranks of ``group``. Collective in its first call."""
    own = _groups.get(group)
    if own is None:
        store = dist.PrefixStore("fsdp_c.checkpoint", _get_process_group_store(group))
        options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
        timeout = next((each._timeout for each in options if each is not None), default_pg_timeout)
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
        own = _groups[group] = dist.ProcessGroup(store, group.rank(), group.size())
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return own
