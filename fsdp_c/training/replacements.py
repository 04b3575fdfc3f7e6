"""Replacements of torch's functions, from the first step of a unit on or from install().

torch.compile traces this module, unlike the rest of fsdp_c (fsdp_c/sharding/compiling.py): a function that clips the
gradients of a plain module compiles as without units. Clipping those of units breaks its graph.
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
    """torch's takes the norm of this rank's shards alone; ours, under install(), that of all ranks, which call it."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for param in params:
        if getattr(param, "_fsdp_flattened", False):
            norm = grad_clipping.clip_params_(params, float(max_norm), float(norm_type), error_if_nonfinite)
            if norm is not None:
                return norm
            break
    return torchs_clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)


@functools.wraps(rank_local.torchs_get_total_norm)
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of ``tensors``, over all ranks where they are sharded gradients. torch's clip_grad_norm_ calls it."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    # the owners of the gradients are known when the compiled function runs
    if torch.compiler.is_compiling() and tensors and all(type(one) is Tensor for one in tensors):
        norm: Tensor = torch.ops.fsdp_c.total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        return norm
    return rank_local.total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def put() -> None:
    _put(get_total_norm, rank_local.unscale_grads_, rank_local.run_backward)


def take_away() -> None:
    _put(rank_local.torchs_get_total_norm, rank_local.torchs_unscale_grads_, rank_local.torchs_run_backward)


def _put(total_norm: Any, unscale_grads: Any, run_backward: Any) -> None:
    for module in (utils, clip_grad):
        for name in ("get_total_norm", "_get_total_norm"):
            if vars(module).get(name) in (rank_local.torchs_get_total_norm, get_total_norm):
                setattr(module, name, total_norm)
    GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign]
    torch.autograd._engine_run_backward = run_backward
