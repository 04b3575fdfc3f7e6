"""Functions of the runtime under upstream's private names, in whose place outside code puts its own.

The runtime in C does not call them. Where somebody assigns another function to one of these names, it calls that one,
at the places and with the arguments of upstream, and what it wraps is what stands here (H-025).
"""

import sys
from types import ModuleType
from typing import Any

from fsdp_c import _C


def _reshard(state: Any, handle: Any, free_unsharded_flat_param: bool) -> None:
    """Show the shard again, and free the unsharded storage if wanted."""
    handle.reshard(free_unsharded_flat_param)


def _post_backward_reshard(state: Any, handle: Any, *unused: Any) -> None:
    """In a backward, when the unit's gradients have been packed: reshard, and prefetch the next unit."""
    state._unit.post_backward_reshard()


_ORIGINALS = {"_reshard": _reshard, "_post_backward_reshard": _post_backward_reshard}


class Watched(ModuleType):
    """A module that tells the runtime what is put in the place of its functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _ORIGINALS:
            _C.replace(name, None if value is _ORIGINALS[name] else value)


sys.modules[__name__].__class__ = Watched
