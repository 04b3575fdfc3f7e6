"""Optional modules, which a rank need not run in a step: experts, and the encoders of modalities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from fsdp_c import _C
from fsdp_c.sharding.sharded_module import ShardedModule, is_sharded_module
from fsdp_c.sharding.traversal import check_module

Module = TypeVar("Module", bound=nn.Module)
_MARK = "_fsdp_c_optional"


def optional(module: Module) -> Module:
    """Mark ``module``, before it is wrapped, as one that a rank need not run in every step. Returns it.

    A unit that some rank does not run would leave the other ranks waiting for ever. The units that wrapping
    makes of ``module`` and of what is in it take part in their collectives on every rank instead, run or not:
    they are gathered and reduced with the unit around them, the innermost one that is not optional, which
    every rank runs as before. Inside of its forward they run in any order, any number of times or never; what
    a rank computes with them must reach the loss through its outputs.

    Gradients are those of a run in which each rank runs all of ``module``: the average over all ranks, with
    zeros of those that did not run it. Where none did, ``.grad`` is zeros, not None.

    All optional units of one unit around are gathered at a time, as if they were a part of it: from the
    beginning of its forward to the end, and again in its backward, to whose end their unsharded gradients are
    kept as well. A unit around each group of them, for instance each layer with experts, keeps that small.

    Not collective; every rank marks the same modules, or the first forward raises RuntimeError on all ranks.
    It raises ValueError where the outermost unit is marked. A unit that is called, or that a gradient
    reaches, past the unit around it raises RuntimeError.

    Raises TypeError for what is no module, ValueError for one that is wrapped already.
    """
    check_module(module)
    if is_sharded_module(module):
        raise ValueError(
            f"{type(module.module).__name__} is wrapped already: mark it with fsdp_c.optional() before FSDP "
            "gets it"
        )
    setattr(module, _MARK, True)
    return module


def is_marked(module: nn.Module) -> bool:
    """True if ``optional`` was called with ``module``, or with the module that a wrapper holds in its place."""
    return getattr(module, _MARK, False) is True


class OptionalPaths:
    """``path in`` it: whether the module at ``path`` from ``root``, one around it, or one that it wraps as a
    unit is marked. ``root`` itself is not asked, and a module around many is asked once.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # True if the module at the path, or one around it, is marked
        self._known: dict[str, tuple[nn.Module, bool]] = {"": (root, False)}

    def __contains__(self, path: str) -> bool:
        unknown, at = [], path
        while at not in self._known:
            unknown.append(at)
            at = at.rpartition(".")[0]
        module, marked = self._known[at]
        for at in reversed(unknown):
            inner = module._modules[at.rpartition(".")[2]]
            assert inner is not None
            module, marked = inner, marked or bool(vars(inner).get(_MARK, False))
            self._known[at] = module, marked
        return marked or (module is not self._root and is_sharded_module(module) and is_marked(module.module))


def optional_units(modules: Sequence[tuple[str, ShardedModule]]) -> list[tuple[_C.Unit, _C.Unit]]:
    """The optional ones among the units of a tree, each with the unit around it.

    ``modules`` are its units and their paths from the root, in traversal order. The root itself is not asked.
    """
    optional_paths = OptionalPaths(modules[0][1])
    required: dict[str, _C.Unit] = {}  # units by path; a unit comes before its segments
    found = []
    for path, module in modules:
        if path not in optional_paths:
            required.setdefault(path, module._unit)
            continue
        around = path
        while around not in required:
            around = around.rpartition(".")[0]
        found.append((module._unit, required[around]))
    return found
