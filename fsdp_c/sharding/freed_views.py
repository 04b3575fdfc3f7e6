"""Tensor class of a unit's parameter views while their storage is freed: outside of steps.

Without ``use_orig_params`` modules expose the views as attributes, and a forward may have kept references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsdp_c import _C

# properties that do not read values
_PROPERTIES = (
    "shape dtype device layout ndim names requires_grad is_leaf grad _grad grad_fn _grad_fn grad_dtype output_nr "
    "retains_grad _version _base _backward_hooks _post_accumulate_grad_hooks itemsize nbytes is_cpu is_cuda is_meta "
    "is_mps is_xpu is_hpu is_mtia is_vulkan is_mkldnn is_nested is_quantized is_sparse is_sparse_csr"
).split()
_METHODS = (
    "size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point "
    "is_complex is_signed is_inference is_conj is_neg is_same_size has_names get_device dim_order untyped_storage "
    "storage _typed_storage register_hook retain_grad __len__ __dir__"
).split()
_FUNCTIONS = "numel is_floating_point is_complex is_signed is_same_size get_device".split()
_ALLOWED = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)]
    + [getattr(Tensor, name).__set__ for name in ("grad", "_grad", "_backward_hooks")]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    + [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    + [torch.autograd.grad]  # looks up its inputs in the graph by metadata
)


class FreedView(Tensor):
    """A view that has metadata (shape, dtype, device), and raises RuntimeError for all other operations.

    C sets this class on views when it frees their storage, and resets it on unshard.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _refuse((args, kwargs))


def _refuse(arguments: object) -> NoReturn:
    for view in _freed_views(arguments):
        _C.refuse_freed_view(view)
    raise RuntimeError(
        "this tensor was a view of a unit's parameters, which were freed with it or have moved. To "
        "use it later, clone it inside the unit's forward or "
        "FullyShardedDataParallel.summon_full_params(module)."
    )


def _freed_views(arguments: object) -> Iterator[FreedView]:
    if isinstance(arguments, FreedView):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _freed_views(tuple(arguments.values()))
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _freed_views(argument)
