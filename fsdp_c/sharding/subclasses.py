"""Frozen parameters with a class or attributes of their own (e.g. of quantizers).

Their views get the same class and attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Views = tuple[Tensor, ...]

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
