"""Units of ours in the hands of torch's own FSDP1 functions, in a process where fsdp_c is not installed.

They find our units through the base class that both share. What reads names and sizes, or sets what units
show as attributes, works as it is: ``state_dict_type`` and its kin, ``fsdp_modules``. ``no_sync`` finds no unit of its
class, so that each backward reduces: more is sent, and gradients are right. What would run a
unit (``summon_full_params``, ``clip_grad_norm_``, ``apply``, a unit of torch's around ours) meets one error at the
first attribute that it sets there, and so does torch.distributed.checkpoint, which gives parameters wrong names where
it does not know a class.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class NotInstalledError(RuntimeError, AttributeError):
    """An attribute error as well: whoever asks ``hasattr`` is told no."""


_MESSAGE = (
    "unit {}: torch's FullyShardedDataParallel, and torch.distributed.checkpoint with it, do not know fsdp_c's units. "
    "Call fsdp_c.install(), which puts fsdp_c in torch's place, or use the methods of fsdp_c.FullyShardedDataParallel "
    "and fsdp_c.checkpoint; one model is run by one implementation"
)


def refuse_torchs_functions(name: str) -> NoReturn:
    """Raise: a function of torch's FSDP1 was called on the unit ``name``."""
    raise NotInstalledError(_MESSAGE.format(name))


def refuse_torchs_checkpoint(name: str, our_class: type) -> None:
    """Raise if torch.distributed.checkpoint, which has asked for an attribute, knows another FSDP than ours."""
    state_dict: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if state_dict is not None and state_dict.FSDP is not our_class:
        raise RuntimeError(_MESSAGE.format(name))  # hasattr() passes it on
