"""What clients read and write of the order in which the units of a tree run, which the runtime in C keeps."""

from __future__ import annotations

import weakref

import torch.nn as nn

from fsdp_c import _C
from fsdp_c.compat.upstream import _get_param_to_fqns
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule

__all__ = ["ExecutionOrder"]


class ExecutionOrder:
    """``_exec_order_data`` of a unit; from lazy initialisation on that of its root.

    ``_forward_prefetch_limit`` and ``_backward_prefetch_limit``, how many units are prefetched, can be
    written at any time. Raises ValueError for a negative one.
    """

    def __init__(self) -> None:
        self._limits = {"_backward_prefetch_limit": 1, "_forward_prefetch_limit": 1}
        self._root: weakref.ref[ShardedModule] | None = None

    def bind(self, root: ShardedModule, runtime: _C.Runtime) -> None:
        """Bind to the units of ``root``; its ``runtime`` takes over the limits."""
        self._root = weakref.ref(root)
        for name, limit in self._limits.items():
            setattr(runtime, name, limit)

    def _bound(self) -> ShardedModule | None:
        return None if self._root is None else self._root()

    def _runtime(self) -> _C.Runtime | None:
        root = self._bound()
        return None if root is None else root._unit.runtime

    def _limit(self, name: str) -> int:
        runtime = self._runtime()
        limit: int = self._limits[name] if runtime is None else getattr(runtime, name)
        return limit

    def _set_limit(self, name: str, limit: int) -> None:
        runtime = self._runtime()
        if runtime is not None:
            setattr(runtime, name, limit)
        self._limits[name] = limit

    @property
    def _backward_prefetch_limit(self) -> int:
        return self._limit("_backward_prefetch_limit")

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, limit: int) -> None:
        self._set_limit("_backward_prefetch_limit", limit)

    @property
    def _forward_prefetch_limit(self) -> int:
        return self._limit("_forward_prefetch_limit")

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, limit: int) -> None:
        self._set_limit("_forward_prefetch_limit", limit)

    @property
    def _iter(self) -> int:
        """How many backwards have ended since lazy initialisation."""
        runtime = self._runtime()
        return 0 if runtime is None else runtime.iteration

    @property
    def is_first_iter(self) -> bool:
        """Whether no backward has ended since lazy initialisation."""
        return self._iter == 0

    @property
    def all_handles(self) -> list[FlatParamHandle]:
        """The handles of the tree, outer units before inner; empty before lazy initialisation."""
        root = self._bound()
        return [] if root is None else root._all_handles

    @property
    def param_to_fqn(self) -> dict[nn.Parameter, list[str]]:
        """The names that each parameter of the tree stands for; empty before lazy initialisation."""
        root = self._bound()
        return {} if root is None else _get_param_to_fqns(root)
