"""The names of torch.distributed.fsdp._fsdp_extensions: what an extension object is, and its calls.

``FlatParamHandle(fsdp_extension=...)`` takes any object of this class; see fsdp_c.sharding.tensor_parallel.
"""

# ruff: noqa: F401

from fsdp_c.compat.upstream import (
    FSDPExtensions,
    _ext_all_gather_dtensor,
    _ext_chunk_dtensor,
    _ext_chunk_tensor,
    _ext_post_unflatten_transform,
    _ext_pre_flatten_transform,
    _ext_pre_load_state_dict_transform,
    _set_fsdp_extensions,
)
