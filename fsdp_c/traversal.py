"""Walks over module trees that know where one unit ends and the next begins.

A unit is a FullyShardedDataParallel instance. It is recognised by what it holds, so that the modules below the class
can ask.
"""

from collections.abc import Iterator

import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._common_utils import _FSDPState

FLAT_PARAM = "_flat_param"
WRAPPED_MODULE = "_fsdp_wrapped_module"
WRAPPED_PREFIX = WRAPPED_MODULE + "."
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def clean_name(name: str) -> str:
    """The name of a tensor or module as the user's own model has it, without the segments that wrappers add."""
    return name.replace(WRAPPED_PREFIX, "").replace(CHECKPOINT_PREFIX, "")


def clean_path(path: str) -> str:
    """clean_name() of a module's path, which may end in a wrapper's segment."""
    return clean_name(path + ".").removesuffix(".")


def is_unit(module: nn.Module) -> bool:
    """True for a unit whose construction is complete."""
    return isinstance(module, _FSDPState) and "_unit" in module.__dict__


def is_composable(module: nn.Module) -> bool:
    """False for a module under torch's ``replicate``, whose subtree no unit may touch."""
    registry = _get_registry(module)
    return registry is None or "replicate" not in registry


def units_with_paths(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of a tree and their paths from ``module``, depth first, an outer unit before its inner ones."""
    found: list[tuple[str, nn.Module]] = []
    visited: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        path, current = pending.pop()
        if current in visited or not is_composable(current):
            continue
        visited.add(current)
        if is_unit(current):
            found.append((path, current))
        children = [(f"{path}.{name}" if path else name, child) for name, child in current.named_children()]
        pending.extend(reversed(children))
    return found


def units_of(module: nn.Module) -> list[nn.Module]:
    """The units of a tree in traversal order, ``module`` itself included if it is one."""
    return [unit for _, unit in units_with_paths(module)]


def modules_outside_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The (path, module) pairs of a tree in pre-order that no unit inside it holds; shared modules once."""
    visited: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        path, current = pending.pop()
        if current in visited or is_unit(current):
            continue
        visited.add(current)
        yield path, current
        children = [(f"{path}.{name}" if path else name, child) for name, child in current.named_children()]
        pending.extend(reversed(children))
