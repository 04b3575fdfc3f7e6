"""Stand-in for ``torch.distributed.fsdp.api``, and for enums of other FSDP1 modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """Sharded state of a unit, and lifetime of its unsharded parameters."""

    FULL_SHARD = 1  # reshard after forward, unshard again in backward
    SHARD_GRAD_OP = 2  # unsharded from forward to the end of backward
    NO_SHARD = 3  # replicated; gradients are averaged
    HYBRID_SHARD = 4  # FULL_SHARD within a group, replicated across groups
    _HYBRID_SHARD_ZERO2 = 5  # SHARD_GRAD_OP within a group, replicated across groups


class _ShardParamInfo(NamedTuple):
    """The part of a parameter in this rank's shard; None fields if there is none. End indices are inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class HandleShardingStrategy(Enum):
    """The strategy of a handle: equal members in a separate enum, as in FSDP1."""

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


class BackwardPrefetch(Enum):
    """Time of the backward prefetch: before this unit's gradient computation, or after."""

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


class TrainingState(Enum):
    """State of a unit."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


class HandleTrainingState(Enum):
    """State of a unit's flat parameter."""

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5


class StateDictType(Enum):
    """Form of a state dict: full tensors, this rank's flat parameters, or this rank's rows of each tensor."""

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


class OptimStateKeyType(Enum):
    """Keys of an optimizer state dict: parameter names or parameter ids."""

    PARAM_NAME = 1
    PARAM_ID = 2


@dataclass
class MixedPrecision:
    """Dtypes of computation and communication; None keeps the parameters' dtype.

    Args:
        param_dtype: dtype of unsharded parameters, i.e. of forward and backward.
        reduce_dtype: dtype of gradient reduction (default: ``param_dtype``).
        buffer_dtype: dtype of floating-point buffers.
        keep_low_precision_grads: True to keep gradients in ``reduce_dtype`` for the optimizer.
        cast_forward_inputs: True to cast floating-point inputs of every unit to its ``param_dtype``.
        cast_root_forward_inputs: True to cast the root's inputs; either flag suffices for the root.
        _module_classes_to_ignore: classes whose instances become full-precision units.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """CPU offload settings. ``offload_params``: keep shards and their gradients in CPU memory."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """Settings of model state dicts. ``offload_to_cpu``: move tensors to CPU memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings for FULL_STATE_DICT. ``rank0_only``: empty state dicts on the other ranks."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings for LOCAL_STATE_DICT."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings for SHARDED_STATE_DICT. ``_use_dtensor`` is set if the model has a device mesh."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Settings of optimizer state dicts. ``offload_to_cpu``: move tensors to CPU memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings for FULL_STATE_DICT. ``rank0_only``: empty state dicts on the other ranks."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Settings for LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Settings for SHARDED_STATE_DICT. ``_use_dtensor`` is set if the model has a device mesh."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """Settings that ``state_dict_type`` sets and restores."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


_HOMES: dict[type, str] = {  # classes of other modules than torch.distributed.fsdp.api
    HandleShardingStrategy: "_flat_param",
    HandleTrainingState: "_common_utils",
    OptimStateKeyType: "fully_sharded_data_parallel",
    TrainingState: "_common_utils",
    _ShardParamInfo: "_flat_param",
}
for _value in list(vars().values()):
    if isinstance(_value, type) and _value.__module__ == __name__:
        _value.__module__ = sys.intern(f"torch.distributed.fsdp.{_HOMES.get(_value, 'api')}")  # pickled once
