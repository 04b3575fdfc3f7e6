"""Names of torch.distributed.fsdp._traversal_utils: units and handles of a module tree."""

from torch import nn

from fsdp_c.sharding.sharded_module import ShardedModule
from fsdp_c.sharding.sharded_module import handles_in as _get_fsdp_handles
from fsdp_c.sharding.sharded_module import units_of as _get_fsdp_states
from fsdp_c.sharding.traversal import is_composable as _composable

__all__ = ["_composable", "_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"]


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[ShardedModule], list[nn.Module]]:
    """Return the units in ``module`` in pre-order, twice: units are their own modules."""
    fsdp_modules = _get_fsdp_states(module)
    return fsdp_modules, [*fsdp_modules]
