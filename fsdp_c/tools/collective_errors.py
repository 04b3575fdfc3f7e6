"""Annotation of collectives' errors, and of memory that runs out in them, with rank, unit, phase and remedy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_c import _C
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.tools import phases

_TAKES_LESS = (
    "Smaller units (auto_wrap_policy=), a smaller batch and "
    "cpu_offload=CPUOffload(offload_params=True) take less; fsdp_c.summary(model) estimates the "
    "memory of a step."
)
_GATHERS_LESS = (
    "offload_to_cpu=True with rank0_only=True keeps gathered parameters off the device; "
    "fsdp_c.iter_full_params() and fsdp_c.checkpoint.save() never hold the whole model."
)
_RAN_OUT = "memory ran out while this rank"
_FORWARD_GATHER = _C.PHASES.index("waits in the all-gather of ")


def explain(error: BaseException, phase: int, step: int, handle: FlatParamHandle, enqueued: bool) -> None:
    """Add rank, step, phase and unit to the error of a unit's collective. Called by the C runtime.

    Annotates RuntimeError, raised by backends; while the collective is being enqueued only DistError and
    out-of-memory errors, because user code may raise others there.
    """
    if isinstance(error, RuntimeError if enqueued else dist.DistError) or _is_of_memory(error):
        _explain(error, f", step {step}", _C.PHASES[phase] + handle.name)


def _is_of_memory(error: BaseException) -> bool:
    """Return True for out-of-memory errors: plain RuntimeErrors from backends, and without a caching allocator."""
    is_text = isinstance(error, RuntimeError) and "out of memory" in str(error)
    return is_text or isinstance(error, torch.OutOfMemoryError)


@contextlib.contextmanager
def explained(doing: str, only_memory: bool = False) -> Iterator[None]:
    """Add the purpose to RuntimeErrors of a body that only calls collectives, outside of units.

    Phases warn of a body that waits for long. The end of a nested body ends the outer one's wait.
    """
    phases.waiting_since[threading.get_ident()] = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not only_memory:
            _explain(error, "", f"is {doing}")
        elif _is_of_memory(error):
            _explain(error, "", doing, remedy=_GATHERS_LESS)
        raise
    finally:
        phases.waiting_since.pop(threading.get_ident(), None)


def gathering(*handles: FlatParamHandle) -> contextlib.AbstractContextManager[None]:
    """Annotate out-of-memory errors of a body that unshards units outside of a step."""
    others = len(handles) - 1
    more = f" and {others} unit{'s' * (others > 1)} after it" if others else ""
    return explained(f"gathers {handles[0].name}{more}", only_memory=True)


@contextlib.contextmanager
def of_first_gather(handle: FlatParamHandle) -> Iterator[None]:
    """Annotate out-of-memory errors of a body that allocates the memory of a unit's first all-gather."""
    try:
        yield
    except RuntimeError as error:
        if _is_of_memory(error):
            explain(error, _FORWARD_GATHER, 0, handle, False)
        raise


def _explain(error: BaseException, step: str, doing: str, remedy: str = _TAKES_LESS) -> None:
    if len(error.args) != 1 or _RAN_OUT in str(error) or not dist.is_initialized():
        return
    if _is_of_memory(error):
        told = f"{_RAN_OUT} {doing}. {remedy}"
    else:
        told = f"a collective failed or timed out while this rank {doing}."
    error.args = (f"{error}\nrank {dist.get_rank()}{step}: {told}",)
