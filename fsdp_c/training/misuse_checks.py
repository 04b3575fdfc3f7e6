"""Checks for silent mistakes in scripts, and hints for errors that do not name the mistake.

Steps have no overhead: the checks run in the first backward, in the first backward after a registration, in
an optimizer's first step, and in the second forward. Hints are added when errors are raised.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torchs_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.flat_ranges import ranges_of
from fsdp_c.sharding.sharded_module import ShardedModule, claimed_units, handles_in, parts_of, units_of
from fsdp_c.sharding.traversal import clean_name, is_composable, named_params
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.training import replacements

_AVERAGE = (
    "param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG))"
)
_checked: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots checked since the last registration
_roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()
_unstepped: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots whose optimizer has not stepped
_step_hooks: list[RemovableHandle] = []


def watch(root: ShardedModule) -> None:
    """Schedule checks of the next backward of ``root`` (initialized), and of the first step of its optimizer."""
    _watch_registrations()
    replacements.put()
    _check_next_backward(root)
    _unstepped.add(root)
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_check_step))


@functools.cache
def _watch_registrations() -> None:
    torchs_module.register_module_module_registration_hook(_registered)
    torchs_module.register_module_parameter_registration_hook(_registered)


def _registered(module: nn.Module, name: str, added: nn.Module | nn.Parameter | None) -> None:
    if not (isinstance(added, nn.Parameter) and is_flattened(added)):
        with contextlib.suppress(TypeError):  # unhashable module
            if (reference := _roots.get(module)) is not None and (root := reference()) is not None:
                _checked.discard(root)
                _check_next_backward(root)


def _check_next_backward(root: ShardedModule) -> None:
    if (runtime := root._unit.runtime) is not None:
        runtime.unchecked = True


def _place(unit: ShardedModule) -> str:
    return f"rank {unit.rank}, unit {unit_name(unit.module)}"


# ----------------------------------------------------------------- checks


def check_backward(root: ShardedModule) -> None:
    """Raise or warn if parameters outside of units got gradients, because no hook averages them.

    Such parameters were registered after wrapping, or are ignored. Called by the runtime in C at the end of
    an ``unchecked`` backward.
    """
    if _step_hooks and not _unstepped:
        _step_hooks.pop().remove()
    units = units_of(root)
    if root in _checked or all(unit.world_size == 1 and unit._replicate_group is None for unit in units):
        return

    def is_averaged(module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel) or not is_composable(module)

    trained = {
        clean_name(name): param
        for name, param in named_params(root, is_averaged).items()
        if param.grad is not None and not is_flattened(param)
        if not (getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks)
    }
    ignored = {id(param) for unit in units for param in unit._ignored_params}
    ignored |= {id(param) for unit in units for one in unit._ignored_modules for param in one.parameters()}
    if added := [name for name, param in trained.items() if id(param) not in ignored]:
        raise RuntimeError(
            f"{_place(root)}: {first_names(added)} got gradients, but belong to no unit: they were registered after "
            "wrapping, so that each rank trains its own. Add them before wrapping; or pass them in ignored_states when "
            f"wrapping, give all ranks the same values, and average their gradients: {_AVERAGE}."
        )
    if names := [name for name, param in trained.items() if not isinstance(param, DTensor)]:
        warnings.warn(
            f"{_place(root)}: the ignored parameters {first_names(names)} got gradients, which no unit averages: each "
            "rank trains its own. Give all ranks the same values before the first step, and average the gradients: "
            f"{_AVERAGE}. If the script does so after the backward, or ranks are to differ, filter this warning.",
            stacklevel=6,
        )
    _roots.update(dict.fromkeys(root.modules(), weakref.ref(root)))
    _checked.add(root)


def _check_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    kind = type(optimizer)
    for root in list(_unstepped):
        units = units_of(root)
        own = {
            id(param) for handle in handles_in(root) for param in (*handle.script_params, *ranges_of(handle))
        }
        known = [param() for unit in units for param in unit._whole._params_before]
        if found := params.keys() & own:
            _unstepped.discard(root)
            _check_next_backward(root)  # its check removes the step hook
            low = [params[one].dtype for one in found if params[one].dtype in (torch.bfloat16, torch.float16)]
            if low and kind.__module__.startswith("torch.optim."):
                warnings.warn(
                    f"{_place(root)}: {kind.__name__} steps parameters in {low[0]}, in which small updates round to "
                    f"nothing. Wrap the model in float32, with MixedPrecision(param_dtype={low[0]}).",
                    stacklevel=3,
                )
        elif any(param is not None and id(param) in params and not is_flattened(param) for param in known):
            _unstepped.discard(root)
            warnings.warn(
                f"{_place(root)}: {kind.__name__} was made before wrapping: its parameters get no gradients, so that "
                "its steps change nothing. Create the optimizer after wrapping.",
                stacklevel=3,
            )


def warn_of_units_without_gradient(root: ShardedModule, names: list[str]) -> None:
    """Warn about units without gradients. Called once by the runtime in C, in the next forward."""
    warnings.warn(
        f"{_place(root)}: no gradient has come to the units {first_names(names)}, which have trainable parameters and "
        "ran in training mode: the loss does not depend on their outputs, these were detached, or no input of a "
        "reentrant checkpoint requires a gradient, as behind frozen embeddings, where checkpoint(..., "
        "use_reentrant=False) or enable_input_require_grads() helps. Freeze modules that are not to be trained, by "
        "requires_grad_(False), or run them under torch.no_grad().",
        stacklevel=5,
    )


# ----------------------------------------------------------------- hints for errors on shards

# kernel messages for 1-D shards and for freed parameter storage
_OF_SHARDS = re.compile(
    "1-D tensor|must be 2-D|same shape as|three dimensions|storage of size 0|not gathered"
)
# optimizer messages for shards, and for an empty list of 2-D parameters
_OF_2D_PARAMS = re.compile("2D parameters|empty parameter list")


def explaining(unit: ShardedModule, method: types.MethodType) -> types.MethodType:
    """Return ``method`` of a wrapped module, with a hint added to errors on sharded parameters."""

    @functools.wraps(method.__func__)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            name = method.__name__
            line = (
                f"({_place(unit)}: its parameters are sharded now, as {name}() is no forward. To gather them for it "
                f"call fsdp_c.register_forward_method(module, {name!r}) once, on the unit or the module that "
                "it wraps.)"
            )
            _add(error, line, parts_of(unit))
            raise

    return types.MethodType(explained, method.__self__)


def explain_in_forward(error: BaseException, unit: ShardedModule) -> None:
    """Add a hint to an exception of the unit's forward. Called by the runtime in C."""
    inner = [one for one in units_of(unit) if one not in parts_of(unit)]
    names = [one._handle.name for one in inner if one._handle is not None and one._handle.shows_sharded]
    line = (
        f"({_place(unit)}: the parameters of the units {first_names(names)} in it are sharded now, outside of their "
        "forward. If a layer of theirs was called, call the unit; or gather for the method that makes the call, by "
        "fsdp_c.register_forward_method(module, name); or wrap the layer as a unit. If they were read without a call, "
        "as nn.TransformerEncoderLayer does in eval mode, wrap the module that reads them, or call "
        "torch.backends.mha.set_fastpath_enabled(False).)"
    )
    _add(error, line, inner)


def _add(error: BaseException, line: str, units: list[ShardedModule]) -> None:
    """Append ``line`` to an error about shards, if one of ``units`` is sharded and no hint was added yet."""
    is_of_shards = _OF_SHARDS.search(str(error)) and "sharded now" not in str(error)
    are_sharded = any(unit._handle is not None and unit._handle.shows_sharded for unit in units)
    if is_of_shards and are_sharded and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{line}",)


@functools.cache
def explain_optimizers() -> None:
    """Make constructors of optimizers that reject shards for their shape mention WholeParameters."""
    for kind in (torch.optim.Optimizer, torch.optim.Muon):
        kind.__init__ = _explaining_init(kind.__init__)  # type: ignore[method-assign]


def _explaining_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def explained(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            params = [param for group in vars(self).get("param_groups", ()) for param in group["params"]]
            handles = [unit._handle for unit in claimed_units() if unit._handle is not None]
            are_shards = (
                any(map(is_flattened, params)) if params else any(one.layout.sharded for one in handles)
            )
            if are_shards and _OF_2D_PARAMS.search(str(error)) and "WholeParameters" not in str(error):
                error.args = (
                    f"{error.args[0]}\n(A rank has a 1-D part of each parameter of a FullyShardedDataParallel: "
                    f"fsdp_c.optim.WholeParameters(model, {type(self).__name__}, ...) steps each parameter whole.)",
                )
            raise

    return explained
