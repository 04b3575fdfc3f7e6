"""Methods of a wrapped module beside ``forward`` that compute with its parameters."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.construction import unit_around
from fsdp_c.traversal import is_unit
from fsdp_c.wrap import unit_name

__all__ = ["register_forward_method"]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have the method ``name`` of a wrapped module run as its forward does, with its parameters gathered.

    ``module`` is a FullyShardedDataParallel or the module it wraps. Afterwards both ``unit.name(...)`` and
    ``unit.module.name(...)`` are collective: all ranks call them in the same order. Gradients, prefetching and mixed
    precision are those of a forward. Called amid the unit's own forward, or inside summon_full_params, the method runs
    as it is: its parameters are gathered already. Registering a method twice is the same as once.

    Without this, a method reached through the unit (``unit.generate(...)``: unknown attributes are looked up in the
    wrapped module) sees what is stored between steps: this rank's shard, 1-D or empty. It then fails in its first
    layer with an error about shapes ("mat1 and mat2 shapes cannot be multiplied", "size mismatch", "'weight' must be
    2-D"), and if it reads sizes only, it fails not at all. A method of a submodule that is not a unit of its own sees
    shards as well: wrap that submodule, or register the method of the unit that calls it.

    Raises ValueError for a module that no unit wraps, AttributeError for one without a method of that name.
    """
    unit = module if is_unit(module) else unit_around(module)
    if unit is None:
        raise ValueError(
            f"cannot register {name!r}: {type(module).__name__} is neither a FullyShardedDataParallel nor the module "
            "that one wraps; wrap it first"
        )
    wrapped = unit.module
    method = getattr(wrapped, name, None)
    if not callable(method):
        raise AttributeError(f"cannot register {name!r}: {unit_name(wrapped)} has no method of that name")
    if name in dir(type(unit)):
        raise ValueError(f"cannot register {name!r}: FullyShardedDataParallel has a {name!r} of its own")
    if not getattr(method, "_gathers_parameters", False):
        setattr(wrapped, name, _gathering(unit, method))


def _gathering(unit: Any, method: Any) -> Any:
    @functools.wraps(method)
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        if _gathered(unit):
            return method(*args, **kwargs)
        return unit._unit.forward(method, args, kwargs)

    forward_method._gathers_parameters = True  # type: ignore[attr-defined]
    return forward_method


def _gathered(unit: Any) -> bool:
    """True while the unit's parameters are there anyway: amid its forward, or shown in full."""
    state = (unit._handle or unit._unit).training_state
    return state in (_C.USE_FORWARD, _C.USE_SUMMON_FULL_PARAMS)
