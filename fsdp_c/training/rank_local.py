"""torch's functions that see this rank's gradients alone: total norms, and the overflow check of GradScaler.

``wrap()`` puts these wrappers in torch's places. Once ``reduces_over_ranks`` is True, which install() sets, they
give the results of the whole model; before that each warns once of what it is called with.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad

from fsdp_c.compat import misuse
from fsdp_c.sharding.common import of_several
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, claimed_units
from fsdp_c.sharding.tensor_parallel import sharding_groups
from fsdp_c.sharding.wrap import unit_name
from fsdp_c.training import grad_clipping

torchs_get_total_norm = utils.get_total_norm
torchs_unscale_grads_ = GradScaler._unscale_grads_
reduces_over_ranks = False
_warned: weakref.WeakSet[object] = weakref.WeakSet()  # optimizers and roots


def wrap() -> None:
    _put(get_total_norm, unscale_grads_)


def unwrap() -> None:
    _put(torchs_get_total_norm, torchs_unscale_grads_)


def _put(total_norm: Callable[..., Tensor], unscale_grads: Callable[..., dict[torch.device, Tensor]]) -> None:
    for module in (utils, clip_grad):
        for name in ("get_total_norm", "_get_total_norm"):
            if vars(module).get(name) in (torchs_get_total_norm, get_total_norm):
                setattr(module, name, total_norm)
    GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign]


def _warn_once(key: object, unit: ShardedModule, message: str) -> None:
    if key not in _warned and misuse.is_looked_for():
        misuse.tell(f"rank {unit.rank}, unit {unit_name(unit.module)}: {message}", is_certain=False)
        _warned.add(key)


# ----------------------------------------------------------------- total norms


@functools.wraps(torchs_get_total_norm)
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of ``tensors``, over all ranks where they are sharded gradients. torch's clip_grad_norm_ calls it."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    owners = grad_clipping.owners_of(tensors)
    if owners and reduces_over_ranks:
        total_norm = grad_clipping.total_norm_of(owners, tensors, float(norm_type), error_if_nonfinite)
        if total_norm is not None:
            return total_norm
    for root in owners if not reduces_over_ranks else ():
        _warn_once(
            root,
            root,
            "torch.nn.utils.clip_grad_norm_ and get_total_norm take the norm of this rank's shards alone, so that "
            "each rank clips by another. Call model.clip_grad_norm_(max_norm), or fsdp_c.install() first, under "
            "which torch's are right.",
        )
    return torchs_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)


# ----------------------------------------------------------------- the overflow check of GradScaler


@functools.wraps(torchs_unscale_grads_)
def unscale_grads_(
    self: GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscale this rank's gradients; returns per device whether any rank found one that is not finite."""
    units = _sharded_units(optimizer)
    found = torchs_unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
    if units and reduces_over_ranks:
        found = found or {found_inf.device: found_inf.clone()}
        reduce_found_inf(found, units[0].compute_device, _groups(units))
    elif units:
        _warn_once(
            optimizer,
            units[0],
            f"{type(self).__name__} looks for inf and NaN in this rank's shards alone, so that ranks skip other "
            f"steps of {type(optimizer).__name__} and get other scales. Use fsdp_c.ShardedGradScaler, or call "
            "fsdp_c.install() first, under which torch's is right.",
        )
    return found


def reduce_found_inf(
    found: dict[torch.device, Tensor], device: torch.device, groups: Sequence[dist.ProcessGroup | None]
) -> None:
    """Add up the findings of all devices and of all ranks of ``groups``, in place, on ``device``."""
    total = torch.stack([one.to(device) for one in found.values()]).sum()
    for group in groups:
        dist.all_reduce(total, group=group)
    for one in found.values():
        one.copy_(total)


def _sharded_units(optimizer: torch.optim.Optimizer) -> list[ShardedModule]:
    """The units with parameters of ``optimizer`` of which each rank has a part."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(is_flattened, params)):
        return []
    held = set(map(id, params))
    return [
        unit
        for unit in claimed_units()
        if (handle := unit._handle) is not None
        and grad_clipping.needs_ranks(handle)
        and not held.isdisjoint(map(id, handle.script_params))
    ]


def _groups(units: Sequence[ShardedModule]) -> list[dist.ProcessGroup]:
    """All groups over whose ranks the parameters of ``units`` are sharded or replicated."""
    groups: list[dist.ProcessGroup | None] = []
    for unit in units:
        assert unit._handle is not None
        groups += [unit.process_group, unit._replicate_group]
        for param_extension in unit._handle.flat_param._param_extensions:
            groups += sharding_groups(param_extension)
    return list(dict.fromkeys(of_several(*groups)))
