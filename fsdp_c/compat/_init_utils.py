"""Names of torch.distributed.fsdp._init_utils that libraries use."""

import torch.distributed as dist

from fsdp_c.compat.upstream import HYBRID_SHARDING_STRATEGIES, NO_RESHARD_AFTER_FORWARD_STRATEGIES
from fsdp_c.sharding.construction import groups_of_nodes

__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES",
    "_init_intra_and_inter_node_groups",
]


def _init_intra_and_inter_node_groups(
    global_process_group: dist.ProcessGroup, num_devices_per_node: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's node, and the group of its replicas. Collective over all ranks."""
    return tuple(groups_of_nodes(global_process_group, num_devices_per_node))  # type: ignore[return-value]  # ProcessGroups with both groups
