"""Optimizer pre-step hook: reshards units that a forward left unsharded. Optimizers update shards."""

from __future__ import annotations

import functools
import weakref
from typing import cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c.compat.upstream import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from fsdp_c.sharding.flat_param import FlatParameter
from fsdp_c.sharding.sharded_module import ShardedModule, units_of

_register_once = functools.cache(register_optimizer_step_pre_hook)
_roots: weakref.WeakKeyDictionary[ShardedModule, None] = weakref.WeakKeyDictionary()


def watch(root: ShardedModule) -> None:
    """Expose sharded parameters of ``root`` from an optimizer's step on.

    The step updates the shards. Unsharded parameters kept after a forward are copies of them, and later
    writes to ``parameters()`` must reach the shards. Earlier writes are copied to the shards first.
    """
    if any(
        unit._use_orig_params and unit.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        for unit in units_of(root)
    ):
        _register_once(_before_step)
        _roots[root] = None


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    roots = [root for reference in _roots.keyrefs() if (root := reference()) is not None]
    runtimes = [runtime for root in roots if (runtime := root._unit.runtime) is not None]
    shown = [handle for runtime in runtimes for handle in runtime.handles_with_views]
    if shown:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for handle in shown:
            params = cast("FlatParameter", handle.flat_param)._params
            if any(id(param) in stepped for param in params or ()):
                handle.unexpose_views()
