"""Grouping of a unit's parameters into flat ones: parameters of one dtype that are trained alike share one."""

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
    """Units built in the body keep frozen parameters in flat ones of their own, with ``use_orig_params`` too.

    Then frozen parameters cost no gradient: none is allocated, packed, reduced or offloaded for them. State
    dicts have the same names and shapes. Values are the same bits on two ranks without clipping: norms, and
    sums over more ranks, are added up in another order. ``python -m fsdp_c --split-frozen`` does the same for
    unmodified scripts. All ranks build alike.
    """
    token = _splits_frozen.set(True)
    try:
        yield
    finally:
        _splits_frozen.reset(token)


def splits_frozen() -> bool:
    """True under ``split_frozen``."""
    return _splits_frozen.get() or splits_by_default


def groups_of(params: Iterable[nn.Parameter], use_orig_params: bool) -> list[list[nn.Parameter]]:
    """``params`` as they share flat ones: by dtype and ``requires_grad``, trainable first, integers last.

    One group where one flat parameter can hold them all: where their dtypes agree, and they are trainable
    alike, or are shown as the original parameters without ``split_frozen``.
    """
    groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault((param.requires_grad, param.dtype), []).append(param)
    if not splits_frozen() and use_orig_params and len({dtype for _, dtype in groups}) == 1:
        return [list(params)]
    return [groups[key] for key in sorted(groups, key=lambda key: (not key[0], not key[1].is_floating_point))]
