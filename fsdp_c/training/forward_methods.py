"""Methods of a wrapped module beside ``forward`` that compute with its parameters."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fsdp_c import _C
from fsdp_c.sharding.sharded_module import ShardedModule, claimed_units, is_sharded_module, unit_around, units_of
from fsdp_c.sharding.wrap import unit_name

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
    fsdp_module = module if is_sharded_module(module) else unit_around(module)
    if fsdp_module is None:
        raise ValueError(
            f"cannot register {name!r}: {type(module).__name__} is neither a FullyShardedDataParallel nor the module "
            "that one wraps; wrap it first"
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


# ---- methods that are not registered


def explaining(fsdp_module: ShardedModule, method: types.MethodType) -> types.MethodType:
    """The same bound method of a wrapped module, whose errors on sharded parameters name the unit and the remedy."""
    function = method.__func__

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _explain(error, fsdp_module, method.__name__)
            raise

    return types.MethodType(explained, method.__self__)


def _explain(error: Exception, fsdp_module: ShardedModule, method: str) -> None:
    """Add to the message where the innermost module on the way to ``error`` has parameters that are sharded now."""
    found = _sharded_unit(error, units_of(fsdp_module))
    if found is not None:
        _add(
            error,
            *found,
            f"{unit_name(fsdp_module.module)}.{method}() is not a forward. To gather them for it call {_REMEDY}("
            f"module, {method!r}) once, on the unit or the module that it wraps",
        )


def explain_in_forward(error: BaseException, fsdp_module: ShardedModule) -> None:
    """The same for an ``error`` in the forward of the unit: of a layer called past the unit that it belongs to."""
    _explain_layer(error, units_of(fsdp_module))


@functools.cache
def explain_uncaught_errors() -> None:
    """The same, from now on, for an error that ends the script: a layer was called where no unit was in its forward."""
    show = sys.excepthook

    @functools.wraps(show)
    def explain_and_show(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        _explain_layer(error, claimed_units())
        show(kind, error, traceback)

    sys.excepthook = explain_and_show


def _explain_layer(error: BaseException, units: Iterable[ShardedModule]) -> None:
    found = _sharded_unit(error, units) if isinstance(error, (RuntimeError, IndexError)) else None
    if found is not None:
        _add(
            error,
            *found,
            "it was called outside of that unit's forward. Call the unit; or give the unit's module a method that "
            f"makes the call, and gather for it by {_REMEDY}(module, name); or wrap the layer as a unit of its own",
        )


def _add(error: BaseException, fsdp_module: ShardedModule, where: str, reason: str) -> None:
    if len(error.args) == 1 and _REMEDY not in str(error.args[0]):
        error.args = (
            f"{error.args[0]}\n(rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}: the parameters of "
            f"{where} are sharded now, because {reason}; to look at whole parameters use "
            "FullyShardedDataParallel.summon_full_params(module).)",
        )


_REMEDY = "fsdp_c.register_forward_method"


def _sharded_unit(error: BaseException, units: Iterable[ShardedModule]) -> tuple[ShardedModule, str] | None:
    """The one of ``units`` that keeps the parameters of the innermost module in the traceback, and that module's name.

    None where that unit had gathered them: it was in its own forward when the error came.
    """
    module: nn.Module | None = None
    in_forward: set[ShardedModule] = set()
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name in ("forward", "forward_method"):
            found = [frame.f_locals.get(name) for name in ("self", "fsdp_module")]
            in_forward.update(value for value in found if is_sharded_module(value))
        if isinstance(own := frame.f_locals.get("self"), nn.Module):
            module = own
        traceback = traceback.tb_next
    for inner in units:
        for info in inner._handle.flat_param._param_infos if inner._handle is not None else ():
            if info.module is module and inner not in in_forward and not _gathered(inner):
                return inner, repr(info.module_name) if info.module_name else "the unit itself"
    return None
