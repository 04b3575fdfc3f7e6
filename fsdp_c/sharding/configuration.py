"""The configuration of a unit: immutable, made by the unit's constructor, read by C."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_c.compat.upstream import BackwardPrefetch, FSDPExtensions, MixedPrecision, ShardingStrategy


class UnitConfig(NamedTuple):
    """The configuration of one unit. ``config_read()`` in csrc/handle/config.c relies on the order of fields."""

    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None  # ranks with the same shard; None unless the strategy is hybrid
    device: torch.device  # compute device
    strategy: ShardingStrategy
    use_orig_params: bool
    offload_params: bool  # True if shards live in CPU memory, whatever ``device`` is
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    keep_low_precision_grads: bool
    predivide: float  # divisor of gradients before the reduction
    postdivide: float  # divisor of gradients after the reduction
    skip_writeback_check: bool
    verbose: bool  # True if TORCH_DISTRIBUTED_DEBUG is INFO
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    full_precision_in_eval: bool  # True if the root calls cast_buffers_for_mode() before its forward
    extension: FSDPExtensions | None  # flattens DTensors; not read by C


def configure(
    shard_group: dist.ProcessGroup,
    replicate_group: dist.ProcessGroup | None,
    device: torch.device,
    strategy: ShardingStrategy,
    *,
    use_orig_params: bool,
    offload_params: bool,
    mixed_precision: MixedPrecision,
    backward_prefetch: BackwardPrefetch | None = None,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    extension: FSDPExtensions | None,
) -> UnitConfig:
    """Return the configuration for these settings and the environment variables."""
    ranks = shard_group.size() * (1 if replicate_group is None else replicate_group.size())
    predivide = predivide_factor(ranks)
    return UnitConfig(
        shard_group,
        replicate_group,
        device,
        strategy,
        use_orig_params,
        offload_params,
        mixed_precision.param_dtype,
        mixed_precision.reduce_dtype,
        mixed_precision.keep_low_precision_grads,
        predivide,
        ranks / predivide,
        is_set("FSDP_SKIP_WRITEBACK_CHECK"),
        dist.get_debug_level() == dist.DebugLevel.INFO,
        mixed_precision.cast_forward_inputs,
        mixed_precision.cast_root_forward_inputs,
        backward_prefetch,
        forward_prefetch,
        limit_all_gathers,
        is_set("FSDP_USE_FULL_PREC_IN_EVAL"),
        extension,
    )


def predivide_factor(data_parallel_size: int) -> float:
    """Return the divisor before the reduction: the power of two near the square root of the number of ranks."""
    factor = 1
    while data_parallel_size % factor == 0 and data_parallel_size / factor > factor:
        factor *= 2
    return float(factor)


def is_set(variable: str) -> bool:
    """Return True if the environment variable is 1."""
    return os.environ.get(variable, "") == "1"
