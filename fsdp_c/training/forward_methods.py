"""Methods of a wrapped module beside ``forward`` that compute with its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.sharding.sharded_module import ShardedModule, is_sharded_module, unit_around
from fsdp_c.sharding.wrap import unit_name

__all__ = ["register_forward_method"]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have the method ``name`` of a wrapped module run as its forward does, with its parameters gathered.

    ``module`` is a FullyShardedDataParallel or the module it wraps. Afterwards both ``unit.name(...)`` and
    ``unit.module.name(...)`` are collective: all ranks call them in the same order. Gradients, prefetching
    and mixed precision are those of a forward. Called amid the unit's own forward, or inside
    summon_full_params, the method runs as it is: its parameters are gathered already. Registering a method
    twice is the same as once.

    Without this, a method reached through the unit (``unit.generate(...)``: unknown attributes are looked up
    in the wrapped module) sees what is stored between steps: this rank's shard, 1-D or empty. It then fails
    in its first layer with an error about shapes, to which the unit and this function's name are added; if it
    reads sizes only, it fails not at all, and through ``unit.module.generate(...)`` nothing is added. A
    method of a submodule that is not a unit of its own sees shards as well: wrap that submodule, or register
    the method of the unit that calls it.

    Raises ValueError for a module that no unit wraps, AttributeError for one without a method of that name.
    """
    fsdp_module = module if is_sharded_module(module) else unit_around(module)
    if fsdp_module is None:
        raise ValueError(
            f"cannot register {name!r}: {type(module).__name__} is neither a FullyShardedDataParallel nor "
            "the module that one wraps; wrap it first"
        )
    wrapped = fsdp_module.module
    method = getattr(wrapped, name, None)
    if not callable(method):
        raise AttributeError(f"cannot register {name!r}: {unit_name(wrapped)} has no method of that name")
    if name in dir(type(fsdp_module)):
        raise ValueError(f"cannot register {name!r}: FullyShardedDataParallel has a {name!r} of its own")
    if not getattr(method, "_gathers_parameters", False):
        setattr(wrapped, name, _gathering(fsdp_module, method))


def _gathering(fsdp_module: ShardedModule, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        if _gathered(fsdp_module):
            return method(*args, **kwargs)
        return fsdp_module._unit.forward(method, args, kwargs)

    vars(forward_method)["_gathers_parameters"] = True
    return forward_method


def _gathered(fsdp_module: ShardedModule) -> bool:
    """True while the unit's parameters are gathered anyway: inside its forward, or shown in full."""
    state = (fsdp_module._handle or fsdp_module._unit).training_state
    return state in (_C.USE_FORWARD, _C.USE_SUMMON_FULL_PARAMS)
