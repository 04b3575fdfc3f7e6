"""What clients read and write of the order in which the units of a tree run, which the runtime in C keeps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_c import _C
from fsdp_c.compat.upstream import _get_param_to_fqns
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule

__all__ = ["ExecutionOrder", "check_order"]

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class ExecutionOrder:
    """``_exec_order_data`` of a unit; from lazy initialisation on that of its root.

    ``_forward_prefetch_limit`` and ``_backward_prefetch_limit``, how many units are prefetched, can be
    written at any time. Raises ValueError for a negative one.
    """

    def __init__(self) -> None:
        self._limits = {"_backward_prefetch_limit": 1, "_forward_prefetch_limit": 1}
        self._root: weakref.ref[ShardedModule] | None = None
        self._check: _Check | None = None

    def bind(self, root: ShardedModule, runtime: _C.Runtime) -> ExecutionOrder:
        """That of ``root``, whose ``runtime`` takes over the limits: this one, unless it is another root's, of
        whose tree ``root`` was a part."""
        order = self
        if self._bound() not in (None, root):
            order = ExecutionOrder()
            order._limits = dict(self._limits)
        order._root = weakref.ref(root)
        for name, limit in order._limits.items():
            setattr(runtime, name, limit)
        return order

    def check(self, names: list[list[str]], group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare the order of forwards in training mode from now on; ``names`` are those of each unit's
        parameters."""
        self._check = _Check(names, group, device)

    def _bound(self) -> ShardedModule | None:
        return None if self._root is None else self._root()

    def _runtime(self) -> _C.Runtime | None:
        root = self._bound()
        return None if root is None else root._unit.runtime

    @staticmethod
    def _limit(name: str) -> Any:
        def read(self: ExecutionOrder) -> int:
            return self._limits[name] if (runtime := self._runtime()) is None else getattr(runtime, name)

        def write(self: ExecutionOrder, limit: int) -> None:
            if (runtime := self._runtime()) is not None:
                setattr(runtime, name, limit)
            self._limits[name] = limit

        return property(read, write)

    _backward_prefetch_limit: int = _limit("_backward_prefetch_limit")
    _forward_prefetch_limit: int = _limit("_forward_prefetch_limit")

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


class _Check:
    """The order of units under TORCH_DISTRIBUTED_DEBUG=DETAIL (D-115).

    In the first iteration every unit that is about to be gathered is compared across ranks before its
    all-gather, which would hang or mix up parameters: RuntimeError. The order of that iteration is kept, and a
    later one that deviates from it is warned of once.
    """

    def __init__(self, names: list[list[str]], group: dist.ProcessGroup, device: torch.device) -> None:
        self._names = names
        self._group = group
        # an all-gather that outside code has replaced may fill nothing: then all ranks are alike
        self._everyone = torch.zeros(group.size(), dtype=torch.int64, device=device)
        self._first: list[int] = []
        self._iteration = self._position = 0
        self._warned = False

    def __call__(self, unit: int, iteration: int) -> None:
        if iteration == 0:
            self._compare_ranks(unit)
            self._first.append(unit)
            return
        if iteration != self._iteration:
            self._iteration, self._position = iteration, 0
        expected = self._first[self._position : self._position + 1]
        self._position += 1
        if self._warned or expected == [unit]:
            return
        self._warned = True
        came = f"{self._names_of(expected[0])} next" if expected else "no more"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {self._group.rank()}. Collectives "
            f"are unchecked and may give incorrect results or hang.\nIn the first iteration came {came}, but "
            f"{self._names_of(unit)} was run",
            stacklevel=3,
        )

    def _names_of(self, unit: int) -> list[str] | None:
        return self._names[unit] if 0 <= unit < len(self._names) else None

    def _compare_ranks(self, unit: int) -> None:
        """Before the index upstream sends how many units are gathered, which is 1: whoever counts collectives
        finds as many."""
        self._gather(1)
        first, *others = self._gather(unit)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise RuntimeError(
                    "Forward order differs across ranks: rank 0 is all-gathering parameters for "
                    f"{self._names_of(first)} while rank {rank} is all-gathering parameters for "
                    f"{self._names_of(other)}. Every rank must run the same units in the same order."
                )

    def _gather(self, value: int) -> list[int]:
        own = torch.full_like(self._everyone[:1], value)
        getattr(dist, _ALL_GATHER)(self._everyone, own, group=self._group)
        values: list[int] = self._everyone.tolist()
        return values


def check_order(root: Callable[[], Any], unit: int) -> None:
    """The runtime in C calls it before a unit is gathered for a forward, by the unit's index."""
    module = root()
    assert module is not None  # it is amid its forward
    order = module._exec_order_data
    order._check(unit, order._iter)
