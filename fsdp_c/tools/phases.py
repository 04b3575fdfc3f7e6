"""Progress of this rank (step, phase and unit): printed on SIGUSR1 and shown by torch's debug server."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.sharding.sharded_module import ShardedModule
from fsdp_c.sharding.traversal import clean_path

PATIENCE_S = 60.0
logger = logging.getLogger(__name__)
_is_shown = False  # true once SIGUSR1 and the debug server print progress
_waiting_since: dict[int, float] = {}  # start time of the current wait for other ranks, by thread


def name_units(modules: Sequence[tuple[str, ShardedModule]]) -> None:
    """Register names of units, given with their paths from the root. The first call enables progress output."""
    global _is_shown
    for path, module in modules:
        if module._unit.name_index < 0:
            module._unit.name_index = _C.add_unit_name(clean_path(path) or "the root")
    if _is_shown or not dist.is_initialized():
        return
    _is_shown = True
    if _C.print_progress_on_signal(dist.get_rank()):
        faulthandler.register(signal.SIGUSR1, file=2, chain=True)  # stderr, as _C.print_progress_on_signal()
    with contextlib.suppress(ImportError, ValueError):  # no debug server, or registered by an earlier import
        from torch._C._distributed_c10d import _register_handler

        # torch releases the handler after the interpreter has ended: its reference must not be the last
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_respond))
        _register_handler("fsdp_c", _respond)


def _respond(_: object, response: Any) -> None:
    response.set_content(_C.describe_progress(), "text/plain")
    response.set_status(200)


@contextlib.contextmanager
def enter(number: int) -> Iterator[None]:
    """Enter a phase outside of units. Warn once if a collective in it waits for ``PATIENCE_S`` seconds."""
    place, ended = _C.enter_phase(number), threading.Event()
    if place == 0 and dist.is_initialized() and dist.get_world_size() > 1:
        arguments = (number, threading.get_ident(), ended)
        threading.Thread(target=_warn_of_wait, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        _C.leave_phase(place)
        ended.set()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark a body that waits for other ranks. The end of a nested wait ends the outer one."""
    _waiting_since[threading.get_ident()] = time.monotonic()
    try:
        yield
    finally:
        _waiting_since.pop(threading.get_ident(), None)


def _warn_of_wait(number: int, thread: int, ended: threading.Event) -> None:
    while not ended.wait(PATIENCE_S / 4):
        if time.monotonic() - _waiting_since.get(thread, time.monotonic()) > PATIENCE_S:
            logger.warning(
                "rank %d %s and has waited for other ranks for %.0f s: all ranks of its process group must make "
                "this call. A call under `if rank == 0:` hangs.",
                *(dist.get_rank(), _C.PHASES[number], PATIENCE_S),
            )
            return
