"""Unsharded parameters outside of steps: ``summon_full_params``, and what state dicts share with it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c import _C
from fsdp_c.compat.upstream import ShardingStrategy
from fsdp_c.sharding.flat_param import FlatParamHandle, ManagedParam
from fsdp_c.sharding.sharded_module import (
    ShardedModule,
    handle_of,
    holders_around,
    is_sharded_module,
    parts_of,
    place_of,
    units_of,
)
from fsdp_c.tools import collective_errors, phases

_ABSENT = object()


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Expose full parameters of units in ``module``, with original dtypes and FQNs, in a context.

    Collective on entry. Inside, forwards use the exposed parameters without an all-gather, under
    ``torch.no_grad()``; backwards are not allowed. At exit edits to this rank's shard are kept, unless
    ``writeback`` is False. With ``rank0_only`` (and ``writeback=False``) the other ranks see their shards.
    ``offload_to_cpu`` exposes copies in CPU memory. ``with_grads`` exposes full gradients (use_orig_params
    only).

    Raises AssertionError inside a forward, a backward or another ``summon_full_params``. Raises
    NotImplementedError for ``writeback`` with ``rank0_only``, ``offload_to_cpu`` under NO_SHARD, and
    ``with_grads`` without use_orig_params or with ``offload_to_cpu``.
    """
    if recurse:
        fsdp_modules = units_of(module)
        fsdp_modules = [*_idle_holders_around(fsdp_modules), *fsdp_modules]
    else:
        fsdp_modules = parts_of(module) if is_sharded_module(module) else []
    for fsdp_module in fsdp_modules:
        _check_arguments(fsdp_module, writeback, rank0_only, offload_to_cpu, with_grads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(phases.enter(_C.PROGRESS_SUMMON))
        for fsdp_module in fsdp_modules:
            stack.enter_context(bound_runtime(fsdp_module))
        for fsdp_module in fsdp_modules:
            _check_state(fsdp_module)
            if recurse:
                fsdp_module._was_summoned = True
        for fsdp_module in fsdp_modules:
            stack.enter_context(_summon_unit(fsdp_module, writeback, rank0_only, offload_to_cpu, with_grads))
        yield


def _idle_holders_around(fsdp_modules: list[ShardedModule]) -> list[ShardedModule]:
    """Return enclosing units that own parameters of ``fsdp_modules``, except summoned ones."""
    members = set(fsdp_modules)
    found: dict[ShardedModule, None] = {}
    for fsdp_module in fsdp_modules:
        if fsdp_module._enclosing_unit not in members:
            found.update(dict.fromkeys(holders_around(fsdp_module)))
    return [holder for holder in found if handle_of(holder).training_state == _C.USE_IDLE]


def _check_arguments(
    fsdp_module: ShardedModule, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    """Raise for unsupported arguments, before the first collective."""
    use_orig_params = fsdp_module._use_orig_params
    if with_grads and (offload_to_cpu or not use_orig_params):
        raise NotImplementedError(
            f"with_grads={with_grads}, use_orig_params={use_orig_params}, offload_to_cpu={offload_to_cpu} is "
            "not supported: full gradients need use_orig_params=True and offload_to_cpu=False"
        )
    if offload_to_cpu and fsdp_module._handle and fsdp_module.sharding_strategy == ShardingStrategy.NO_SHARD:
        raise NotImplementedError(
            "offload_to_cpu=True and NO_SHARD is not supported: nothing is gathered there"
        )
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported: the other ranks would keep their old "
            "shards; pass writeback=False"
        )
    if offload_to_cpu and not rank0_only:
        warn_of_copies()


def warn_of_copies() -> None:
    """Warn that every rank gets a copy of the full parameters."""
    warnings.warn(
        "offload_to_cpu=True and rank0_only=False may result in one copy of all parameters in CPU memory for "
        "each rank: pass rank0_only=True to keep one",
        stacklevel=5,
    )


def _check_state(fsdp_module: ShardedModule) -> None:
    if fsdp_module._unit.runtime is not None:
        fsdp_module._unit.runtime.recover()
    state = fsdp_module._unit.training_state
    if state == _C.USE_SUMMON_FULL_PARAMS:
        raise AssertionError(
            f"Cannot manually unshard parameters when already unsharding parameters ({place_of(fsdp_module)})"
        )
    if state != _C.USE_IDLE:
        raise AssertionError(
            f"Cannot manually unshard parameters during forward/backward ({place_of(fsdp_module)})"
        )
    if fsdp_module._handle is not None:
        check_idle(fsdp_module)


def check_idle(fsdp_module: ShardedModule, summoned: bool = True) -> None:
    """Recover from a failed backward. Raise AssertionError unless the unit is idle, or summoned if ``summoned``."""
    if fsdp_module._unit.runtime is not None:
        fsdp_module._unit.runtime.recover()
    state = handle_of(fsdp_module).training_state
    if state == _C.USE_SUMMON_FULL_PARAMS:
        if not summoned:
            raise AssertionError(
                f"Expects the handle training to be IDLE but got {handle_of(fsdp_module)._training_state} "
                f"({place_of(fsdp_module)}): its shard gets the changes of full parameters only when "
                "summon_full_params ends; leave it first"
            )
    elif state != _C.USE_IDLE:
        raise AssertionError(
            f"Expects the handle training to be IDLE but got {handle_of(fsdp_module)._training_state} "
            f"({place_of(fsdp_module)}): parameters cannot be unsharded by hand during forward or backward"
        )


@contextlib.contextmanager
def _summon_unit(
    fsdp_module: ShardedModule, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    synchronize(fsdp_module.compute_device)
    handle = fsdp_module._handle
    if handle is None:
        fsdp_module._unit.set_summoning(True)
        try:
            yield
        finally:
            fsdp_module._unit.set_summoning(False)
        return
    with contextlib.ExitStack() as stack:
        with collective_errors.gathering(handle):
            handle.summon_enter(writeback)
        if with_grads:
            # pushed first, runs after summon_exit: gradients follow parameters
            stack.callback(handle.summon_grads_exit, writeback)
        stack.callback(handle.summon_exit)
        if with_grads:
            with collective_errors.gathering(handle):
                handle.summon_grads()
        if rank0_only and fsdp_module.rank != 0:
            handle.summon_reshard()
            if with_grads:
                handle.summon_grads_exit(False)
        elif offload_to_cpu and fsdp_module.compute_device.type != "cpu":  # the CPU has them already
            stack.enter_context(_offloaded(handle, writeback))
        yield


@contextlib.contextmanager
def _offloaded(handle: FlatParamHandle, writeback: bool) -> Iterator[None]:
    """Expose copies in CPU memory and free the unsharded parameters; copy edits back at exit."""
    copies: list[nn.Parameter] = []
    for param in handle.managed_params[: handle.layout.num_params]:
        full = getattr(param.module, param.name)
        copies.append(nn.Parameter(full.detach().to("cpu", copy=True), requires_grad=full.requires_grad))
    shown = [(param, copies[param.place]) for param in handle.managed_params]
    handle.summon_free()
    with mounted(shown):
        yield
    if not writeback:
        return
    # The unsharded parameters were freed. Summon again to write the edits back.
    handle.summon_exit()
    with collective_errors.gathering(handle):
        handle.summon_enter(True)
    with torch.no_grad():
        for param, copy in shown:
            getattr(param.module, param.name).copy_(copy)


@contextlib.contextmanager
def bound_runtime(fsdp_module: ShardedModule) -> Iterator[None]:
    """Lazily initialize ``fsdp_module``; undo the initialization at exit if this call did it.

    State dicts and parameter inspection must not decide which unit is the root: some ranks may not call them.
    """
    if fsdp_module._unit.runtime is not None:
        yield
        return
    fsdp_module._lazy_init(alone=True)
    try:
        yield
    finally:
        if (runtime := fsdp_module._unit.runtime) is not None:
            runtime.release()


@contextlib.contextmanager
def mounted(params: Sequence[tuple[ManagedParam, Tensor]]) -> Iterator[None]:
    """Register ``params`` in their modules inside the context; restore the previous registrations at exit."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (module, name, *_), tensor in params:
            attributes = module.__dict__
            registered: dict[str, Any] = attributes["_parameters"]
            found.append((registered, name, registered.get(name, _ABSENT)))
            if name in attributes:
                found.append((attributes, name, attributes.pop(name)))
            registered[name] = tensor
        yield
    finally:
        for mapping, name, value in reversed(found):
            if value is _ABSENT:
                mapping.pop(name, None)
            else:
                mapping[name] = value


def synchronize(device: torch.device) -> None:
    """Block until all work on ``device`` is done. No-op for the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
