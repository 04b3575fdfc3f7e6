"""Mistakes that show at the end of a backward: of the first one, and of the first after modules were registered.

A step costs nothing for it: the runtime in C calls ``check_backward`` where it is ``unchecked``.
"""

from __future__ import annotations

import functools
import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp_c.compat import misuse
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, units_of
from fsdp_c.sharding.traversal import clean_name, is_composable, named_params
from fsdp_c.sharding.wrap import unit_name

_roots: weakref.WeakSet[ShardedModule] = weakref.WeakSet()


def watch(root: ShardedModule) -> None:
    """Have the next backward of ``root``, which is initialised, checked, and the one after modules are registered."""
    if misuse.is_looked_for():
        _watch_registrations()
        _roots.add(root)
        _note(root)


def check_backward(root: ShardedModule) -> None:
    """The runtime in C calls it at the end of a backward, when all gradients are there."""
    _refuse_strangers(root)


def _note(root: ShardedModule) -> None:
    if (runtime := root._unit.runtime) is not None:
        runtime.unchecked = True


@functools.cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_module_registered)


def _module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    for root in _roots:  # a module does not know in which tree it is
        _note(root)


def _refuse_strangers(root: ShardedModule) -> None:
    """Parameters that were registered after wrapping: each rank would train its own."""
    units = units_of(root)
    if all(unit.world_size == 1 and unit._replicate_group is None for unit in units):
        return
    ignored_modules: set[nn.Module] = set().union(*(unit._ignored_modules for unit in units))
    ignored = {id(param) for unit in units for param in unit._ignored_params}

    def is_left_out(module: nn.Module) -> bool:
        return module in ignored_modules or isinstance(module, DistributedDataParallel) or not is_composable(module)

    strangers = [
        clean_name(name)
        for name, param in named_params(root, is_left_out).items()
        if param.grad is not None and id(param) not in ignored and not is_flattened(param) and not _has_hook(param)
    ]
    if strangers:
        misuse.tell(
            f"rank {root.rank}, unit {unit_name(root.module)}: {first_names(strangers)} got gradients, but belong to "
            "no unit: they were registered after wrapping, so that nobody reduces their gradients, and each rank "
            "trains its own. Add modules before wrapping. What is to stay outside: pass it in ignored_states when "
            "wrapping, give all ranks the same values, and reduce its gradients, for instance by param."
            "register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG)).",
            is_certain=True,
        )


def _has_hook(param: nn.Parameter) -> bool:
    """Whether somebody looks after its gradient."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks)
