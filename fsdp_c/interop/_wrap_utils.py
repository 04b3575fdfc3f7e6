"""The names of torch.distributed.fsdp._wrap_utils that checkpoint_wrapper and libraries use; they know of no
units."""

# ruff: noqa: F401

from fsdp_c.compat.upstream import (
    _construct_wrap_fn,
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _run_mixed_precision_override_policy,
    _wrap_module_cls_individually,
)
