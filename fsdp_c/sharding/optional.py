"""Optional modules: a rank may skip them in a step, e.g. experts and modality encoders."""

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
    """Mark ``module``, before wrapping, as one that a rank may skip in a step. Returns ``module``.

    A unit skipped by some ranks would make the others wait forever. Units made from ``module`` and its
    submodules instead take part in collectives on every rank: they are unsharded and reduced together with
    the unit around them, the innermost one that is not optional, which every rank must run. Within its
    forward, optional units may run in any order and any number of times. Their results must reach the loss
    through its outputs.

    Gradients equal those of a run in which every rank runs ``module``: the average over all ranks, with zeros
    from ranks that skipped it. If all ranks skipped it, ``.grad`` is zeros, not None.

    All optional units of one enclosing unit are unsharded together: during its forward, and again during its
    backward, to whose end their unsharded gradients are kept too. To bound this memory, wrap each group of
    optional modules (e.g. each layer with experts) in a unit.

    Not collective. All ranks must mark the same modules: otherwise the first forward raises RuntimeError on
    all ranks, and ValueError if the outermost unit is marked. Calling an optional unit outside of its
    enclosing unit's forward, or reaching it by a gradient that bypasses that unit, raises RuntimeError.

    Raises TypeError unless ``module`` is an nn.Module, ValueError if it is wrapped already.
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
    """Return True if ``optional`` was called with ``module``, or with the module inside its wrapper."""
    return getattr(module, _MARK, False) is True


def is_optional(root: nn.Module, path: str) -> bool:
    """Return True if the module at ``path``, one around it below ``root``, or the module that it wraps is marked."""
    module = root
    for name in path.split(".") if path else ():
        inner = module._modules[name]
        assert inner is not None
        module = inner
        if vars(module).get(_MARK, False):
            return True
    return module is not root and is_sharded_module(module) and is_marked(module.module)


def optional_units(modules: Sequence[tuple[str, ShardedModule]]) -> list[tuple[_C.Unit, _C.Unit]]:
    """Return (optional unit, enclosing required unit) pairs of a tree.

    ``modules`` are its units and their paths from the root, in pre-order. The root itself is never optional.
    """
    root = modules[0][1]
    required: dict[str, _C.Unit] = {}  # units by path; setdefault keeps the unit, which precedes its segments
    found = []
    for path, module in modules:
        if not is_optional(root, path):
            required.setdefault(path, module._unit)
            continue
        around = path
        while around not in required:
            around = around.rpartition(".")[0]
        found.append((module._unit, required[around]))
    return found
