"""Replacements for torch functions, active from a unit's first step or install() on.

Unlike the rest of fsdp_c, this module is traced by torch.compile (see fsdp_c/sharding/compiling.py): a
function that clips gradients of a plain module compiles as without fsdp_c. Clipping gradients of units causes
a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad

from fsdp_c.training import grad_clipping, rank_local

torchs_clip_grad_norm_ = utils.clip_grad_norm_


@functools.wraps(torchs_clip_grad_norm_)
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip as torch's function does, by the total norm over all ranks after install().

    Collective for sharded gradients. torch's function uses the norm of this rank's shards.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(getattr(param, "_fsdp_flattened", False) for param in params):
        norm = grad_clipping.clip_params_(params, float(max_norm), float(norm_type), error_if_nonfinite)
        if norm is not None:
            return norm
    return torchs_clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)


@functools.wraps(rank_local.torchs_get_total_norm)
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of ``tensors``, over all ranks for sharded gradients after install()."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    # Owners of the gradients are looked up when the compiled function runs, not while tracing.
    if torch.compiler.is_compiling() and tensors and all(type(one) is Tensor for one in tensors):
        norm: Tensor = torch.ops.fsdp_c.total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        return norm
    return rank_local.total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def apply() -> None:
    _set(get_total_norm, rank_local.unscale_grads_)


def revert() -> None:
    _set(rank_local.torchs_get_total_norm, rank_local.torchs_unscale_grads_)


def _set(total_norm: Any, unscale_grads: Any) -> None:
    for module in (utils, clip_grad):
        for name in ("get_total_norm", "_get_total_norm"):
            if vars(module).get(name) in (rank_local.torchs_get_total_norm, get_total_norm):
                setattr(module, name, total_norm)
    GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign]
