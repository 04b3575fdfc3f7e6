"""Errors for fsdp_c units passed to torch's FSDP1 functions, in a process without ``install()``.

Torch's functions recognize the units by the shared base class. Functions that read names and sizes, or set
unit attributes, work: ``state_dict_type`` and similar, ``fsdp_modules``. ``no_sync`` finds no unit of its
class, so each backward reduces: gradients are right, with more communication. Functions that would run a unit
(``summon_full_params``, ``clip_grad_norm_``, ``apply``, torch's class around a unit) raise one error at the
first attribute that they set. torch.distributed.checkpoint raises it too: for an unknown class it would save
parameters under wrong FQNs.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class NotInstalledError(RuntimeError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` returns False."""


_MESSAGE = (
    "unit {}: torch's FullyShardedDataParallel, and torch.distributed.checkpoint with it, do not "
    "know fsdp_c's units. Call fsdp_c.install(), which replaces torch's FSDP1, or use the methods of "
    "fsdp_c.FullyShardedDataParallel and fsdp_c.checkpoint; one model is run by one implementation"
)


def refuse_torchs_functions(name: str) -> NoReturn:
    """Raise NotInstalledError: a function of torch's FSDP1 was called on the unit ``name``."""
    raise NotInstalledError(_MESSAGE.format(name))


def refuse_torchs_checkpoint(name: str, our_class: type) -> None:
    """Raise RuntimeError if torch.distributed.checkpoint uses another FSDP class than ``our_class``.

    Called for an attribute that only torch.distributed.checkpoint reads.
    """
    state_dict: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if state_dict is not None and state_dict.FSDP is not our_class:
        raise RuntimeError(_MESSAGE.format(name))  # not an AttributeError: hasattr() must propagate it
