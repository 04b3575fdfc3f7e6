"""Methods of a wrapped module other than ``forward`` that use its parameters, and hints in their errors."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.common import place_of
from fsdp_c.sharding.sharded_module import ShardedModule, is_sharded_module, parts_of, unit_around, units_of
from fsdp_c.sharding.wrap import unit_name

__all__ = ["explain_in_forward", "explaining", "register_forward_method"]

# kernels' messages for 1-D shards and for freed storage
_OF_SHARDS = re.compile(
    "1-D tensor|must be 2-D|same shape as|three dimensions|storage of size 0|not gathered"
)


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
    """Return True if the unit's parameters are unsharded: during its forward or inside summon_full_params."""
    state = (fsdp_module._handle or fsdp_module._unit).training_state
    return state in (_C.USE_FORWARD, _C.USE_SUMMON_FULL_PARAMS)


# ----------------------------------------------------------------- hints in errors


def explaining(unit: ShardedModule, method: types.MethodType) -> types.MethodType:
    """Return ``method`` of a wrapped module, with a hint added to errors on sharded parameters."""

    @functools.wraps(method.__func__)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _explain(error, unit, parts_of(unit), method.__name__)
            raise

    return types.MethodType(explained, method.__self__)


def explain_in_forward(error: BaseException, unit: ShardedModule) -> None:
    """Add a hint to an exception of the unit's forward. Called by the runtime in C."""
    parts = parts_of(unit)
    _explain(error, unit, [one for one in units_of(unit) if one not in parts], "name")


def _explain(error: BaseException, unit: ShardedModule, read: list[ShardedModule], method: str) -> None:
    """Add a hint to ``error`` of a kernel, unless it has one, if a unit of those that may be ``read`` is sharded."""
    names = [one._handle.name for one in read if one._handle is not None and one._handle.shows_sharded]
    is_of_shards = _OF_SHARDS.search(str(error)) and "sharded now" not in str(error)
    if names and is_of_shards and len(error.args) == 1:
        error.args = (
            f"{error.args[0]}\n({place_of(unit)}: the parameters of {first_names(names)} are sharded now, outside of "
            "the forward of their unit. Call the unit; or call fsdp_c.register_forward_method(module, "
            f"{method!r}) once, for the method that uses them; or wrap the layer that was called, or the module that "
            "reads them without a call, as nn.TransformerEncoderLayer does in eval mode. There "
            "torch.backends.mha.set_fastpath_enabled(False) helps, too.)",
        )
