"""Tensors that modules show as a unit's parameters: views of the unsharded flat parameter, and freed views.

C exposes and frees the views (``csrc/handle/param_views.h``). Functions here choose how a view is registered,
give it the class and attributes of its parameter, and mark parameters that the user registers in its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_c import _C

Views = tuple[Tensor, ...]


# ----------------------------------------------------------------- registration

# overridable methods that observe registration or deletion of a parameter
_SETTERS = ("__setattr__", "__delattr__", "register_parameter")


def way_to_set(module: nn.Module) -> int:
    """Return the constant of C for how to register views on ``module``.

    ``setattr`` is required if the class or a foreign registration hook observes registrations. Otherwise C
    writes to ``_parameters`` directly.
    """
    hooks = getattr(nn.modules.module, "_global_parameter_registration_hooks", {}).values()
    are_ours = all(getattr(hook, "__module__", "").partition(".")[0] == "fsdp_c" for hook in hooks)
    methods = [getattr(type(module), name) for name in _SETTERS]
    is_plain = all(getattr(each, "__module__", None) == nn.Module.__module__ for each in methods)
    is_wrapped = any(hasattr(each, "__wrapped__") for each in methods)
    return _C.SET_DIRECTLY if are_ours and is_plain and not is_wrapped else _C.SET_BY_SETATTR


_register_once = functools.cache(register_module_parameter_registration_hook)
_handles = WeakIdKeyDictionary()  # module -> parameter name -> weak reference to the handle


def watch_registrations(places: Iterable[tuple[nn.Module, str]], handle: _C.Handle) -> None:
    """Mark parameters that the user registers at ``places`` from now on, and notify ``handle`` of them.

    See ``[Note: swapped parameters]`` in ``csrc/handle/writeback.c``.
    """
    _register_once(_note)
    for module, name in places:
        _handles.setdefault(module, {})[name] = weakref.ref(handle)


def _note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    reference = _handles.get(module, {}).get(name)
    handle = reference and reference()
    if param is not None and handle is not None:
        param._fsdp_registered_for = handle.registration_id  # type: ignore[attr-defined]  # mark on the user's parameter
        handle.mark_assigned()


# ----------------------------------------------------------------- classes and attributes of parameters

# attributes set by fsdp_c itself on plain parameters
_MARKS = frozenset({"_fsdp_flattened", "_fsdp_owner", "_fsdp_registered_for", "_is_flat_param"})


class SubclassState(NamedTuple):
    """Class and attributes of a parameter. Wrapped tensors share the attribute dict."""

    kind: type[nn.Parameter]
    attributes: dict[str, Any]

    def wrap(self, data: Tensor) -> nn.Parameter:
        """Return a frozen parameter of this class over the memory of ``data``."""
        with torch._C.DisableTorchFunctionSubclass():  # `data` may be freed
            wrapped = torch.Tensor._make_subclass(self.kind, data.detach(), False)
        wrapped.__dict__ = self.attributes
        return wrapped


def subclass_state(param: nn.Parameter) -> SubclassState | None:
    """Return the class and attributes of ``param``; None for a plain or a trained parameter.

    Trained ones are excluded because autograd would dispatch to their class.
    """
    if param.requires_grad or (type(param) is nn.Parameter and vars(param).keys() <= _MARKS):
        return None
    return SubclassState(type(param), vars(param))


def views_wrapper(states: Sequence[SubclassState | None]) -> Callable[[Views], Views] | None:
    """Return the function from a unit's views to the registered tensors; None if the views are registered.

    Wraps each view in its parameter's class, unless the view requires grad. Results are cached, because views
    persist from step to step.
    """
    if not any(states):
        return None
    seen: Views = ()
    wrapped: tuple[nn.Parameter | None, ...] = ()

    def wrap_all(views: Views) -> Views:
        nonlocal seen, wrapped
        if views is not seen:
            pairs = zip(views, states, strict=True)
            seen, wrapped = views, tuple(None if state is None else state.wrap(view) for view, state in pairs)
        shown = zip(views, wrapped, strict=True)
        return tuple(view if one is None or view.requires_grad else one for view, one in shown)

    return wrap_all


# ----------------------------------------------------------------- freed views

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
        for one in pytree.tree_leaves((args, kwargs)):
            if isinstance(one, FreedView):
                _C.refuse_freed_view(one)
        raise RuntimeError(
            "this tensor was a view of a unit's parameters, which were freed with it or have moved. To "
            "use it later, clone it inside the unit's forward or "
            "FullyShardedDataParallel.summon_full_params(module)."
        )
