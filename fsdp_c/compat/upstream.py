"""The one place where names of torch's FSDP1 are imported, and where behaviour follows torch's version.

Where torch has FSDP1, these are its own objects: users' enums, configurations and policies are equal from
either package. Where it has none any more, those of ``fsdp_c.compat.standins`` take their place, and FSDP1's
modules are found under their old names, so that old pickles load: see ``fsdp_c.compat.standins.finder``.
"""

# ruff: noqa: F401  # names that others import from here

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch

# ----------------------------------------------------------------- FSDP1's names

WHY_NO_FSDP1 = ""
try:
    from torch.distributed.fsdp import _shard_utils, _wrap_utils  # noqa: F401  # helpers() gives them
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
    """A module of FSDP1's that knows of no units: torch's own, or what stands in for it."""
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
    """The class that flattens DTensors: torch's, beside tensor parallelism, or ours where it has gone."""
    try:
        from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
    except ImportError:
        from fsdp_c.compat.standins.dtensor_extensions import DTensorExtensions  # type: ignore[assignment]  # of other types
    return DTensorExtensions


def fsdp2_module_class() -> type | tuple[()]:
    """FSDP2's class of modules, or () where nothing has imported it yet: then no module is one."""
    found: type | tuple[()] = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return found


# ----------------------------------------------------------------- behaviour that follows torch's version


def torch_version() -> tuple[int, int]:
    """The installed torch's major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def copies_containers_of_inputs() -> bool:
    """True if a root gives its module lists and dicts of its own. Since torch 2.14 they are the caller's."""
    return torch_version() < (2, 14)
