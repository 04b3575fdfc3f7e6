"""Attributes of ``_exec_order_data`` that clients use. C holds the execution order itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from fsdp_c import _C
from fsdp_c.compat.upstream import _get_param_to_fqns
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in

_LIMITS = ("_backward_prefetch_limit", "_forward_prefetch_limit")


class ExecutionOrder:
    """``_exec_order_data`` of a unit; the root's object after lazy initialization.

    The limits (numbers of units to prefetch) are writable at any time. Raises ValueError for a negative
    limit.
    """

    def __init__(self) -> None:
        self._root: Callable[[], ShardedModule | None] = lambda: None  # weak reference to the root once bound
        self._backward_prefetch_limit = 1
        self._forward_prefetch_limit = 1

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. An existing runtime gets limits too."""
        if name in _LIMITS and (runtime := self._runtime()) is not None:
            setattr(runtime, name, value)
        super().__setattr__(name, value)

    def bind(self, root: ShardedModule, runtime: _C.Runtime) -> None:
        """Attach to the tree of ``root`` and set the limits of its ``runtime``."""
        self._root = weakref.ref(root)
        for name in _LIMITS:
            setattr(runtime, name, getattr(self, name))

    def _runtime(self) -> _C.Runtime | None:
        root = self._root()
        return None if root is None else root._unit.runtime

    @property
    def _iter(self) -> int:
        """Number of completed backwards since lazy initialization."""
        runtime = self._runtime()
        return 0 if runtime is None else runtime.iteration

    @property
    def is_first_iter(self) -> bool:
        return self._iter == 0

    @property
    def all_handles(self) -> list[FlatParamHandle]:
        """The handles of the tree in pre-order; empty before lazy initialization."""
        root = self._root()
        return [] if root is None else handles_in(root)

    @property
    def param_to_fqn(self) -> dict[nn.Parameter, list[str]]:
        """The FQNs of each parameter of the tree; empty before lazy initialization."""
        root = self._root()
        return {} if root is None else _get_param_to_fqns(root)
