"""The whole parameters of a sharded model, one unit at a time: for exporters, and copies that follow the
training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fsdp_c.sharding import common
from fsdp_c.sharding.sharded_module import ShardedModule, units_with_paths
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.state.state_dict_saving import gathered_values
from fsdp_c.training.unshard_params import check_idle

__all__ = ["iter_full_params"]


def iter_full_params(
    model: nn.Module, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for every parameter, by the names of the unwrapped model's ``state_dict()``.

    One unit is gathered at a time, so that memory beyond the shards is that of the largest unit, as long as
    the caller lets go of what it got. Tensors are detached copies in the parameters' own dtype; the names of
    a shared parameter give one tensor. Parameters that no unit manages come first, as they are.

    Collective: every rank goes to the end. With ``rank0_only`` the other ranks get nothing while they take
    part; ``offload_to_cpu`` gives tensors in CPU memory. Raises AssertionError inside a forward, backward or
    ``summon_full_params``.
    """
    modules = units_with_paths(model)
    yield from _unmanaged(model, modules, rank0_only, offload_to_cpu)
    for path, module in modules:
        if module._handle is None:
            continue
        prefix = clean_name(f"{path}.") if path else ""
        with torch.no_grad(), common.bound_runtime(module):
            check_idle(module, summoned=False)
            values = gathered_values(module, rank0_only, offload_to_cpu)
        for param in common.managed_params(module._handle) if values else ():
            yield prefix + param.fqn, values[param.place]
        del values


def _unmanaged(
    model: nn.Module,
    fsdp_modules: Sequence[tuple[str, ShardedModule]],
    rank0_only: bool,
    offload_to_cpu: bool,
) -> Iterator[tuple[str, Tensor]]:
    managed = {
        (param.module, param.name)
        for _, fsdp_module in fsdp_modules
        for param in common.managed_params(fsdp_module._handle)
    }
    flat = {
        fsdp_module._handle.flat_param for _, fsdp_module in fsdp_modules if fsdp_module._handle is not None
    }
    if rank0_only and fsdp_modules and fsdp_modules[0][1].rank != 0:
        return
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or param in flat or (module, name) in managed:
                continue
            whole = param.detach()
            yield (
                clean_name(f"{path}.{name}" if path else name),
                whole.cpu() if offload_to_cpu else whole.clone(),
            )
