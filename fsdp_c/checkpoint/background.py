"""Saves in the background: a thread, collectives of its own, and what becomes of their errors.

[Note: Saves in the background]
A thread of this process writes, from copies that no one else touches: see [Note: A copy beside the next
step]. One save is under way at a time. Its ranks talk over a group of gloo that is made at the first of these
saves and that torch.distributed does not know, so that neither a collective of a step nor
``destroy_process_group`` meets it. The thread is no daemon: an interpreter that ends waits for it. An error
is raised by ``wait``, by the next save or, where neither comes, at exit.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_group, _get_process_group_store

from fsdp_c import _C
from fsdp_c.checkpoint.pieces import memory
from fsdp_c.tools import phases

T = TypeVar("T")


class BackgroundSave:
    """A save that is being written. ``fsdp_c.checkpoint.save(..., background=True)`` returns it."""

    def __init__(self, what: str, work: Callable[[], object]) -> None:
        self._what, self._work = what, work
        self._error: BaseException | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name=f"fsdp_c {what}", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # with all that it holds

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint is on disk, in its place. Not collective.

        Raises what ``save`` without ``background`` raises, or TimeoutError if that takes more than
        ``timeout`` seconds.
        """
        with phases.enter(_C.PROGRESS_SAVE):
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._what} is not over after {timeout:g} s")
        self._is_told = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether it is over. ``wait`` says how it ended."""
        return not self._thread.is_alive()


_last: BackgroundSave | None = None


def start(what: str, work: Callable[[], object]) -> BackgroundSave:
    """Do ``work`` in the background. The last save must be over."""
    global _last
    _last = BackgroundSave(what, work)
    _last._thread.start()
    return _last


def finish(raises: bool = True) -> None:
    """Wait for the last save. Its error is raised here, if nobody was told yet."""
    if _last is not None:
        _last._thread.join()
        if raises and not _last._is_told:
            _last.wait()


def _at_exit() -> None:
    try:
        finish()
    finally:
        if _last is None or _last._error is None:
            _groups.clear()  # their threads end before the interpreter


atexit.register(_at_exit)


# ----------------------------------------------------------------- ranks


class GlooRanks(_DistWrapper):
    """DCP's collectives over a group of gloo that torch.distributed does not know."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(None, False, 0)
        self.gloo, self.rank, self.is_coordinator = gloo, gloo.rank(), gloo.rank() == 0

    def get_world_size(self) -> int:
        return int(self.gloo.size())

    def broadcast_object(self, object: T | None) -> T:
        packed = _packed(object)
        size = torch.tensor([packed.numel()], device="cpu")
        self.gloo.broadcast(size, 0).wait()
        data = packed if self.is_coordinator else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.gloo.broadcast(data, 0).wait()
        made: T = _unpacked(data)
        return made

    def all_gather_object(self, object: T) -> list[T]:
        packed, sizes, outputs = self._buffers(object, receives=True)
        self.gloo.allgather([outputs], [packed]).wait()
        return [_unpacked(data[:size]) for data, size in zip(outputs, sizes, strict=True)]

    def gather_object(self, object: T) -> list[T] | None:
        packed, sizes, outputs = self._buffers(object, receives=self.is_coordinator)
        self.gloo.gather(outputs, packed, 0).wait()
        return [_unpacked(data[:size]) for data, size in zip(outputs, sizes, strict=False)] or None

    def scatter_object(self, object_list: list[T] | None) -> T:
        packed = [_packed(one) for one in object_list or ()]
        sizes: list[int] = self.broadcast_object([one.numel() for one in packed])
        output = torch.empty(max(sizes), dtype=torch.uint8, device="cpu")
        self.gloo.scatter(output, [_padded(one, max(sizes)) for one in packed], 0).wait()
        made: T = _unpacked(output[: sizes[self.rank]])
        return made

    def _buffers(self, value: object, receives: bool) -> tuple[Tensor, list[int], list[Tensor]]:
        """``value`` as it is sent, the size of each rank's, and memory for all if this one ``receives``."""
        packed = _packed(value)
        outputs = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.get_world_size())]
        self.gloo.allgather([outputs], [torch.tensor([packed.numel()], device="cpu")]).wait()
        sizes = [int(size) for size in outputs]
        padded = _padded(packed, max(sizes))
        return padded, sizes, [torch.empty_like(padded) for _ in sizes if receives]


def _packed(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(memory(data))  # of a rank of this very job


def _padded(packed: Tensor, numel: int) -> Tensor:
    return torch.cat([packed, torch.zeros(numel - packed.numel(), dtype=torch.uint8, device="cpu")])


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def gloo_ranks(group: dist.ProcessGroup | None) -> GlooRanks:
    """The ranks of ``group`` in a group of their own. Collective for the first time."""
    group = group or _get_default_group()
    gloo = _groups.get(group)
    if gloo is None:
        store = dist.PrefixStore("fsdp_c.checkpoint", _get_process_group_store(group))
        options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
        timeout = next((each._timeout for each in options if each is not None), default_pg_timeout)
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
        _groups[group] = gloo
    return GlooRanks(gloo)
