"""Checks for mistakes of scripts that would train wrong without an error.

Steps have no overhead: the checks run in a root's first backward, in its first backward after a registration,
and in an optimizer's first step.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torchs_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in, place_of, units_of
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
    """Warn if parameters outside of units got gradients that no hook averages.

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
        warnings.warn(
            f"{place_of(root)}: {first_names(added)} got gradients, but belong to no unit: they were registered after "
            "wrapping, so that each rank trains its own. Add them before wrapping; or give all ranks the same values, "
            f"and average the gradients: {_HOOK}. If the script does so after the backward, filter this warning.",
            stacklevel=6,
        )
    if names := [
        name for name, param in trained.items() if id(param) in ignored and not isinstance(param, DTensor)
    ]:
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
        before = {id(param()) for unit in units_of(root) for param in unit._params_before}
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
