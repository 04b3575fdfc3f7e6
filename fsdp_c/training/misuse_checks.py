"""Mistakes of scripts that would train wrong without a word. A step costs nothing for it: they are looked for in the
first backward, and the first after something was registered, in an optimizer's first step and in the second forward."""

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
from fsdp_c.sharding.flat_ranges import ranges_of
from fsdp_c.sharding.sharded_module import ShardedModule, units_of
from fsdp_c.sharding.traversal import clean_name, is_composable, named_params
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.training import replacements

_AVERAGE = (
    "param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG))"
)
_checked: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots, since something was registered in them
# by module, which does not know in which tree it is
_roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()
_unstepped: weakref.WeakSet[ShardedModule] = weakref.WeakSet()  # roots
_step_hooks: list[RemovableHandle] = []


def watch(root: ShardedModule) -> None:
    """Have the next backward of ``root``, which is initialised, and the first step of its optimizer checked."""
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
    if isinstance(added, nn.Parameter) and is_flattened(added):
        return
    with contextlib.suppress(TypeError):  # a module may have no hash
        reference = _roots.get(module)
        if reference is not None and (root := reference()) is not None:
            _checked.discard(root)
            _check_next_backward(root)


def _check_next_backward(root: ShardedModule) -> None:
    if (runtime := root._unit.runtime) is not None:
        runtime.unchecked = True


def check_backward(root: ShardedModule) -> None:
    """The runtime in C calls it at the end of an ``unchecked`` backward: parameters in no unit that got gradients,
    which no hook averages, were registered after wrapping, or are ignored."""
    if _step_hooks and not _unstepped:
        _step_hooks.pop().remove()
    units = units_of(root)
    if root in _checked or all(unit.world_size == 1 and unit._replicate_group is None for unit in units):
        return
    trained = {
        clean_name(name): param
        for name, param in named_params(root, _is_averaged).items()
        if param.grad is not None and not is_flattened(param)
        if not (getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks)
    }
    ignored = {id(param) for unit in units for param in unit._ignored_params}
    ignored |= {
        id(param) for unit in units for module in unit._ignored_modules for param in module.parameters()
    }
    where = f"rank {root.rank}, unit {unit_name(root.module)}"
    if added := [name for name, param in trained.items() if id(param) not in ignored]:
        raise RuntimeError(
            f"{where}: {first_names(added)} got gradients, but belong to no unit: they were registered after wrapping, "
            "so that each rank trains its own. Add them before wrapping; or pass them in ignored_states when wrapping, "
            f"give all ranks the same values, and average their gradients: {_AVERAGE}."
        )
    if names := [name for name, param in trained.items() if not isinstance(param, DTensor)]:
        warnings.warn(
            f"{where}: the ignored parameters {first_names(names)} got gradients, which no unit averages: each rank "
            f"trains its own. Give all ranks the same values before the first step, and average the gradients: "
            f"{_AVERAGE}. If the script does so after the backward, or ranks are to differ, filter this warning.",
            stacklevel=6,
        )
    reference = weakref.ref(root)
    for module in root.modules():
        with contextlib.suppress(TypeError):
            _roots[module] = reference
    _checked.add(root)


def _is_averaged(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or not is_composable(module)


def _check_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    kind = type(optimizer)
    for root in list(_unstepped):
        where = f"rank {root.rank}, unit {unit_name(root.module)}"
        handles = [unit._handle for unit in units_of(root) if unit._handle is not None]
        own = {id(param) for handle in handles for param in (*handle.script_params, *ranges_of(handle))}
        known = [param() for unit in units_of(root) for param in unit._whole._params_before]
        if found := params.keys() & own:
            _unstepped.discard(root)
            _check_next_backward(root)  # which removes the hook
            low = [params[one].dtype for one in found if params[one].dtype in (torch.bfloat16, torch.float16)]
            if low and kind.__module__.startswith("torch.optim."):
                warnings.warn(
                    f"{where}: {kind.__name__} steps parameters in {low[0]}, in which small updates round to nothing. "
                    f"Wrap the model in float32, with MixedPrecision(param_dtype={low[0]}).",
                    stacklevel=3,
                )
        elif any(param is not None and id(param) in params and not is_flattened(param) for param in known):
            _unstepped.discard(root)
            warnings.warn(
                f"{where}: {kind.__name__} was made before wrapping, and has no parameter of the model: what it "
                "has gets no gradients, so that its steps change nothing. Make it anew after wrapping.",
                stacklevel=3,
            )


def warn_of_units_without_gradient(root: ShardedModule, names: list[str]) -> None:
    """The runtime in C calls it once, in a forward after a backward that came to none of these units."""
    warnings.warn(
        f"rank {root.rank}, unit {unit_name(root.module)}: no gradient has come to the units {first_names(names)}, "
        "which have trainable parameters and ran in training mode: the loss does not depend on their outputs, these "
        "were detached, or no input of a reentrant checkpoint requires a gradient, as behind frozen embeddings, where "
        "checkpoint(..., use_reentrant=False) or enable_input_require_grads() helps. Freeze modules that are not to be "
        "trained, by requires_grad_(False), or run them under torch.no_grad().",
        stacklevel=5,
    )
