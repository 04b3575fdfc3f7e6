"""Warnings about trainable units that get no gradient."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

from fsdp_c.compat.misuse import script_level
from fsdp_c.sharding.sharded_module import ShardedModule

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
        f"rank {rank}: no gradient has come to {shown}{more}. {why} {_FROZEN}", stacklevel=script_level()
    )
