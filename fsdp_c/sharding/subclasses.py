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


class Guise(NamedTuple):
    """Class and attributes of a parameter. Wrapped tensors share the attribute dict."""

    kind: type[nn.Parameter]
    attributes: dict[str, Any]

    def wrap(self, data: Tensor) -> nn.Parameter:
        """Return a frozen parameter of this class over the memory of ``data``."""
        with torch._C.DisableTorchFunctionSubclass():  # `data` may be freed
            made = torch.Tensor._make_subclass(self.kind, data.detach(), False)
        made.__dict__ = self.attributes
        return made


def guise_of(param: nn.Parameter) -> Guise | None:
    """Return the class and attributes of ``param``; None for a plain or a trained parameter.

    Trained ones are excluded because autograd would dispatch to their class.
    """
    if param.requires_grad or (type(param) is nn.Parameter and vars(param).keys() <= _MARKS):
        return None
    return Guise(type(param), vars(param))


def views_wrapper(guises: Sequence[Guise | None]) -> Callable[[Views], Views] | None:
    """Return the function from a unit's views to the registered tensors; None if the views are registered."""
    return ViewsInGuise(guises) if any(guises) else None


class ViewsInGuise:
    """Wraps each view in its parameter's class, unless the view requires grad.

    Results are cached, because views persist from step to step.
    """

    def __init__(self, guises: Sequence[Guise | None]) -> None:
        self._guises = tuple(guises)
        self._views: Views = ()
        self._made: tuple[nn.Parameter | None, ...] = ()

    def __call__(self, views: Views) -> Views:
        if views is not self._views:
            pairs = zip(views, self._guises, strict=True)
            self._views = views
            self._made = tuple(None if guise is None else guise.wrap(view) for view, guise in pairs)
        made = zip(views, self._made, strict=True)
        return tuple(view if one is None or view.requires_grad else one for view, one in made)
