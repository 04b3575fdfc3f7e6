"""Loss scaling for sharded gradients: all ranks skip a step if any rank's gradients overflow."""

from __future__ import annotations

from collections import abc, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state

from fsdp_c.sharding.construction import check_places
from fsdp_c.training.rank_local import group_of_optimizer, reduce_found_inf

__all__ = ["ShardedGradScaler"]

_DEVICE_TYPES = ("cuda", "cpu", "xla", "hpu", "mtia", "xpu")


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

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients. Return per device a nonzero tensor if any rank found inf or NaN.

        All inf/NaN checks of the base class use this method, so none is rank-local. A single all-reduce
        covers all devices, because ranks may have gradients on different ones.
        """
        if not allow_fp16:  # called by unscale_(), which expects one dimension for shards
            found_inf = found_inf.reshape(1)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if (grad := param.grad) is None:
                continue
            if grad.is_sparse:
                if grad.dtype is torch.float16:  # sums of scaled duplicates easily overflow in fp16
                    param.grad = grad = grad.float().coalesce().half()
                grad = grad._values()
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
        found: dict[torch.device, Tensor] = {}
        unscale = torch._amp_foreach_non_finite_check_and_unscale_
        for (device, dtype), grads in groups.items():
            finding, inverse = found.setdefault(device, found_inf.to(device, copy=True)), inv_scale.to(device)
            if dtype is torch.bfloat16 and device.type != "cpu":  # torch's CUDA kernel lacks bfloat16
                for grad in grads:
                    wide = grad.float()
                    unscale([wide], finding, inverse)
                    grad.copy_(wide)
            else:
                unscale(grads, finding, inverse)
        found = found or {found_inf.device: found_inf.clone()}
        group = self.process_group or group_of_optimizer(optimizer)
        reduce_found_inf(found, torch.device(self._device), group)
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
