"""How much unsharded storage this process holds, with whatever model of whatever test."""

from __future__ import annotations

import gc
import time

from tests.ranks import device_type

# On a GPU the storage of the unit freed last is held back until its last use is settled.
HELD_BACK = 1 if device_type() == "cuda" else 0


def live_nbytes() -> int:
    """Bytes of unsharded parameter storage alive now."""
    from fsdp_c import _C

    return _C.live_unsharded_nbytes()


def settled_nbytes() -> int:
    """What is live once models of earlier tests have gone."""
    for _ in range(2):  # a root that goes lets go of its tree: that is collected in the second round
        gc.collect()
    return live_nbytes()


def live_nbytes_after_a_failure(*expected: int, timeout_s: float = 10.0) -> int:
    """What is live once autograd has let go of a backward that raised: on a GPU its own thread does, a little
    later."""
    deadline = time.monotonic() + timeout_s
    while live_nbytes() not in expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return live_nbytes()
