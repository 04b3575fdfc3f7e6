"""Views of a flat parameter for optimizers: one per original parameter, for per-parameter groups."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from fsdp_c.sharding.flat_param import FlatParamHandle


class FlatRange(nn.Parameter):
    """Range of one original parameter in this rank's shard, as a view. All of the parameter under NO_SHARD.

    ``grad`` is the same range of the flat parameter's gradient. Assigning None clears the flat parameter's
    gradient. After the shard is moved, the next access to ``grad`` updates the view.
    """

    _handle: FlatParamHandle
    _index: int
    _bounds: tuple[int, int]  # (start, end) in the shard
    _at: int  # address of the shard when the view was made

    def __new__(cls, handle: FlatParamHandle, index: int, bounds: tuple[int, int]) -> FlatRange:
        """Create the range of parameter ``index`` at ``bounds`` in the shard of ``handle``."""
        shard = _shard_of(handle)
        part = _part(handle, index, bounds, shard)
        made = super().__new__(cls, part, handle.flat_param.requires_grad)
        made._handle, made._index, made._bounds, made._at = handle, index, bounds, shard.data_ptr()
        return made

    @property
    def grad(self) -> Tensor | None:
        """View of the flat gradient. Unreduced gradients of no_sync are unsharded: optimizers refuse them."""
        shard = _shard_of(self._handle)
        if self._at != shard.data_ptr() or self.device != shard.device:
            self.data = _part(self._handle, self._index, self._bounds, shard)
            self._at = shard.data_ptr()
        grad = self._handle.flat_param.grad
        if grad is None or (self._handle.layout.sharded and grad.numel() != shard.numel()):
            return grad
        return _part(self._handle, self._index, self._bounds, grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        flat_param = self._handle.flat_param
        if value is None:
            flat_param.grad = None
            return
        if flat_param.grad is None:
            flat_param.grad = torch.zeros_like(_shard_of(self._handle))
        part = self.grad
        assert part is not None
        part.copy_(value)


def _shard_of(handle: FlatParamHandle) -> Tensor:
    """Return the local shard; the flat parameter's alias of it if possible, to share its version counter."""
    shown, shard = handle.flat_param.detach(), handle.local_shard
    return shown if shard is None or shard.data_ptr() == shown.data_ptr() else shard


def _part(handle: FlatParamHandle, index: int, bounds: tuple[int, int], flat: Tensor) -> Tensor:
    part = flat[slice(*bounds)]
    if handle.layout.sharded:
        return part
    flat_param = handle.flat_param
    return part.as_strided(flat_param._shapes[index], flat_param._strides[index], part.storage_offset())


def make_ranges(handle: FlatParamHandle) -> list[FlatRange]:
    """Return one range per original parameter; existing ranges are reused while alive."""
    found = ranges_of(handle) or [
        FlatRange(handle, index, each) for index, each in enumerate(handle.shard_bounds())
    ]
    handle._ranges = [weakref.ref(one) for one in found]
    return found


def ranges_of(handle: FlatParamHandle) -> list[FlatRange]:
    """Return the live ranges of ``handle``; empty if any was freed."""
    found = [one for reference in handle._ranges if isinstance(one := reference(), FlatRange)]
    return found if len(found) == len(handle.flat_param._fqns) else []
