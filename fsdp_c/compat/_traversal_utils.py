"""Names of torch.distributed.fsdp._traversal_utils: units and handles of a module tree."""

from torch import nn

from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in, units_of
from fsdp_c.sharding.traversal import is_composable as _composable

__all__ = ["_composable", "_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"]


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[ShardedModule], list[nn.Module]]:
    """Return the units in ``module`` in pre-order, twice: units are their own modules."""
    fsdp_modules = units_of(module)
    return list(fsdp_modules), list(fsdp_modules)


def _get_fsdp_states(module: nn.Module) -> list[ShardedModule]:
    return units_of(module)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of the units with parameters in ``module``."""
    return handles_in(module)
