"""Units with several flat parameters: of parameters that differ in dtype, or in whether they are trained.

The unit's own flat parameter has the first group of ``grouping.groups_of``. Each further group is that of a
segment, a ShardedModule beside the unit's, which wraps the same module: who walks over units finds it behind
its unit, with a handle, names and state of its own. The unit in C gathers, shows and frees its segments with
itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from fsdp_c.sharding.sharded_module import ShardedModule
from fsdp_c.sharding.traversal import flat_param_name


class Segment(ShardedModule):
    """One more flat parameter of a unit. What it is not asked for as such, its unit answers."""

    def __init__(self, fsdp_module: ShardedModule, number: int) -> None:
        super().__init__()
        self._enclosing = weakref.ref(fsdp_module)
        self._flat_param_name = flat_param_name(number)

    def __getattr__(self, name: str) -> Any:
        enclosing = self.__dict__.get("_enclosing")
        fsdp_module = enclosing() if enclosing is not None else None
        if fsdp_module is None:
            raise AttributeError(f"a segment of a unit that is gone has no attribute {name!r}")
        return getattr(fsdp_module, name)

    @property
    def _whole(self) -> ShardedModule:
        fsdp_module = self._enclosing_unit
        assert fsdp_module is not None
        return fsdp_module

    @property
    def _replicate_group(self) -> dist.ProcessGroup | None:
        return self._whole._replicate_group

    def _lazy_init(self, alone: bool = False) -> None:
        """Its unit's."""
        self._whole._lazy_init(alone)
