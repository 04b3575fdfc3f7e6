"""Methods of a wrapped module beside ``forward`` that compute with its parameters."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.construction import unit_around
from fsdp_c.traversal import is_unit, units_of
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
    layer with an error about shapes, to which the unit and this function's name are added; if it reads sizes only, it
    fails not at all, and through ``unit.module.generate(...)`` nothing is added. A method of a submodule that is not a
    unit of its own sees shards as well: wrap that submodule, or register the method of the unit that calls it.

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


# ---- methods that are not registered


def explaining(unit: Any, method: types.MethodType) -> types.MethodType:
    """The same bound method of a wrapped module, whose errors on sharded parameters name the unit and the remedy."""
    function = method.__func__

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _explain(error, unit, method.__name__)
            raise

    return types.MethodType(explained, method.__self__)


def _explain(error: Exception, unit: Any, method: str) -> None:
    """Add to the message where the innermost module on the way to ``error`` has parameters that are sharded now."""
    found = _sharded_unit(error, unit)
    if found is None or len(error.args) != 1 or _REMEDY in str(error.args[0]):
        return
    inner, where = found
    error.args = (
        f"{error.args[0]}\n(rank {inner.rank}, unit {unit_name(inner.module)}: the parameters of {where} are sharded "
        f"now, because {unit_name(unit.module)}.{method}() is not a forward. To gather them for it call "
        f"{_REMEDY}(module, {method!r}) once, on the unit or the module that it wraps; to look at whole parameters use "
        "FullyShardedDataParallel.summon_full_params(module).)",
    )


_REMEDY = "fsdp_c.register_forward_method"


def _sharded_unit(error: Exception, unit: Any) -> tuple[Any, str] | None:
    """The unit that keeps the parameters of the innermost module in the traceback, and what that module is called.

    None where that unit had gathered them: it was in its own forward when the error came.
    """
    module, in_forward = None, set()
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name in ("forward", "forward_method"):
            in_forward.update(value for name in ("self", "unit") if is_unit(value := frame.f_locals.get(name)))
        if isinstance(frame.f_locals.get("self"), nn.Module):
            module = frame.f_locals["self"]
        traceback = traceback.tb_next
    for inner in units_of(unit):
        for info in inner._handle.flat_param._param_infos if inner._handle is not None else ():
            if info.module is module and inner not in in_forward and not _gathered(inner):
                return inner, repr(info.module_name) if info.module_name else "the unit itself"
    return None
