"""An optimizer that steps in the backward: each unit's parameters as soon as its gradients are reduced.

[Note: beside the backward] On a GPU a unit's step is enqueued on the stream that its reduction has just been
given, and computation waits for it at the backward's end. What lies on the CPU is stepped by a thread, in the
order of the reductions, for which the backward waits at its end; there a gradient that is offloaded must have
come first. Nothing of a unit is looked at by others meanwhile: C waits before it is gathered, or has
gradients, again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c.compat.errors import with_note
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.training import grad_clipping

_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def refuse_scaled(optimizer: torch.optim.Optimizer) -> None:
    """RuntimeError for an optimizer whose gradients are unscaled after the backward that it has stepped in."""
    if optimizer in _optimizers:
        raise RuntimeError(
            f"{type(optimizer).__name__} has stepped in the backward with gradients of a scaled loss "
            "(fsdp_c.optim.step_in_backward): train without a GradScaler, in bfloat16 for instance, or step after "
            "the backward"
        )


class BackwardSteps:
    """The ``stepper`` of all units whose parameters one optimizer has."""

    def __init__(self, optimizer: torch.optim.Optimizer, clips: bool) -> None:
        self.optimizer, self.clips = optimizer, clips
        _optimizers.add(optimizer)
        self.coefficient: Tensor | None = None  # of the last clip_grad_norm_()
        self._norms: dict[int, grad_clipping.GradsByGroups] = {}  # by the handle's id, of the last backward
        self._pending: dict[int, Future[None]] = {}  # likewise
        self._thread: ThreadPoolExecutor | None = None
        self._groups: list[dict[str, Any]] = []  # the optimizer's, when there were so many:
        self._num_groups = 0
        self._group_of: dict[Tensor, int] = {}

    def step(self, handle: FlatParamHandle) -> None:
        """Step the parameters that have a gradient, which they have no longer; or begin to."""
        if not self._pending:
            self._read_groups()
        known = [param for param in handle.script_params if param in self._group_of]
        params = [param for param in known if param.grad is not None]
        if not params:
            return
        if params[0].device.type != "cpu":
            self._step(handle, params)
            handle.collect_user_grads()
            return
        reduced = None
        if handle.device.type != "cpu":  # where the gradients come from
            reduced = torch.get_device_module(handle.device).current_stream(handle.device).record_event()
        grads = [param.grad.detach() for param in params if param.grad is not None]
        _clear(params)
        handle.collect_user_grads()  # before the thread shows them to the optimizer
        self._thread = self._thread or ThreadPoolExecutor(1, "fsdp_c-step")
        self._pending[id(handle)] = self._thread.submit(self._step_later, handle, params, grads, reduced)

    def wait(self, handle: FlatParamHandle) -> None:
        """Return when the handle's parameters have been stepped; raises what was raised there."""
        pending = self._pending.pop(id(handle), None)
        if pending is not None:
            pending.result()

    def take_norms(self, handle: FlatParamHandle) -> grad_clipping.GradsByGroups:
        """The norms of what the last backward stepped with. Each can be had once."""
        return self._norms.pop(id(handle), {})

    def _read_groups(self) -> None:
        groups = self.optimizer.param_groups
        if groups is not self._groups or len(groups) != self._num_groups:
            self._groups, self._num_groups = groups, len(groups)
            self._group_of = {param: i for i, group in enumerate(groups) for param in group["params"]}

    def _step_later(
        self, handle: FlatParamHandle, params: Sequence[nn.Parameter], grads: list[Tensor], reduced: Any
    ) -> None:
        if reduced is not None:
            reduced.synchronize()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        self._step(handle, params)

    def _step(self, handle: FlatParamHandle, params: Sequence[nn.Parameter]) -> None:
        try:
            if self.clips:
                self._clip(handle, params)
            self._step_alone(params)
        except Exception as error:
            with_note(error, f"in the step of unit {handle.name} on rank {handle.rank}, amid a backward")
            raise
        finally:
            _clear(params)

    def _clip(self, handle: FlatParamHandle, params: Sequence[nn.Parameter]) -> None:
        self._norms[id(handle)] = grad_clipping.norms_by_groups(handle)
        if self.coefficient is not None:
            grad_clipping.scale([param.grad for param in params if param.grad is not None], self.coefficient)

    def _step_alone(self, params: Sequence[nn.Parameter]) -> None:
        """One step of the optimizer that knows of no others."""
        own: dict[int, list[nn.Parameter]] = {}
        for param in params:
            own.setdefault(self._group_of[param], []).append(param)
        stepped = [{**self._groups[index], "params": found} for index, found in sorted(own.items())]
        self.optimizer.param_groups = stepped
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = self._groups
        for index, after in zip(sorted(own), stepped, strict=True):
            before = {**self._groups[index], "params": after["params"]}
            changed = [name for name, value in after.items() if value is not before.get(name)]
            if changed:
                raise ValueError(
                    f"{type(self.optimizer).__name__} changes {changed} of a group in each step, so it cannot "
                    "step unit by unit: call its step() after the backward"
                )


def _clear(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = None
