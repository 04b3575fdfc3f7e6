"""Progress of this rank (step, phase and unit): printed on SIGUSR1 and shown by torch's debug server."""

import contextlib
import ctypes
import faulthandler
import functools
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fsdp_c import _C

PATIENCE_S = 60.0
_WAITS = "rank %d %s and has waited for other ranks for %.0f s: all ranks must make this call, or it hangs"
logger = logging.getLogger(__name__)
waiting_since: dict[int, float] = {}  # start time of the current wait for other ranks, by thread


@functools.cache
def show() -> None:
    """Print progress on SIGUSR1 and show it in torch's debug server, from now on."""

    def respond(_: object, response: Any) -> None:
        response.set_content(_C.describe_progress(), "text/plain")
        response.set_status(200)

    if _C.print_progress_on_signal(dist.get_rank()):
        faulthandler.register(signal.SIGUSR1, file=2, chain=True)  # stderr, as _C.print_progress_on_signal()
    with contextlib.suppress(ImportError, ValueError):  # no debug server, or registered by an earlier import
        from torch._C._distributed_c10d import _register_handler

        # torch releases the handler after the interpreter has ended: its reference must not be the last
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(respond))
        _register_handler("fsdp_c", respond)


@contextlib.contextmanager
def enter(number: int) -> Iterator[None]:
    """Enter a phase outside of units. Warn once if a collective in it waits for ``PATIENCE_S`` seconds."""
    place, ended, thread = _C.enter_phase(number), threading.Event(), threading.get_ident()

    def warn_of_wait() -> None:
        while not ended.wait(PATIENCE_S / 4):
            if time.monotonic() - waiting_since.get(thread, time.monotonic()) > PATIENCE_S:
                logger.warning(_WAITS, dist.get_rank(), _C.PHASES[number], PATIENCE_S)
                return

    if place == 0 and dist.is_initialized() and dist.get_world_size() > 1:
        threading.Thread(target=warn_of_wait, daemon=True).start()
    try:
        yield
    finally:
        _C.leave_phase(place)
        ended.set()
