"""Units of ours in the hands of torch's own FSDP1 functions, in a process where fsdp_c is not installed.

They find our units through the base class that both share. What reads names and sizes, or sets what units
show as attributes, works as it is: ``state_dict_type`` and its kin, ``fsdp_modules``, ``optim_state_dict``
and ``optim_state_dict_to_load``. What would run a unit (``summon_full_params``, ``clip_grad_norm_``,
``no_sync``, ``apply``, a unit of torch's around ours) meets one error at the first thing that it does to one,
and so does torch.distributed.checkpoint, which gives parameters wrong names where it does not know a class.
"""

from __future__ import annotations

import sys
from typing import NoReturn

_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_MODULE = "torch.nn.modules.module"  # its __setattr__ is a frame in between


class NotInstalledError(RuntimeError, AttributeError):
    """An attribute error as well: whoever asks ``hasattr`` is told no."""


def refuse_torchs_functions(name: str) -> NoReturn:
    """Raise: a function of torch's FSDP1 was called on the unit ``name``."""
    raise NotInstalledError(
        f"unit {name}: torch's FullyShardedDataParallel, and torch.distributed.checkpoint with it, do not "
        "know fsdp_c's units. Call fsdp_c.install(), which puts fsdp_c in torch's place, or use the methods "
        "of fsdp_c.FullyShardedDataParallel and fsdp_c.checkpoint; one model is run by one implementation"
    )


def refuse_torchs_checkpoint(name: str, our_class: type) -> None:
    """Raise if the caller's caller is torch.distributed.checkpoint and knows another FSDP than ours."""
    caller = sys._getframe(2).f_globals
    if caller.get("__name__") == _CHECKPOINT and caller.get("FSDP") is not our_class:
        refuse_torchs_functions(name)


def refuse_torchs_methods(name: str) -> None:
    """Raise if the caller's caller is a method of torch's class."""
    if sys._getframe(2).f_globals.get("__name__") == _FSDP:
        refuse_torchs_functions(name)


def refuse_torchs_runtime(name: str) -> None:
    """Raise if the attribute of a module that the caller sets is set by torch's runtime."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == _MODULE:
        frame = frame.f_back
    if frame.f_globals.get("__name__") == _RUNTIME:
        refuse_torchs_functions(name)
