"""Stands in for ``torch.distributed.fsdp.api``, and for the enums that torch keeps elsewhere."""

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
    """What of a unit is divided over ranks, and until when its parameters stay gathered."""

    FULL_SHARD = 1  # parameters are freed after the forward and gathered again for the backward
    SHARD_GRAD_OP = 2  # parameters stay gathered from the forward to the end of the backward
    NO_SHARD = 3  # every rank holds all; gradients are averaged
    HYBRID_SHARD = 4  # FULL_SHARD over one group, replicas over another
    _HYBRID_SHARD_ZERO2 = 5  # SHARD_GRAD_OP over one group, replicas over another


class _ShardParamInfo(NamedTuple):
    """The part of a parameter that this rank's shard holds; all None when there is none. The end index is
    inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class HandleShardingStrategy(Enum):
    """The strategy as a unit's handle has it: the same members in an enum of its own."""

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


class BackwardPrefetch(Enum):
    """When the backward gathers the next unit: before this unit's gradients are computed, or after."""

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


class TrainingState(Enum):
    """What a unit is doing."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


class HandleTrainingState(Enum):
    """What a unit's flat parameter is used for."""

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5


class StateDictType(Enum):
    """The form of a state dict: whole tensors, this rank's flat parameters, or its rows of each tensor."""

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


class OptimStateKeyType(Enum):
    """What an optimizer's state dict calls a parameter: by its name, or by its number."""

    PARAM_NAME = 1
    PARAM_ID = 2


@dataclass
class MixedPrecision:
    """The dtypes that a unit computes and communicates in; None keeps the parameters' own.

    Args:
        param_dtype: of the gathered parameters, and so of forward and backward.
        reduce_dtype: of gradients while they are reduced; by default ``param_dtype``.
        buffer_dtype: of the floating buffers.
        keep_low_precision_grads: leave gradients in ``reduce_dtype`` for the optimizer.
        cast_forward_inputs: cast the floating inputs of every unit to its ``param_dtype``.
        cast_root_forward_inputs: cast those of the root; one of the two is enough.
        _module_classes_to_ignore: modules of these classes become units in full precision.
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
    """Whether shards and their gradients live in CPU memory, where the optimizer then steps."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """How a state dict of the model is made; ``offload_to_cpu`` moves its tensors to CPU memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For FULL_STATE_DICT; with ``rank0_only`` the other ranks get an empty state dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For LOCAL_STATE_DICT."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For SHARDED_STATE_DICT; ``_use_dtensor`` is set where the model has a device mesh."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """How a state dict of the optimizer is made; ``offload_to_cpu`` moves its tensors to CPU memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For FULL_STATE_DICT; with ``rank0_only`` the other ranks get an empty state dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For SHARDED_STATE_DICT; ``_use_dtensor`` is set where the model has a device mesh."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What ``state_dict_type`` sets and gives back."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


_HOMES: dict[type, str] = {  # elsewhere than in torch.distributed.fsdp.api
    HandleShardingStrategy: "_flat_param",
    HandleTrainingState: "_common_utils",
    OptimStateKeyType: "fully_sharded_data_parallel",
    TrainingState: "_common_utils",
    _ShardParamInfo: "_flat_param",
}
for _value in list(vars().values()):
    if isinstance(_value, type) and _value.__module__ == __name__:
        _value.__module__ = sys.intern(f"torch.distributed.fsdp.{_HOMES.get(_value, 'api')}")  # pickled once
