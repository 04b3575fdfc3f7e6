"""Attributes of FSDP1's units and handles that fsdp_c does not support, and their replacements.

All of them are state or steps of the runtime, which is in C here. Access raises AttributeError with the
replacement.
"""

from __future__ import annotations

import sys

_STATE = "C checks its own state at every transition; handle.param_state and handle._training_state tell it"
_UNSHARD = "it is a part of handle.unshard() and handle.reshard(free_storage)"
_VIEWS = "what modules show is set in C; FullyShardedDataParallel.summon_full_params() shows whole parameters"
_GRADIENTS = (
    "gradients are kept in C; handle.sharded_grad is that of the shard, and "
    "FullyShardedDataParallel.summon_full_params(with_grads=True) shows whole ones"
)
_BUILD = "the constructor builds the flat parameter in one piece; handle.init_flat_param_attributes() follows new data"
_EDITS = "handle.writeback() takes over what was replaced"
_ORDER = "the order of units is kept in C; _exec_order_data has what clients set of it"
_HOST = "use FullyShardedDataParallel.summon_full_params(module, offload_to_cpu=True, writeback=False)"
_STREAMS = "streams and events are kept in C; torch.cuda.current_stream() is where computation waits for them"
_OPTIMIZER = "use the public static methods for optimizer state dicts"
_CONTEXT = "use FullyShardedDataParallel.summon_full_params()"

_NAMES = {
    "FlatParamHandle": {
        _STATE: "_check_low_precision_shard _check_on_compute_device _check_on_cpu _check_sharded "
        "_check_sharded_strategy _check_storage_allocated _check_storage_freed _check_unsharded",
        _UNSHARD: "pre_unshard post_unshard post_reshard _use_low_precision_shard _use_sharded_flat_param "
        "_free_low_precision_sharded_param _free_unsharded_flat_param",
        _VIEWS: "_use_sharded_views _use_unsharded_views unflatten_as_params _deregister_orig_params _setattr_param "
        "_setattr_tensor _init_setattr_fns _init_get_unflat_views_fn _unsharded_flat_param_for_skipped_views",
        _GRADIENTS: "unshard_grad reshard_grad prepare_gradient_for_backward prepare_gradient_for_optim "
        "_use_sharded_grad_views _use_unsharded_grad_views _reset_is_grad_none",
        _BUILD: "_init_flat_param_and_metadata _init_param_reduce_dtypes _init_shard_metadata "
        "_validate_tensors_to_flatten",
        _EDITS: "_writeback_orig_params _writeback_tensor",
        _ORDER: "_handle_index _pre_forward_order_index _post_forward_index _prefetched _needs_pre_forward_unshard "
        "_needs_pre_backward_unshard _ran_pre_backward_hook",
        _HOST: "to_cpu _offload_to_cpu _restore_unsharded_flat_param_from_cpu",
    },
    "FullyShardedDataParallel": {
        _STREAMS: "_free_event_queue _unshard_event _unshard_stream _pre_unshard_stream _post_backward_stream "
        "_all_reduce_stream _default_stream",
        _ORDER: "_pre_forward_handles _post_forward_handles _root_pre_forward_handles _use_training_state",
        _OPTIMIZER: "_optim_state_dict_impl _optim_state_dict_to_load_impl _is_using_optim_input _warn_optim_input "
        "_warn_legacy_optim_state_dict",
        _CONTEXT: "_unshard_params_ctx",
    },
}
REASONS = {
    owner: {name: reason for reason, names in by_reason.items() for name in names.split()}
    for owner, by_reason in _NAMES.items()
}


def explain(owner: str, name: str) -> None:
    """Raise AttributeError with the replacement if ``name`` is unsupported on ``owner``, else return.

    Call it while handling the original AttributeError, which becomes the cause.
    """
    reason = REASONS[owner].get(name)
    if reason is None:
        return
    raise AttributeError(
        f"{owner!r} object of fsdp_c has no attribute {name!r}: {reason}"
    ) from sys.exc_info()[1]
