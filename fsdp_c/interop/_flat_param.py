"""The names of torch.distributed.fsdp._flat_param that libraries use."""

# ruff: noqa: F401

from fsdp_c.compat.upstream import (
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    _ShardParamInfo,
)
from fsdp_c.sharding.flat_param import (
    FlatParameter,
    FlatParamHandle,
    FlatParamShardMetadata,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
)
