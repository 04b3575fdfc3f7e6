"""Names, attributes and import paths that libraries use of torch's FSDP1.

Each path under torch.distributed.fsdp that a library imports from has its counterpart under fsdp_c; the
functions that stay torch's own work on our units.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _State
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import _traversal_utils as torch_traversal

from fsdp_c import _C, MixedPrecision, ShardingStrategy
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c._common_utils import (
    _get_module_fsdp_state,
    _get_module_fsdp_state_if_fully_sharded_module,
    _has_fsdp_params,
    _is_fsdp_flattened,
    _module_handle,
    clean_tensor_name,
)
from fsdp_c._traversal_utils import _get_fsdp_handles, _get_fsdp_states, _get_fsdp_states_with_modules
from fsdp_c.compat.upstream import HandleShardingStrategy
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.wrap import ModuleWrapPolicy
from tests.collectives import fake_ranks
from tests.ranks import both_views
from tests.unit.test_construction import Net

CPU = torch.device("cpu")


_group = fake_ranks(1, 4)


def nested(**arguments: Any) -> FSDP:
    defaults = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "device_id": CPU}
    return FSDP(Net(), **(defaults | arguments))


NAMES = """
package: FullyShardedDataParallel FlatParameter BackwardPrefetch CPUOffload MixedPrecision ShardingStrategy
    StateDictType FullStateDictConfig ShardedStateDictConfig LocalStateDictConfig FullOptimStateDictConfig
    OptimStateKeyType ShardedOptimStateDictConfig LocalOptimStateDictConfig StateDictSettings
fully_sharded_data_parallel: FullyShardedDataParallel FlatParameter OptimStateKeyType CPUOffload FLAT_PARAM
wrap: _or_policy lambda_auto_wrap_policy transformer_auto_wrap_policy size_based_auto_wrap_policy enable_wrap
    wrap always_wrap_policy CustomPolicy ModuleWrapPolicy _Policy _recursive_wrap _construct_wrap_fn
    _post_order_apply
_wrap_utils: _construct_wrap_fn _post_order_apply _Policy _recursive_wrap _or_policy
_common_utils: _FSDPState _get_module_fsdp_state _get_module_fsdp_state_if_fully_sharded_module
    clean_tensor_name FSDP_WRAPPED_MODULE FSDP_PREFIX FSDP_FLATTENED TrainingState HandleTrainingState
    _set_fsdp_flattened _is_fsdp_flattened _has_fsdp_params _module_handle _get_param_to_fqns
_init_utils: HYBRID_SHARDING_STRATEGIES NO_RESHARD_AFTER_FORWARD_STRATEGIES _init_intra_and_inter_node_groups
_traversal_utils: _get_fsdp_states _get_fsdp_states_with_modules _get_fsdp_handles _composable
_flat_param: FlatParameter FlatParamHandle HandleShardingStrategy ParamInfo SharedParamInfo _ShardParamInfo
    FlatParamShardMetadata RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
_shard_utils: _create_chunk_sharded_tensor _create_chunk_dtensor
_fsdp_extensions: FSDPExtensions _set_fsdp_extensions _ext_pre_flatten_transform _ext_post_unflatten_transform
    _ext_chunk_tensor _ext_chunk_dtensor _ext_pre_load_state_dict_transform _ext_all_gather_dtensor
"""
PATHS = {
    path: names.split()
    for path, _, names in (line.partition(": ") for line in re.split(r"\n(?! )", NAMES.strip()))
}
OURS = {"FullyShardedDataParallel", "FlatParameter", "FlatParamHandle"}
OURS |= {"ParamInfo", "SharedParamInfo", "FlatParamShardMetadata"}


@pytest.mark.parametrize("module", PATHS)
def test_path_has_the_names_that_torch_has_there(module: str) -> None:
    suffix = "" if module == "package" else f".{module}"
    ours, theirs = (
        importlib.import_module(package + suffix) for package in ("fsdp_c", "torch.distributed.fsdp")
    )
    for name in PATHS[module]:
        found, known = getattr(ours, name), getattr(theirs, name)
        if name in OURS:
            assert found is not known and found.__module__.startswith("fsdp_c"), name
        elif isinstance(known, (type, str, list, tuple)):
            assert found == known, name
        else:
            assert callable(found), name


@both_views
def test_states_and_handles_are_found(use_orig_params: bool) -> None:
    """Torch's own functions and ours agree."""
    model = nested(use_orig_params=use_orig_params)
    units = FSDP.fsdp_modules(model)
    assert units == [model, model.second]
    assert isinstance(model, _State) and _get_module_state(model) is model
    assert _get_module_fsdp_state(model) is _get_module_fsdp_state_if_fully_sharded_module(model) is model
    assert _get_fsdp_states(model) == torch_traversal._get_fsdp_states(model) == units
    assert _get_fsdp_states_with_modules(model) == (units, units) and model._all_fsdp_states == units
    handles = [unit._handle for unit in units]
    assert _get_fsdp_handles(model) == torch_traversal._get_fsdp_handles(model) == handles
    assert _get_fsdp_handles(nn.Linear(1, 1)) == []
    assert _has_fsdp_params(model, model) and _module_handle(model, model) is handles[0]
    assert handles[0]._sharding_strategy is HandleShardingStrategy.FULL_SHARD
    assert all(map(_is_fsdp_flattened, model.parameters()))


def test_replicated_module_is_not_entered() -> None:
    from torch.distributed._composable import replicate

    module = nn.Sequential(nested(), nn.Linear(2, 2))
    assert len(_get_fsdp_states(module)) == 2
    inner = nn.Sequential(nn.Linear(2, 2))
    replicate(inner)
    inner.add_module("hidden", nested())
    assert _get_fsdp_states(nn.Sequential(inner)) == []


def test_shard_param_infos_are_pickled_under_torchs_name() -> None:
    """OLMo saves it."""
    infos = nested()._flat_param._shard_param_infos
    saved = pickle.dumps(infos)
    assert b"fsdp_c" not in saved and pickle.loads(saved) == infos


def test_names_are_cleaned_of_all_wrappers() -> None:
    model = FSDP(checkpoint_wrapper(nn.Linear(2, 2)), use_orig_params=True, device_id=CPU)
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "_fsdp_wrapped_module._checkpoint_wrapped_module.weight"
    assert [clean_tensor_name(name) for name in names] == ["weight", "bias"]
    assert isinstance(model._fsdp_wrapped_module, CheckpointWrapper) and isinstance(model.module, nn.Linear)


def test_replaced_step_that_is_not_called_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    """ColossalAI replaces it."""
    with (
        mock.patch.object(FlatParamHandle, "unshard", len),
        mock.patch.object(FlatParamHandle, "new", len, create=True),
    ):
        assert not recwarn.list
    with pytest.warns(
        UserWarning, match="replacement of FlatParamHandle._all_gather_flat_param is not called"
    ):
        FlatParamHandle._all_gather_flat_param = len
    del FlatParamHandle._all_gather_flat_param
    assert FlatParamHandle._all_gather_flat_param is _C.Handle._all_gather_flat_param


@both_views
def test_small_methods_of_a_unit(use_orig_params: bool) -> None:
    """Only C writes states, so ``_use_training_state`` has no counterpart."""
    model = nested(
        use_orig_params=use_orig_params, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)
    )
    assert model._mixed_precision_enabled_for_buffers()
    assert not nested()._mixed_precision_enabled_for_buffers()
    assert not model._low_precision_hook_enabled()
    other = nested()
    other.register_comm_hook(None, functools.partial(bf16_compress_hook))  # known by identity
    assert not other._low_precision_hook_enabled()
    model.register_comm_hook(None, bf16_compress_hook)
    assert model._low_precision_hook_enabled()
    model(torch.ones(2, 3))
    assert (model._is_root, model.second._is_root) == (True, False)
    model.second._unshard(async_op=True)
    model._wait_unshard_streams_on_current_stream()
    assert not model.second._handle.needs_unshard()
    model._reset_lazy_init()
    assert model._is_root is None and model.check_is_root()


def test_flat_parameters_stand_for_the_original_ones_in_a_context() -> None:
    """``_deregister_orig_params_ctx``."""
    model = nested(use_orig_params=True)
    before = [name for name, _ in model.named_parameters()]
    with model._deregister_orig_params_ctx():
        names = [clean_tensor_name(name) for name, _ in model.named_parameters()]
        assert names == ["_flat_param", "second._flat_param"]
    assert [name for name, _ in model.named_parameters()] == before
    with pytest.raises(AssertionError, match="use_orig_params=True"), nested()._deregister_orig_params_ctx():
        pass


class Saving(FSDP):
    """Subclass that renames state dict keys, like audiocraft's."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"mine.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


def test_class_can_be_subclassed_and_keeps_its_name() -> None:
    """Types: audiocraft overrides methods, litgpt compares the name of the class."""
    model = Saving(nn.Linear(2, 2), device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert [name for name in model.state_dict()] == ["mine.weight", "mine.bias"]
    assert FSDP.fsdp_modules(model) == [model]
    assert FSDP.__name__ == "FullyShardedDataParallel"


def handle_of(module: nn.Module, **arguments: Any) -> FlatParamHandle:
    """Built directly, with torch's keyword arguments."""
    return FlatParamHandle(
        params=list(module.parameters()),
        fully_sharded_module=module,
        device=CPU,
        sharding_strategy=HandleShardingStrategy.FULL_SHARD,
        offload_params=False,
        mp_param_dtype=None,
        mp_reduce_dtype=None,
        keep_low_precision_grads=False,
        process_group=dist.group.WORLD,
        use_orig_params=True,
        **arguments,
    )


def test_handle_is_built_directly() -> None:
    handle = handle_of(nn.Linear(3, 5))
    handle.shard()
    assert handle.flat_param.numel() == 6 and handle._fqns_in_shard == ["weight"]
    assert handle.flat_param._shard_param_infos[0].in_shard


@pytest.mark.parametrize("aligned_numel", [0, 4, 8])
def test_tensors_are_flattened_as_torch_does(aligned_numel: int) -> None:
    channels_last = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    tensors = [torch.randn(3, 5), torch.randn(1), channels_last]
    handle = handle_of(nn.Linear(3, 5))
    flat = handle.flatten_tensors(tensors, aligned_numel)
    expected = Upstream(nn.Linear(3, 5), device_id=CPU, use_orig_params=True)
    assert torch.equal(flat, expected._handle.flatten_tensors(tensors, aligned_numel))
    param = handle.flatten_tensors_into_flat_param(tensors, aligned_numel, requires_grad=False)
    assert param._is_flat_param and not param.requires_grad and torch.equal(param, flat)
    for refused, message in (([], "non-empty `tensors`"), ([torch.ones(2).int()], "integer dtype")):
        with pytest.raises(ValueError, match=message):
            handle.flatten_tensors(refused, aligned_numel)
