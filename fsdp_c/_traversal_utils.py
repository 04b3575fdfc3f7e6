"""The names of torch.distributed.fsdp._traversal_utils: the units and handles of a module tree."""

from typing import Any

from torch import nn

from fsdp_c.traversal import is_composable as _composable
from fsdp_c.traversal import units_of

__all__ = ["_composable", "_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"]


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """The units in ``module``, outer before inner, and the modules that hold their states: the same."""
    units = units_of(module)
    return list(units), list(units)


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    return units_of(module)


def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """The handles of the units in ``module`` that have parameters."""
    return [unit._handle for unit in units_of(module) if unit._handle is not None]
