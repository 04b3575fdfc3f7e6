"""Frozen parameters of classes of their own, or with attributes, as of quantisers: views look the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Views = tuple[Tensor, ...]

# attributes that wrapping and its policies leave on plain parameters
_MARKS = frozenset({"_fsdp_flattened", "_fsdp_owner", "_fsdp_registered_for", "_is_flat_param"})


class Guise(NamedTuple):
    """The class and the attributes of a parameter, which are shared with whatever takes them on."""

    kind: type[nn.Parameter]
    attributes: dict[str, Any]

    def wrap(self, data: Tensor) -> nn.Parameter:
        """A frozen parameter of that class over the memory of ``data``."""
        with torch._C.DisableTorchFunctionSubclass():  # `data` may be freed
            made = torch.Tensor._make_subclass(self.kind, data.detach(), False)
        made.__dict__ = self.attributes
        return made


def guise_of(param: nn.Parameter) -> Guise | None:
    """How ``param`` looks; None for a plain one, and a trained one: gradients would meet its class."""
    if param.requires_grad or (type(param) is nn.Parameter and vars(param).keys() <= _MARKS):
        return None
    return Guise(type(param), vars(param))


def views_wrapper(guises: Sequence[Guise | None]) -> Callable[[Views], Views] | None:
    """The function from a unit's views to the tensors that modules show; None where they show the views."""
    return ViewsInGuise(guises) if any(guises) else None


class ViewsInGuise:
    """Puts each guise on the view of its parameter, unless that is trained by now.

    Views stay from step to step, and so do the parameters made of them.
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
