"""Imports of torch's FSDP1, and behavior that depends on torch's version.

With FSDP1 in torch, these are torch's objects: users' enums, configurations and policies are interchangeable.
``fsdp_c.compat.standins`` replaces them in a torch without FSDP1, where FSDP1's modules stay importable under
their old names so that old pickles load: see ``fsdp_c.compat.standins.finder``.
"""

# ruff: noqa: F401  # re-exported names

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch

# ----------------------------------------------------------------- FSDP1's names

WHY_NO_FSDP1 = ""
try:
    from torch.distributed.fsdp import _shard_utils, _wrap_utils  # noqa: F401  # returned by helpers()
    from torch.distributed.fsdp._common_utils import (
        HandleTrainingState,
        TrainingState,
        _FSDPState,
        _get_param_to_fqns,
    )
    from torch.distributed.fsdp._flat_param import HandleShardingStrategy, _ShardParamInfo
    from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
    from torch.distributed.fsdp.api import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as _
    from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
    from torch.distributed.fsdp.wrap import (
        CustomPolicy,
        ModuleWrapPolicy,
        _construct_wrap_fn,
        _or_policy,
        _Policy,
        _post_order_apply,
        _recursive_wrap,
        _wrap_module_cls_individually,
        always_wrap_policy,
        enable_wrap,
        lambda_auto_wrap_policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
        wrap,
    )
except ImportError as _error:
    WHY_NO_FSDP1 = str(_error)
    from fsdp_c.compat.standins import finder as _finder

    globals().update(_finder.names())
    _finder.insert()

HAS_FSDP1 = not WHY_NO_FSDP1


def helpers(name: str) -> ModuleType:
    """Return one of FSDP1's helper modules that are independent of units: torch's own or its stand-in."""
    torchs = f"torch.distributed.fsdp.{name}"
    return importlib.import_module(torchs if HAS_FSDP1 else _finder.OURS[torchs])


HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES = (
    HandleShardingStrategy.FULL_SHARD,
    HandleShardingStrategy.HYBRID_SHARD,
)
NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES = (
    HandleShardingStrategy.SHARD_GRAD_OP,
    HandleShardingStrategy._HYBRID_SHARD_ZERO2,
)


def dtensor_extensions() -> Callable[[ModuleType], FSDPExtensions]:
    """Return the class that flattens DTensors: torch's, or its stand-in."""
    try:
        from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
    except ImportError:
        from fsdp_c.compat.standins.dtensor_extensions import DTensorExtensions  # type: ignore[assignment]  # differently annotated
    return DTensorExtensions


def fsdp2_module_class() -> type | tuple[()]:
    """Return FSDP2's module class, or () if torch.distributed.fsdp is not imported: no instance can exist."""
    found: type | tuple[()] = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return found


# ----------------------------------------------------------------- behavior by torch version


def torch_version() -> tuple[int, int]:
    """Return (major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def copies_containers_of_inputs() -> bool:
    """Return True if the root copies lists and dicts of inputs, as torch did before 2.14."""
    return torch_version() < (2, 14)
