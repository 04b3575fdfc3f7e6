"""How much unsharded storage this process holds, with whatever model of whatever test."""

from __future__ import annotations

import gc


def live_nbytes() -> int:
    """Bytes of unsharded parameter storage alive now."""
    from fsdp_c import _C

    return _C.live_unsharded_nbytes()


def settled_nbytes() -> int:
    """What is live once models of earlier tests have gone."""
    for _ in range(2):  # a root that goes lets go of its tree: that is collected in the second round
        gc.collect()
    return live_nbytes()
