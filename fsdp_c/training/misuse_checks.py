"""Checks for mistakes of scripts that would train wrong without an error, and hints in errors about shards.

Steps have no overhead: the checks run in a root's first backward, in its first backward after a registration,
in an optimizer's first step, and in a root's first forward inside DistributedDataParallel.
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
from fsdp_c.sharding.common import place_of
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in, live_units, parts_of, units_of
from fsdp_c.sharding.traversal import clean_name, is_composable, named_params
from fsdp_c.training import replacements

_HOOK = (
    "param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG))"
)
# registered once, because the result is cached
_watch_modules = functools.cache(torchs_module.register_module_module_registration_hook)
_watch_params = functools.cache(torchs_module.register_module_parameter_registration_hook)
_checked: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots checked since the last registration
_roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()
_unstepped: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots whose optimizer has not stepped
_step_hooks: list[RemovableHandle] = []
# kernels' messages for 1-D shards and for freed storage
_OF_SHARDS = re.compile(
    "1-D tensor|must be 2-D|same shape as|three dimensions|storage of size 0|not gathered"
)
# optimizers' messages for shards, and for an empty list of 2-D parameters
_OF_2D_PARAMS = re.compile("2D parameters|empty parameter list")


def watch(root: ShardedModule) -> None:
    """Schedule checks of the next backward of ``root`` (initialized), and of the first step of its optimizer."""
    _watch_modules(_registered)
    _watch_params(_registered)
    replacements.apply()
    _check_next_backward(root)
    _unstepped.add(root)
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_check_step))


def _registered(module: nn.Module, name: str, added: nn.Module | nn.Parameter | None) -> None:
    if isinstance(added, nn.Parameter) and is_flattened(added):
        return
    with contextlib.suppress(TypeError):  # unhashable module
        if (reference := _roots.get(module)) is not None and (root := reference()) is not None:
            _checked.discard(root)
            _check_next_backward(root)


def _check_next_backward(root: ShardedModule) -> None:
    if (runtime := root._unit.runtime) is not None:
        runtime.unchecked = True


def check_backward(root: ShardedModule) -> None:
    """Raise or warn if parameters outside of units got gradients that no hook averages.

    They were registered after wrapping, or are ignored. Called by C at the end of an ``unchecked`` backward.
    """
    if _step_hooks and not _unstepped:
        _step_hooks.pop().remove()
    units = units_of(root)
    if root in _checked or all(unit.world_size == 1 and unit._replicate_group is None for unit in units):
        return
    params = named_params(
        root, lambda one: isinstance(one, DistributedDataParallel) or not is_composable(one)
    )
    trained = {
        clean_name(name): param
        for name, param in params.items()
        if param.grad is not None and not is_flattened(param)
        if not (getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks)
    }
    ignored = {id(param) for unit in units for param in unit._ignored_params}
    ignored |= {id(param) for unit in units for one in unit._ignored_modules for param in one.parameters()}
    if added := [name for name, param in trained.items() if id(param) not in ignored]:
        raise RuntimeError(
            f"{place_of(root)}: {first_names(added)} got gradients, but belong to no unit: they were registered after "
            "wrapping, so that each rank trains its own. Add them before wrapping; or pass them in ignored_states when "
            f"wrapping, give all ranks the same values, and average their gradients: {_HOOK}."
        )
    if names := [name for name, param in trained.items() if not isinstance(param, DTensor)]:
        warnings.warn(
            f"{place_of(root)}: the ignored parameters {first_names(names)} got gradients, which no unit averages: "
            f"each rank trains its own. Give all ranks the same values, and average the gradients: {_HOOK}. If the "
            "script does so after the backward, or ranks are to differ, filter this warning.",
            stacklevel=6,
        )
    _roots.update(dict.fromkeys(root.modules(), weakref.ref(root)))
    _checked.add(root)


def _check_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    kind = type(optimizer)
    for root in list(_unstepped):
        own = {id(param) for handle in handles_in(root) for param in handle.script_params}
        before = {id(param()) for unit in units_of(root) for param in unit._whole._params_before}
        if params.keys().isdisjoint(own | before):
            continue
        _unstepped.discard(root)
        _check_next_backward(root)  # its check removes the step hook
        dtypes = {param.dtype for number, param in params.items() if number in own}
        low = dtypes & {torch.bfloat16, torch.float16}
        if not dtypes:
            warnings.warn(
                f"{place_of(root)}: {kind.__name__} was made before wrapping: its parameters get no gradients, so that "
                "its steps change nothing. Create the optimizer after wrapping.",
                stacklevel=3,
            )
        elif low and kind.__module__.startswith("torch.optim."):
            dtype = low.pop()
            warnings.warn(
                f"{place_of(root)}: {kind.__name__} steps parameters in {dtype}, in which small updates round to "
                f"nothing. Wrap the model in float32, with MixedPrecision(param_dtype={dtype}).",
                stacklevel=3,
            )


def warn_of_units_without_gradient(root: ShardedModule, names: list[str]) -> None:
    """Warn about units without gradients. Called once by the runtime in C, in the next forward."""
    warnings.warn(
        f"{place_of(root)}: no gradient has come to the units {first_names(names)}, which have trainable parameters "
        "and ran in training mode: the loss does not depend on their outputs, these were detached, or no input of a "
        "reentrant checkpoint requires a gradient, as behind frozen embeddings, where checkpoint(..., "
        "use_reentrant=False) or enable_input_require_grads() helps. Freeze modules that are not to be trained, by "
        "requires_grad_(False), or run them under torch.no_grad().",
        stacklevel=5,
    )


def check_ddp(root: ShardedModule, ddp: DistributedDataParallel) -> None:
    """Check that ``ddp`` averages the gradients of ``root``. Called before the first forward inside ``ddp``.

    Raises RuntimeError if ``ddp`` manages a trained parameter whose gradient is sharded or offloaded. Warns
    (UserWarning) if autograd does not reach the parameter that ``ddp`` manages.
    """
    managed = {id(param) for param in getattr(ddp, "_module_parameters", None) or ()}
    for handle in handles_in(root):
        is_whole = not handle.uses_sharded_strategy and not handle._offload_params
        is_reached = not handle._use_orig_params and not handle._uses_param_mixed_precision
        params = handle.script_params
        is_trained = id(params[0]) in managed and any(param.requires_grad for param in params)
        if (is_whole and is_reached) or not is_trained:
            continue
        if handle._use_orig_params or is_whole:  # FSDP1 trains on silently here: warn, do not raise
            kind = "original parameters" if handle._use_orig_params else "flat parameters of low precision"
            warnings.warn(
                f"rank {handle.rank}, unit {handle.name}: DistributedDataParallel never averages its gradients, "
                f"as autograd does not reach {kind}: replicas drift apart. Use HYBRID_SHARD in place of "
                "DistributedDataParallel, or a group of one rank, use_orig_params=False and full precision",
                stacklevel=2,
            )
            continue
        why = "sharded, with a different part on each rank" if handle.uses_sharded_strategy else "offloaded"
        raise RuntimeError(
            f"rank {handle.rank}, unit {handle.name}: DistributedDataParallel cannot average the gradient of its "
            f"flat parameter, which is {why}: use HYBRID_SHARD in place of DistributedDataParallel, or NO_SHARD "
            "without CPU offload"
        )


# ----------------------------------------------------------------- hints in errors about shards


def with_hint(unit: ShardedModule, method: types.MethodType) -> types.MethodType:
    """Return ``method`` of a wrapped module, with a hint added to errors on sharded parameters."""

    @functools.wraps(method.__func__)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _add_hint(error, unit, parts_of(unit), method.__name__)
            raise

    return types.MethodType(called, method.__self__)


def explain_forward_error(error: BaseException, unit: ShardedModule) -> None:
    """Add a hint to an exception of the unit's forward. Called by the runtime in C."""
    parts = parts_of(unit)
    _add_hint(error, unit, [one for one in units_of(unit) if one not in parts], "name")


def _add_hint(error: BaseException, unit: ShardedModule, read: list[ShardedModule], method: str) -> None:
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
            are_shards = any(map(is_flattened, params)) if params else bool(live_units())
            if are_shards and _OF_2D_PARAMS.search(str(error)) and "WholeParameters" not in str(error):
                error.args = (
                    f"{error.args[0]}\n(A rank has a 1-D part of each parameter of a FullyShardedDataParallel: "
                    f"fsdp_c.optim.WholeParameters(model, {type(self).__name__}, ...) steps each parameter whole.)",
                )
            raise

    return explained
