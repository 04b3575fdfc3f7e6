"""The names of torch.distributed.fsdp._common_utils that libraries use. They read units through attributes,
and so are torch's own: a unit is a state of torch's base class.
"""

# ruff: noqa: F401

from fsdp_c.compat.standins.common_utils import collect_grad_tensors, replace_grad_tensors  # since torch 2.12
from fsdp_c.compat.upstream import (
    FSDP_FLATTENED,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    HandleTrainingState,
    TrainingState,
    _apply_to_modules,
    _assert_in_training_states,
    _FSDPState,
    _get_module_fsdp_state,
    _get_module_fsdp_state_if_fully_sharded_module,
    _get_param_to_fqns,
    _has_fsdp_params,
    _is_composable,
    _is_fsdp_flattened,
    _module_handle,
    _named_parameters_with_duplicates,
    _set_fsdp_flattened,
    clean_tensor_name,
)
