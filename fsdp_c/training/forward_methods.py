"""Methods of a wrapped module other than ``forward`` that use its parameters."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.sharding.sharded_module import is_sharded_module, unit_around
from fsdp_c.sharding.wrap import unit_name


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make the method ``name`` of a wrapped module unshard parameters, as its forward does.

    ``module`` is a FullyShardedDataParallel or the module that it wraps. Afterwards ``unit.name(...)`` and
    ``unit.module.name(...)`` are collective: all ranks must call them in the same order. Gradients, prefetch
    and mixed precision work as in a forward. Called during the unit's own forward, or inside
    summon_full_params, the method runs directly, because the parameters are unsharded already. Repeated
    registration has no effect.

    Without registration, a method called through the unit (``unit.generate(...)``: unknown attributes are
    looked up in the wrapped module) sees sharded parameters: 1-D or empty. Its first layer then raises a
    shape error, to which the unit and this function's name are added. Nothing is raised if the method only
    reads sizes, and nothing is added for calls through ``unit.module.generate(...)``. Methods of a submodule
    that is not a unit see shards too: wrap that submodule, or register the unit's method that calls it.

    Raises ValueError for a module without a unit around it, AttributeError without a method of that name.
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
    if getattr(method, "_unshards_parameters", False):
        return

    @functools.wraps(method)
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        state = (fsdp_module._handle or fsdp_module._unit).training_state
        if state in (_C.USE_FORWARD, _C.USE_SUMMON_FULL_PARAMS):  # unsharded already
            return method(*args, **kwargs)
        return fsdp_module._unit.forward(method, args, kwargs)

    vars(forward_method)["_unshards_parameters"] = True
    setattr(wrapped, name, forward_method)
