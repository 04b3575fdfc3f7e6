"""Loss scaling for sharded gradients: all ranks skip a step if any rank's gradients overflow."""

from __future__ import annotations

import math
import numbers
import weakref
from collections import abc, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state

from fsdp_c.sharding.construction import check_places
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import root_units
from fsdp_c.training.rank_local import reduce_found_inf, torchs_unscale_grads_

__all__ = ["ShardedGradScaler"]

_DEVICE_TYPES = ("cuda", "cpu", "xla", "hpu", "mtia", "xpu")


def _check_numbers(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, not {type(value).__name__} {value!r}")
        if not 0 < float(value) < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {value}")


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` that reduces its inf/NaN check over all ranks of ``process_group``.

    Usage is that of the base class: ``scale(loss).backward()``, ``step(optimizer)``, ``update()``. Gradients
    may be fp16 and may be on the CPU. ``unscale_`` is collective, and so is ``step`` without an earlier
    ``unscale_``: ranks whose shards hold no gradient must take part. Fused optimizers, which read the check
    in their own kernel, are supported.

    Args:
        device: type of the compute device; the scaler disables itself for an unavailable "cuda".
        process_group: ranks that step together (default: the ranks that hold the optimizer's units, all ranks
            if it steps none).
        enabled: if False, ``step`` calls the optimizer, and everything else is a no-op without communication.

    Raises TypeError for settings of the wrong type, ValueError for values that are not positive and finite.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_places(process_group, None, None)
        if not isinstance(device, (str, torch.device)):
            raise TypeError(
                f"device must be the type of one, as 'cuda', not {type(device).__name__} {device!r}"
            )
        if not isinstance(growth_interval, numbers.Integral):
            raise TypeError(f"growth_interval must be a number of steps, not {growth_interval!r}")
        _check_numbers(
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
        )
        super().__init__(
            device.type if isinstance(device, torch.device) else device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        if self._enabled:
            self.process_group = process_group

    # ---- scaling

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or all tensors in nested lists, tuples and iterables, by the scale.

        Tensors keep their dtype, lists and tuples their type. Raises ValueError for other objects,
        AssertionError for a tensor on an unsupported device.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scaled(outputs)
        if not isinstance(outputs, abc.Iterable) or isinstance(outputs, (str, bytes)):
            raise ValueError(
                f"outputs must be a Tensor or an iterable of Tensors, but got {type(outputs).__name__}"
            )
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _scaled(self, output: Tensor) -> Tensor:
        supported = (*_DEVICE_TYPES, torch._C._get_privateuse1_backend_name())
        if output.device.type not in supported:
            raise AssertionError(
                f"Expected supported device, got {output.device}: pass one of {', '.join(supported)}"
            )
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        return (output * self._scale.to(output.device, non_blocking=True)).to(output.dtype)

    # ---- inf/NaN check

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients. Return per device a nonzero tensor if any rank found inf or NaN.

        All inf/NaN checks of the base class use this method, so none is rank-local. A single all-reduce
        covers all devices, because ranks may have gradients on different ones.
        """
        for param in _params(optimizer):
            if param.grad is not None and param.grad.is_sparse and param.grad.dtype is torch.float16:
                # coalesce in fp32: sums of scaled duplicates easily overflow in fp16
                param.grad = param.grad.to(torch.float32).coalesce().to(torch.float16)
        if not allow_fp16:  # called by unscale_(), which expects one dimension for shards
            found_inf = found_inf.reshape(1)
        grads = _grads_together(optimizer, found_inf.device)
        if grads:
            found = {found_inf.device: found_inf.clone()}
            torch.ops.fsdp_c.unscale_(grads, found[found_inf.device], inv_scale)
        else:
            found = torchs_unscale_grads_(self, optimizer, inv_scale, found_inf, True)
            found = found or {found_inf.device: found_inf.clone()}
        group = self.process_group or _group_of(optimizer)
        reduce_found_inf(found, torch.device(self._device), [group])
        return found

    # ---- scale update

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set ``new_scale``, or update the scale from the inf/NaN checks since the last call.

        The scale is lowered after a skipped step and raised after ``growth_interval`` good ones. Raises
        AssertionError if no gradients were checked since the last update, or for a ``new_scale`` that is not
        one element without gradient on the scaler's device.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if isinstance(new_scale, Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())  # shape of the scale, to which the base class copies it
        if new_scale is not None or scale.device.type != "cpu":
            super().update(new_scale)
            return
        findings = [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if not findings:
            raise AssertionError("No inf checks were recorded prior to update.")
        # in fp32, as FSDP1: torch's CPU kernel multiplies in fp64 and rounds differently
        growth_tracker += 1
        if any(found.item() for found in findings):
            scale *= self._backoff_factor
            growth_tracker.zero_()
        elif growth_tracker.item() == self._growth_interval:
            growth_tracker.zero_()
            grown = scale * self._growth_factor
            if grown.isfinite():
                scale.copy_(grown)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def _params(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, dist.ProcessGroup | None] = (
    weakref.WeakKeyDictionary()
)


def _group_of(optimizer: torch.optim.Optimizer) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the units of ``optimizer``; None for all ranks."""
    if optimizer not in _groups:
        held = set(map(id, _params(optimizer)))
        roots = [root for root in root_units() if not held.isdisjoint(map(id, root.parameters()))]
        found = set(map(group_of_model, roots))
        _groups[optimizer] = found.pop() if len(found) == 1 else None
    return _groups[optimizer]


def _grads_together(optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor]:
    """Return all gradients if one ``fsdp_c::unscale_`` call supports them, else an empty list."""
    grads = [param.grad.detach() for param in _params(optimizer) if param.grad is not None]
    plain = all(
        grad.device == device and grad.layout is torch.strided and type(grad) is Tensor for grad in grads
    )
    return grads if plain else []


_WIDE_NUMEL = 2**22  # elements converted to fp32 at a time


@torch.no_grad()
def _unscale_op(tensors: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Implement ``torch.ops.fsdp_c.unscale_``: multiply ``tensors`` by ``inverse_scale`` in place.

    Sets ``found_inf`` to 1 if an element was inf or NaN. Raises RuntimeError unless ``found_inf`` and
    ``inverse_scale`` are one float32 each.
    """
    for name, number in (("found_inf", found_inf), ("inverse_scale", inverse_scale)):
        if number.dtype is not torch.float32 or number.numel() != 1:
            raise RuntimeError(f"fsdp_c::unscale_: {name} must be one float32")
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    if found_inf.device.type != "cpu":  # torch's CUDA kernel does not support bfloat16
        for tensor in groups.pop(torch.bfloat16, []):
            for part in tensor.view(-1).split(_WIDE_NUMEL) if tensor.is_contiguous() else [tensor]:
                wide = part.float()
                torch._amp_foreach_non_finite_check_and_unscale_([wide], found_inf, inverse_scale)
                part.copy_(wide)
    for group in groups.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse_scale)


if not hasattr(torch.ops.fsdp_c, "unscale_"):  # already defined by an earlier import
    _library = torch.library.Library("fsdp_c", "FRAGMENT")
    _library.define("unscale_(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inverse_scale) -> ()")
    for _key in ("CompositeExplicitAutograd", "CUDA"):
        _library.impl("unscale_", _unscale_op, _key)
    _library.impl("unscale_", lambda tensors, found_inf, inverse_scale: None, "Meta")
