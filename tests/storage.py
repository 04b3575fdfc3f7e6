"""Bytes of unsharded storage in this process, over all models."""

from __future__ import annotations

import gc
import time

from tests.ranks import device_type

# On a GPU the storage freed last stays alive until the device has finished its last use.
HELD_BACK = 1 if device_type() == "cuda" else 0


def live_nbytes() -> int:
    """Return the bytes of unsharded parameter storage alive now."""
    from fsdp_c import _C

    return _C.live_unsharded_nbytes()


def settled_nbytes() -> int:
    """Return the live bytes after garbage collection of earlier tests' models."""
    for _ in range(2):  # a freed root releases its units, which the second round collects
        gc.collect()
    return live_nbytes()


def live_nbytes_after_a_failure(*expected: int, timeout_s: float = 10.0) -> int:
    """Wait until autograd has freed a backward that raised, and return the live bytes. On a GPU autograd's
    own thread frees it, a little later.
    """
    deadline = time.monotonic() + timeout_s
    while live_nbytes() not in expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return live_nbytes()
