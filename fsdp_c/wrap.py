"""Auto wrap policies (torch's own objects, interchangeable between both packages) and ``split_frozen``."""

# ruff: noqa: F401  # libraries import the private names from here

from fsdp_c.compat.upstream import (
    CustomPolicy,
    ModuleWrapPolicy,
    _construct_wrap_fn,
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from fsdp_c.sharding.flattening import split_frozen

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "split_frozen",
    "transformer_auto_wrap_policy",
    "wrap",
]
