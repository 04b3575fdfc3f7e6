"""Replacements for torch functions that see only this rank's shards.

Installed by fsdp_c/training/replacements.py. Total norms and GradScaler's overflow check see only this rank's
gradients. With ``reduces_over_ranks``, set by install(), the replacements return results for the whole model;
otherwise they warn once per model or optimizer.
"""

from __future__ import annotations

import functools
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import utils

from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.holders import group_of_model, ranks_of
from fsdp_c.sharding.sharded_module import ShardedModule, live_units, place_of, root_units
from fsdp_c.training import grad_clipping

torchs_get_total_norm = utils.get_total_norm
torchs_unscale_grads_ = GradScaler._unscale_grads_
reduces_over_ranks = False
_warned: weakref.WeakSet[object] = weakref.WeakSet()  # optimizers and roots with a warning


def _warn_once(key: object, unit: ShardedModule, message: str, stacklevel: int) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"{place_of(unit)}: {message}", stacklevel=stacklevel)


# ----------------------------------------------------------------- total norms


def total_norm(
    tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """Return the norm of ``tensors``, over all ranks for sharded gradients."""
    owners = grad_clipping.owners_of(tensors)
    if owners and reduces_over_ranks:
        return grad_clipping.total_norm_of(owners, tensors, float(norm_type), error_if_nonfinite)
    for root in owners:
        _warn_once(
            root,
            root,
            "torch.nn.utils.clip_grad_norm_ and get_total_norm take the norm of this rank's shards "
            "only, so that each rank clips by a different norm. Call "
            "model.clip_grad_norm_(max_norm), or fsdp_c.install() first, under which torch's are "
            "right.",
            stacklevel=6,  # caller of clip_grad_norm_
        )
    return torchs_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def _fake_total_norm(
    tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return tensors[0].new_empty((), dtype=dtype)


if not hasattr(torch.ops.fsdp_c, "total_norm"):  # already defined by an earlier import
    _library = torch.library.Library("fsdp_c", "FRAGMENT")
    _library.define(
        "total_norm(Tensor[] tensors, Scalar norm_type, bool error_if_nonfinite, bool? foreach) -> Tensor"
    )
    _library.impl("total_norm", total_norm, "CompositeExplicitAutograd")
    _library.impl("total_norm", _fake_total_norm, "Meta")


# ----------------------------------------------------------------- GradScaler's overflow check


@functools.wraps(torchs_unscale_grads_)
def unscale_grads_(
    self: GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscale this rank's gradients. Return per device a nonzero tensor if any rank found inf or NaN."""
    units = _sharded_units(optimizer)
    found = torchs_unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
    if units and reduces_over_ranks:
        found = found or {found_inf.device: found_inf.clone()}
        reduce_found_inf(found, units[0].compute_device, group_of_optimizer(optimizer))
    elif units:
        _warn_once(
            optimizer,
            units[0],
            f"{type(self).__name__} looks for inf and NaN in this rank's shards only, so that ranks "
            f"skip different steps of {type(optimizer).__name__} and get different scales. Use "
            "fsdp_c.ShardedGradScaler, or call fsdp_c.install() first, under which torch's is right.",
            stacklevel=5,  # caller of step()
        )
    return found


def reduce_found_inf(
    found: dict[torch.device, Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Sum ``found`` over its devices and the ranks of ``group``, in place. Collective, on ``device``."""
    total = torch.stack([one.to(device) for one in found.values()]).sum()
    dist.all_reduce(total, group=group)
    for one in found.values():
        one.copy_(total)


def _sharded_units(optimizer: torch.optim.Optimizer) -> list[ShardedModule]:
    """Return the units with sharded parameters in ``optimizer``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(is_flattened, params)):
        return []
    held = set(map(id, params))
    return [
        unit
        for unit in live_units()
        if (handle := unit._handle) is not None
        and grad_clipping.needs_ranks(handle)
        and not held.isdisjoint(map(id, handle.script_params))
    ]


_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, dist.ProcessGroup | None] = (
    weakref.WeakKeyDictionary()
)


def group_of_optimizer(optimizer: torch.optim.Optimizer) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the units of ``optimizer``; None for all ranks."""
    if optimizer not in _groups:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        roots = [root for root in root_units() if not held.isdisjoint(map(id, root.parameters()))]
        found = {group and ranks_of(group): group for group in map(group_of_model, roots)}
        _groups[optimizer] = found.popitem()[1] if len(found) == 1 else None
    return _groups[optimizer]
