"""The ranks that save or load together: agreement on errors, and exchange of small objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.sharding.process_groups import all_gather_objects
from fsdp_c.tools import collective_errors

T = TypeVar("T")


class RankGroup:
    """The ranks that save or load together; this one alone without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = (group or _get_default_group()) if dist.is_initialized() else None
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        self.is_first = self.rank == 0

    def agree(
        self,
        action: str,
        work: Callable[[], T],
        share: Callable[[T], Any] = lambda _: None,
        *,
        is_callers: bool = True,
    ) -> tuple[T, list[Any]]:
        """Run ``work``. Return its result and all ranks' shared values. An exception on one rank is raised on all.

        ``is_callers``: raise an exception of one type on all ranks, the caller's mistake, unchanged.
        """
        result, error, failed, shared = None, None, None, None
        try:
            result = work()
            shared = share(result)
        except Exception as caught:
            error, kind = caught, type(caught).__name__
            failed = kind, str(caught) if isinstance(caught, CheckpointError) else f"{kind}: {caught}"
        with collective_errors.explained(action):
            own = failed, shared
            reports = [own] if self.group is None else all_gather_objects(own, self.group)
        kinds = {failed[0] if failed else None for failed, _ in reports}
        if error is not None and is_callers and len(kinds) == 1:
            raise error
        ranks: dict[str, int] = {}  # first rank with an error, by its text
        for rank, (failed, _) in enumerate(reports):
            if failed:
                ranks.setdefault(failed[1], rank)
        if ranks:
            lines = [f"{action} failed on rank {rank}: {text}" for text, rank in ranks.items()]
            raise CheckpointError("\n".join(lines)) from error
        return result, [one for _, one in reports]  # type: ignore[return-value]  # set if no rank has an error

    def gather(self, action: str, value: T) -> list[T] | None:
        """Return the values of all ranks on the first one, None on others."""
        if self.group is None:
            return [value]
        values = [value] * self.size if self.is_first else None
        with collective_errors.explained(action):
            dist.gather_object(value, values, group=self.group, group_dst=0)
        return values
