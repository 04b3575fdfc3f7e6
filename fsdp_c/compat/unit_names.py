"""FSDP1's attributes and methods of a unit, for code written for torch."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fsdp_c.compat.mixed_use import refuse_torchs_functions
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in, units_of, whole_units_of
from fsdp_c.sharding.wrap import unit_name


def low_precision_dtype(hook: object) -> torch.dtype | None:
    """Return the dtype of torch's fp16/bf16 compression hooks (by identity), or None."""
    if hook is fp16_compress_hook:
        return torch.float16
    return torch.bfloat16 if hook is bf16_compress_hook else None


class UnitNames(ShardedModule):
    """Base of FullyShardedDataParallel with names that fsdp_c itself hardly uses."""

    @property
    def _all_fsdp_states(self) -> list[ShardedModule]:
        """The units of this root's tree. Computed: a stored list would keep the root alive."""
        return whole_units_of(self)

    @_all_fsdp_states.setter
    def _all_fsdp_states(self, states: object) -> None:
        refuse_torchs_functions(unit_name(self.module))

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        return handles_in(self)

    @property
    def _post_backward_callback_queued(self) -> bool:
        """True during a backward, and after one that raised."""
        return self._unit.runtime is not None and self._unit.runtime.callback_queued

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """True if torch.compile treats the wrapped module as sharded."""
        marked: bool = getattr(self._fsdp_wrapped_module, "_is_fsdp_managed_module", False)
        return marked

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        refuse_torchs_functions(unit_name(self.module))

    def _low_precision_hook_enabled(self) -> bool:
        return low_precision_dtype(self._comm_hook) is not None

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Make the current stream wait for the all-gathers started by ``_unshard`` in this tree."""
        for unit in units_of(self):
            unit._unit.wait_unsharded()
