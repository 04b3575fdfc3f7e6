"""Errors that come of sharded parameters say which unit keeps them, and what to do."""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule, claimed_units, is_sharded_module, parts_of, units_of
from fsdp_c.sharding.traversal import clean_path
from fsdp_c.sharding.wrap import unit_name

_REMEDY = "fsdp_c.register_forward_method"
_WHOLE_PARAMETERS = "fsdp_c.optim.WholeParameters"
# what optimizers say of shards, and of a list of the 2-D parameters among them
_OF_2D_PARAMS = re.compile("2D parameters|empty parameter list")
# what kernels say of shards, and of views of nothing
_OF_SHARDS = re.compile("1-D tensor|1D tensor|storage of size 0|are not gathered|data pointer of Storage")
_GRAD = inspect.unwrap(torch.autograd.grad).__code__
# it explains best
_in_method: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_method", default=False)


@functools.cache
def _explain_optimizers() -> None:
    """From now on optimizers that refuse shards for their shape name the remedy."""
    for kind in (torch.optim.Optimizer, torch.optim.Muon):
        kind.__init__ = _explaining_init(kind.__init__)  # type: ignore[method-assign]


def _explaining_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def explained(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            groups = vars(self).get("param_groups", ())
            params = [param for group in groups for param in group["params"]]
            of_shards = any(map(is_flattened, params)) if params else _any_sharded()
            if of_shards and _OF_2D_PARAMS.search(str(error)) and _WHOLE_PARAMETERS not in str(error):
                error.args = (
                    f"{error.args[0]}\n(A rank has a 1-D part of each parameter of a FullyShardedDataParallel: "
                    f"{_WHOLE_PARAMETERS}(model, {type(self).__name__}, ...) steps each parameter whole.)",
                )
            raise

    return explained


def _any_sharded() -> bool:
    handles = [unit._handle for unit in claimed_units()]
    return any(handle is not None and handle.layout.sharded for handle in handles)


def explaining(fsdp_module: ShardedModule, method: types.MethodType) -> types.MethodType:
    """The same bound method of a wrapped module, whose errors on sharded parameters name unit and remedy."""
    function = method.__func__

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        outside = _in_method.set(True)
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _explain_method(error, fsdp_module, method.__name__)
            raise
        finally:
            _in_method.reset(outside)

    return types.MethodType(explained, method.__self__)


def explain_in_forward(error: BaseException, fsdp_module: ShardedModule) -> None:
    """The same for an ``error`` in the unit's forward, of a layer that was called past its unit, or of
    ``torch.autograd.grad``."""
    explain_unused(error)
    _explain_layer(error, units_of(fsdp_module))


def explain_unused(error: BaseException) -> None:
    """Add to autograd's ``error`` that an input of ``torch.autograd.grad`` is in no graph which parameters of
    units are among the inputs, and what to pass instead."""
    if len(error.args) != 1 or not str(error).endswith(
        "Set allow_unused=True if this is the desired behavior."
    ):
        return
    given = {id(one) for one in _inputs_of_grad(error)}
    for unit in claimed_units():
        if (handle := unit._handle) is None:
            continue
        own = handle.flat_param._fqns if handle.flat_param._params else ["_flat_param"]
        names = [name for name, one in zip(own, handle.script_params, strict=True) if id(one) in given]
        if names:
            error.args = (
                f"{error.args[0]}\n(rank {unit.rank}, unit {unit_name(unit.module)}: the graph of a forward "
                f"has views of gathered parameters, and not {first_names(names)} as between forwards. Read "
                "the parameter inside the forward, return it from there, and pass that to "
                "torch.autograd.grad(), which gives the whole gradient of this rank's batch. The reduced "
                "gradient of the shard is in .grad after backward().)",
            )
            return


def _inputs_of_grad(error: BaseException) -> Sequence[Any]:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not _GRAD:
        traceback = traceback.tb_next
    found = traceback.tb_frame.f_locals if traceback is not None else {}
    inputs = found.get("inputs_tuple", found.get("inputs", ()))
    return [inputs] if isinstance(inputs, torch.Tensor) else tuple(inputs)


class CallGuard:
    """What a layer's ``__call__`` calls while its unit keeps parameters sharded: explains an error there.

    It stands in ``_compiled_call_impl`` of the layer, which copies and pickles leave behind, and is taken
    away while the unit's forward runs. Called where the parameters are gathered after all (in a
    recomputation, or inside summon_full_params) it steps aside until they are sharded again.
    """

    __slots__ = ("_handle", "_layer")

    def __init__(self, handle: FlatParamHandle, layer: nn.Module) -> None:
        self._handle = weakref.ref(handle)
        self._layer = weakref.ref(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, handle = self._layer(), self._handle()
        assert layer is not None, "a layer is alive in its own call"
        if handle is not None and not handle.shows_sharded:
            handle.call_layers_directly()
        try:
            return layer._call_impl(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if not _in_method.get():
                _explain_layer(error, claimed_units())
            raise

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return types.NoneType, ()


def explain_layers(fsdp_module: ShardedModule) -> None:
    """From now on errors of the unit's layers that are called past it, anywhere, name unit and remedy.

    So until the unit has run a few training steps; after them a step costs nothing, and such calls are
    explained where the last forward was one without gradients.
    """
    explained: set[nn.Module] = set()
    for handle in (part._handle for part in parts_of(fsdp_module)):
        if handle is not None and handle.uses_sharded_strategy and handle.world_size > 1:
            _explain_optimizers()
            layers = [layer for layer in _layers(handle) if layer not in explained]
            handle.set_call_guards([(vars(layer), CallGuard(handle, layer)) for layer in layers])
            explained.update(layers)


def _layers(handle: FlatParamHandle) -> dict[nn.Module, str]:
    """The modules that show parameters of the unit, shared ones too, and their places' names in it."""
    flat_param = handle.flat_param
    own = {info.module: info.module_name for info in flat_param._param_infos}
    return {info.module: info.module_name for info in flat_param._shared_param_infos} | own


def _explain_method(error: Exception, fsdp_module: ShardedModule, method: str) -> None:
    """Add to the message where the innermost module on the way to ``error`` has sharded parameters."""
    found = _sharded_unit(error, units_of(fsdp_module))
    if found is not None:
        _add(
            error,
            *found,
            f"{unit_name(fsdp_module.module)}.{method}() is not a forward. To gather them for it call "
            f"{_REMEDY}(module, {method!r}) once, on the unit or the module that it wraps",
        )


def _explain_layer(error: BaseException, units: Iterable[ShardedModule]) -> None:
    if not isinstance(error, (RuntimeError, IndexError)):
        return
    if (found := _sharded_unit(error, units)) is not None:
        _add(
            error,
            *found,
            "it was called outside of that unit's forward. Call the unit; or give the unit's module a method "
            f"that makes the call, and gather for it by {_REMEDY}(module, name); or wrap the layer as a unit "
            "of its own",
        )
    elif _OF_SHARDS.search(str(error)) and (reading := _read_past_unit(error, units)) is not None:
        reader, inner, where = reading
        _add(
            error,
            inner,
            where,
            f"{type(reader).__name__} read them without calling that unit, as nn.TransformerEncoderLayer "
            f"does in its fast path of eval mode. Wrap the {type(reader).__name__} instead of what is in it; "
            "or, where that is the fast path, call torch.backends.mha.set_fastpath_enabled(False). "
            f"{_REMEDY}() does not help here",
        )


def _read_past_unit(
    error: BaseException, units: Iterable[ShardedModule]
) -> tuple[nn.Module, ShardedModule, str] | None:
    """The innermost module in the traceback, the unit below that keeps parameters sharded, what is there."""
    for reader, inner, layers in _keeping_sharded(error, units):
        for name, module in reader.named_modules():
            if module is not reader and module in layers:
                return reader, inner, repr(clean_path(name))
    return None


def _keeping_sharded(
    error: BaseException, units: Iterable[ShardedModule]
) -> Iterator[tuple[nn.Module, ShardedModule, dict[nn.Module, str]]]:
    """The innermost module in the traceback, a unit that keeps parameters sharded, and who shows these."""
    module, in_forward = _innermost(error)
    if module is not None:
        for inner in units:
            handle = inner._handle
            if handle is not None and inner._whole not in in_forward and handle.shows_sharded:
                yield module, inner, _layers(handle)


def _add(error: BaseException, fsdp_module: ShardedModule, where: str, reason: str) -> None:
    if len(error.args) == 1 and _REMEDY not in str(error.args[0]):
        error.args = (
            f"{error.args[0]}\n(rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}: the "
            f"parameters of {where} are sharded now, because {reason}; to look at whole parameters use "
            "FullyShardedDataParallel.summon_full_params(module).)",
        )


def _sharded_unit(error: BaseException, units: Iterable[ShardedModule]) -> tuple[ShardedModule, str] | None:
    """The one of ``units`` that keeps the innermost module's parameters, and that module's name.

    None where that unit had gathered them: it was in its own forward when the error came.
    """
    for module, inner, layers in _keeping_sharded(error, units):
        if (name := layers.get(module)) is not None:
            return inner, repr(name) if name else "the unit itself"
    return None


def _innermost(error: BaseException) -> tuple[nn.Module | None, set[ShardedModule]]:
    """The innermost module in the traceback, and the units that are amid their forward there."""
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
    return module, in_forward
