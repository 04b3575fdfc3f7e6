"""The names of torch.distributed.fsdp._init_utils that libraries use: strategies, and the groups of nodes."""

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
    """The group of this rank's node and that of the ranks of its place in the nodes. Collective over all
    ranks."""
    return tuple(groups_of_nodes(global_process_group, num_devices_per_node))  # type: ignore[return-value]  # two groups, under a hybrid strategy
