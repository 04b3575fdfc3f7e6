"""Names of torch.distributed.fsdp._flat_param that libraries use."""

from fsdp_c.compat.handle_names import FlatParamShardMetadata
from fsdp_c.compat.upstream import (
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    HandleShardingStrategy,
    _ShardParamInfo,
)
from fsdp_c.sharding.flat_param import FlatParameter, FlatParamHandle, SharedParamInfo
from fsdp_c.sharding.traversal import ParamInfo

__all__ = [
    "NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES",
    "RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "SharedParamInfo",
    "_ShardParamInfo",
]
