"""Grouping of a unit's parameters: parameters of equal dtype and ``requires_grad`` share a flat parameter."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator

import torch
from torch import nn

splits_by_default = False  # set by ``python -m fsdp_c --split-frozen``
_splits_frozen = contextvars.ContextVar("_splits_frozen", default=False)


@contextlib.contextmanager
def split_frozen() -> Iterator[None]:
    """Put frozen parameters into flat parameters of their own, for units built in the body.

    Applies with ``use_orig_params=True`` too. Frozen parameters then cost no gradient memory, packing,
    reduction or offload. State dicts keep their names and shapes. Results are bitwise equal on two ranks
    without clipping; norms, and sums over more ranks, are added in another order. ``python -m fsdp_c
    --split-frozen`` does the same for unmodified scripts. All ranks must build alike.
    """
    token = _splits_frozen.set(True)
    try:
        yield
    finally:
        _splits_frozen.reset(token)


def splits_frozen() -> bool:
    """Return True under ``split_frozen`` or ``--split-frozen``."""
    return _splits_frozen.get() or splits_by_default


def groups_of(params: Iterable[nn.Parameter], use_orig_params: bool) -> list[list[nn.Parameter]]:
    """Split ``params`` by dtype and ``requires_grad``, one group per flat parameter.

    Trainable groups come first, integer groups last. With ``use_orig_params`` and without ``split_frozen``,
    parameters of one dtype form a single group even if some are frozen.
    """
    groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault((param.requires_grad, param.dtype), []).append(param)
    if not splits_frozen() and use_orig_params and len({dtype for _, dtype in groups}) == 1:
        return [list(params)]
    return [groups[key] for key in sorted(groups, key=lambda key: (not key[0], not key[1].is_floating_point))]
