"""Marks on parameters that the user registered in place of a unit's own.

See ``[Note: swapped parameters]`` in ``csrc/handle/writeback.c``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_c import _C

_handles = WeakIdKeyDictionary()  # module -> parameter name -> weak reference to the handle


def watch(places: Iterable[tuple[nn.Module, str]], handle: _C.Handle) -> None:
    """Notify ``handle`` of parameters registered at ``places`` from now on."""
    _listen()
    for module, name in places:
        _handles.setdefault(module, {})[name] = weakref.ref(handle)


@functools.cache
def _listen() -> None:
    register_module_parameter_registration_hook(_note)


def _note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    reference = _handles.get(module, {}).get(name)
    handle = reference and reference()
    if param is not None and handle is not None:
        param._fsdp_registered_for = handle.op_id  # type: ignore[attr-defined]  # mark on the user's parameter
        handle.mark_assigned()
