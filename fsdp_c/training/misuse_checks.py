"""Mistakes that show in a backward: at the end of the first, or of the first after something was registered.

A step costs nothing for it: the runtime in C calls ``check_backward`` where it is ``unchecked``. Of units that
get no gradient it warns once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from fsdp_c.compat import misuse
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.buffers import LOWERED, lowered_frequencies
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.flat_ranges import ranges_of
from fsdp_c.sharding.sharded_module import ShardedModule, units_of
from fsdp_c.sharding.traversal import clean_name, is_composable, named_params
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.training import rank_local

# by module
_roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedModule]] = weakref.WeakKeyDictionary()


def watch(root: ShardedModule) -> None:
    """Have the next backward of ``root``, which is initialised, checked, and the one after modules or
    parameters are registered."""
    if misuse.is_looked_for():
        _watch_registrations()
        rank_local.wrap()
        _note(root)


def check_backward(root: ShardedModule) -> None:
    """The runtime in C calls it at the end of a backward, when all gradients are there."""
    _follow(root)
    _check_unmanaged(root)
    _warn_of_stale_optimizers(root)


def _note(root: ShardedModule) -> None:
    if (runtime := root._unit.runtime) is not None:
        runtime.unchecked = True


@functools.cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_registered)
    register_module_parameter_registration_hook(_registered)


def _registered(module: nn.Module, name: str, added: nn.Module | nn.Parameter | None) -> None:
    if isinstance(added, nn.Parameter) and is_flattened(added):
        return  # a unit's own, where the module's class may notice that it is shown
    with contextlib.suppress(TypeError):  # a module may have no hash
        reference = _roots.get(module)
        if reference is not None and (root := reference()) is not None:
            _note(root)


def _follow(root: ShardedModule) -> None:
    """A module does not know in which tree it is."""
    reference = weakref.ref(root)
    for module in root.modules():
        with contextlib.suppress(TypeError):
            _roots[module] = reference


def _check_unmanaged(root: ShardedModule) -> None:
    """Parameters outside of all units that got gradients: those registered after wrapping, and ignored ones.

    No rank knows whether the script averages the gradients of ignored parameters after the backward, and
    comparing them would need all ranks, which may ignore other modules: so a warning, at no cost in later steps.
    """
    units = units_of(root)
    if all(unit.world_size == 1 and unit._replicate_group is None for unit in units):
        return
    ignored_modules: set[nn.Module] = set().union(*(unit._ignored_modules for unit in units))
    ignored = {id(param) for unit in units for param in unit._ignored_params}

    def is_averaged(module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel) or not is_composable(module)

    trained = {
        clean_name(name): param
        for name, param in named_params(root, is_averaged).items()
        if param.grad is not None
        and not is_flattened(param)
        # hooks may average the gradient
        and not (getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks)
    }
    if not trained:
        return
    owned = named_params(root, lambda module: module in ignored_modules or is_averaged(module)).values()
    added = set(map(id, owned)) - ignored
    if strangers := [name for name, param in trained.items() if id(param) in added]:
        misuse.tell(
            f"rank {root.rank}, unit {unit_name(root.module)}: {first_names(strangers)} got gradients, but "
            "belong to no unit: they were registered after wrapping, so that nobody reduces their gradients, "
            "and each rank trains its own. Add modules and parameters before wrapping. What is to stay "
            "outside: pass it in ignored_states when wrapping, give all ranks the same values, and reduce its "
            "gradients, for instance by param.register_post_accumulate_grad_hook(lambda param: "
            "dist.all_reduce(param.grad, dist.ReduceOp.AVG)).",
            is_certain=True,
        )
    replicated = {name: param for name, param in trained.items() if not isinstance(param, DTensor)}
    if names := [name for name, param in replicated.items() if id(param) not in added]:
        misuse.tell(
            f"rank {root.rank}, unit {unit_name(root.module)}: the ignored parameters {first_names(names)} got "
            "gradients, which no unit averages: each rank trains its own. Give all ranks the same values before "
            "the first step, and average the gradients in each, for instance by "
            "param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, "
            "dist.ReduceOp.AVG)). If the script does so after the backward, or ranks are to differ, filter this "
            "warning.",
            is_certain=False,
        )


def _warn_of_stale_optimizers(root: ShardedModule) -> None:
    """Optimizers made before wrapping, or of a module on meta, unless one holds what is trained."""
    before = {id(param): param for unit in units_of(root) for param in _take_params_before(unit)}
    if not before:
        return
    handles = [unit._handle for unit in units_of(root) if unit._handle is not None]
    own = {id(param) for handle in handles for param in handle.script_params}
    own |= {id(part) for handle in handles for part in ranges_of(handle)}
    stale = []
    for optimizer in gc.get_objects():
        if issubclass(type(optimizer), Optimizer):  # isinstance would ask proxies
            held = {
                id(param) for group in vars(optimizer).get("param_groups", ()) for param in group["params"]
            }
            if not held.isdisjoint(own):
                return
            if not held.isdisjoint(before):
                stale.append(type(optimizer).__name__)
    if stale:
        misuse.tell(
            f"rank {root.rank}, unit {unit_name(root.module)}: {' and '.join(stale)} was made before "
            "wrapping, and no optimizer holds the model's parameters: what it holds gets no gradients, so "
            "that its steps change nothing, and stays in memory whole. Make the optimizer of "
            "model.parameters() after wrapping.",
            is_certain=False,
        )


def _take_params_before(unit: ShardedModule) -> Iterator[nn.Parameter]:
    """Those that are alive still, although the unit has others in their places."""
    references, unit._whole._params_before = unit._whole._params_before, []
    yield from (param for one in references if (param := one()) is not None and not is_flattened(param))


def warn_of_lowered_frequencies(root: ShardedModule, modules: Sequence[tuple[str, ShardedModule]]) -> None:
    """Said before buffers are cast, at lazy initialisation."""
    if misuse.is_looked_for() and (names := lowered_frequencies(modules)):
        where = f"rank {root.rank}, unit {unit_name(root.module)}"
        misuse.tell(f"{where}: {first_names(names)} are frequencies, {LOWERED}.", is_certain=False)


# ----------------------------------------------------------------- units without gradients

_FROZEN = "Modules that are not to be trained are best frozen, by requires_grad_(False), or run under torch.no_grad()."
_NAMES_SHOWN = 5
_REENTRANT = CheckpointFunction.forward.__code__


def is_in_reentrant_checkpoint() -> bool:
    """True if the caller was called by a reentrant checkpoint's forward, which runs without gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame is not None


def warn_of_units_cut_off(root: ShardedModule, names: list[str]) -> None:
    """No gradient can come to these units: nothing that they return requires one. The runtime in C calls it
    once, after the first backward that could not reach them."""
    _warn(
        root.rank,
        names,
        "They have trainable parameters and ran in training mode, but none of their outputs requires a "
        "gradient. In a reentrant checkpoint that is so where no input requires one, after frozen embeddings "
        "for instance: use checkpoint(..., use_reentrant=False), or let the inputs require gradients, with "
        "enable_input_require_grads() of transformers' models or x.requires_grad_().",
    )


def warn_of_units_left_out(root: ShardedModule, names: list[str]) -> None:
    """The last backward did not pass through these units, although it could have. The runtime in C calls it
    once, in the forward after that."""
    _warn(
        root.rank,
        names,
        "They have trainable parameters and ran in training mode with gradients enabled, but the backward "
        "did not pass through them: the loss does not depend on their outputs, or these were detached on the "
        "way to it.",
    )


def _warn(rank: int, names: list[str], why: str) -> None:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    warnings.warn(
        f"rank {rank}: no gradient has come to {shown}{more}. {why} {_FROZEN}",
        stacklevel=misuse.script_level(),
    )
