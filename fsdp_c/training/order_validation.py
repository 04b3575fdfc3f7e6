"""Validation of the execution order, under TORCH_DISTRIBUTED_DEBUG=DETAIL only.

Ranks that run different units hang in an all-gather or exchange wrong parameters. The first iteration
compares each unit across ranks before its all-gather. Later iterations are compared with the first, locally.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist


class OrderValidation:
    """Checks the order of units. The runtime calls it with a unit's index before the unit's all-gather.

    Called in training mode only. Collective over ``group`` in the first iteration. Raises RuntimeError if
    ranks are about to all-gather different units. Warns once (UserWarning) if a later iteration deviates from
    the first.
    """

    def __init__(
        self, names: Sequence[Sequence[str]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Create for units with parameters ``names``; compared tensors are on ``device``."""
        self._names, self._device = names, device
        self._rank, self._world_size = group.rank(), group.size()
        # weak: the unit owns the group and must be able to free it before finalization
        self._group = weakref.ref(group)
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
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if self._warned or unit == expected:
            return
        self._warned = True
        came = "no more units" if expected is None else f"{self._names[expected]} next"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {self._rank}. "
            "Collectives are unchecked and may give incorrect results or hang.\nThe first iteration "
            f"had {came}, but {self._names[unit]} was run",
            stacklevel=2,
        )

    def _compare_ranks(self, unit: int) -> None:
        self._gather(1)  # FSDP1 sends the number of units first: keep the number of collectives equal
        first, *others = self._gather(unit)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise RuntimeError(
                    "Forward order differs across ranks: rank 0 is all-gathering parameters for "
                    f"{self._names[first]} while rank {rank} is all-gathering parameters for "
                    f"{self._names[other]}. Every rank must run the same units in the same order."
                )

    def _gather(self, value: int) -> list[int]:
        """All-gather ``value``. Returns zeros if a monkey-patched all-gather writes nothing."""
        own = torch.full((1,), value, device=self._device)
        everyone = own.new_zeros(self._world_size)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(everyone, own, group=self._group())
        values: list[int] = everyone.tolist()
        return values
