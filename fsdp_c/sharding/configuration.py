"""The configuration of a unit: made once by its constructor, never changed, and read by C."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_c.compat.upstream import BackwardPrefetch, FSDPExtensions, MixedPrecision, ShardingStrategy


class UnitConfig(NamedTuple):
    """The configuration of one unit. ``config_read()`` in csrc/handle/config.c takes the fields in this order."""

    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None  # the ranks that hold the same shard, for hybrid strategies
    device: torch.device  # that the unit computes on
    strategy: ShardingStrategy
    use_orig_params: bool
    offload_params: bool  # shards are in CPU memory, wherever ``device`` is
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    keep_low_precision_grads: bool
    predivide: float  # gradients are divided by it before they are summed,
    postdivide: float  # and by this afterwards
    skip_writeback_check: bool
    verbose: bool  # TORCH_DISTRIBUTED_DEBUG=INFO
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    full_precision_in_eval: bool  # the root calls cast_buffers_for_mode() before its forward
    extension: FSDPExtensions | None  # flattens DTensors; C leaves it alone


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
    extension: FSDPExtensions | None = None,
) -> UnitConfig:
    """The configuration by these settings and by the environment."""
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
    """The power of two near the square root by which gradients are divided before they are summed."""
    factor = 1
    while data_parallel_size % factor == 0 and data_parallel_size / factor > factor:
        factor *= 2
    return float(factor)


def is_set(variable: str) -> bool:
    """Whether the environment sets ``variable`` to 1."""
    return os.environ.get(variable, "") == "1"
