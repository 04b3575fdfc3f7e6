"""Copies of saved values in host memory, so that training continues during the write.

[Note: A copy beside the next step]
Storages are copied as a whole: the shard of a unit, not its parameters, unless more than half of a storage is
not saved. A side stream of a GPU copies shards and the optimizer's state into pinned memory, during the
forward and the backward of the next step, which only read them. The host does not wait.

The next writer is an optimizer: torch's hook for steps of all optimizers makes its stream wait for the copy.
Values that a forward may change, buffers and the script's ``extra``, are copied on the current stream. Other
writes to parameters or to the optimizer's state before that change their versions, which are compared when
the copy has finished, or right before the optimizer's step: such a save fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c.checkpoint.contents import PathInDict
from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.checkpoint.model_state import EXTRA
from fsdp_c.checkpoint.objects import pickle_object
from fsdp_c.checkpoint.values import RangeTensor
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names

_ALIGNMENT = 64


class _Storage(NamedTuple):
    """Storage to copy, and the start of its copy."""

    tensors: dict[str, Tensor]  # tensors in it, by key
    content: Tensor  # all of its bytes
    at: int


class HostCopies:
    """Host memory, kept from one save to the next, and its pending copies."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._pending: list[Any] = []  # events of pending copies
        self._held: list[Tensor] = []  # alive until copied
        # (tensor, version) by name; no code but an optimizer's step may write to them
        self._watched: dict[str, tuple[Tensor, int]] = {}
        self._written: list[str] = []  # names of tensors with other writes
        self._lock = threading.Lock()
        self._hook: Any = None

    @torch.no_grad()
    def start(
        self,
        flat: StateDict,
        paths: dict[str, PathInDict],
        params: Iterable[tuple[str, Tensor]],
        optim_key: str | None,
    ) -> StateDict:
        """Return ``flat`` with copies of all tensors, and other values pickled.

        ``params``: the units' parameters as seen by the script. ``optim_key``: top-level key of the optimizer's
        state, None without an optimizer.
        """
        copies: StateDict = dict.fromkeys(flat)
        tensors: dict[str, Tensor] = {}  # tensors with the memory of saved values
        for key, value in flat.items():
            if _is_constant(value) or (isinstance(value, RangeTensor) and not value.is_saved):
                copies[key] = value  # immutable, or not saved by this rank
            elif isinstance(value, Tensor):
                tensors[key] = value.local if isinstance(value, RangeTensor) else value.detach()
            else:
                try:
                    copies[key] = pickle_object(value)
                except TypeError as error:
                    raise CheckpointError(f"{key}: {error}") from error
        storages = _storages(tensors)
        on_device = [storage for storage in storages if not storage.content.is_cpu]
        memory = self._memory(storages, pinned=bool(on_device))
        self._watched, self._written = {}, []
        if on_device:
            self._watch(params)
        streams = {self._copy(storage, memory, flat, paths, optim_key) for storage in on_device}
        # one call, after the Python part: the copy evicts all caches
        dtypes = {tensor.dtype for storage in storages for tensor in storage.tensors.values()}
        views = {dtype: memory.view(dtype) for dtype in dtypes}
        for storage in storages:
            for key, tensor in storage.tensors.items():
                value, copy = flat[key], _like(tensor, storage, views[tensor.dtype])
                copies[key] = value._like(copy) if isinstance(value, RangeTensor) else copy
        if on_cpu := [storage for storage in storages if storage.content.is_cpu]:
            places = [_place(storage, memory) for storage in on_cpu]
            torch._foreach_copy_(places, [storage.content for storage in on_cpu])
        for key in tensors:
            if copies[key] is None:
                copies[key] = flat[key].detach().to("cpu", copy=True)
        self._pending = [stream.record_event() for stream in streams]
        if streams and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        return copies

    def wait(self) -> None:
        """Wait for pending copies, in the reading thread. Raise CheckpointError for tensors modified meanwhile."""
        for event in self._pending:
            event.synchronize()
        self._record_writes()
        self._pending, self._held = [], []
        if self._written:
            were = "was" if len(self._written) == 1 else "were"
            raise CheckpointError(
                f"{first_names(self._written)} {were} written to, other than by an optimizer's step, before "
                "this save had copied them. Call wait() on the save before such writes"
            )

    def _watch(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if tensor.device.type != "cpu" and not tensor.is_inference():
                self._watched[name] = (tensor, tensor._version)

    def _record_writes(self) -> None:
        """Compare versions once; later writes follow the copy."""
        with self._lock:
            self._written += [name for name, (one, was) in self._watched.items() if one._version != was]
            self._watched = {}

    def _memory(self, storages: list[_Storage], pinned: bool) -> Tensor:
        nbytes = storages[-1].at + _align(storages[-1].content.nbytes) if storages else 0
        if self.memory is None or self.memory.nbytes < nbytes or (pinned and not self.memory.is_pinned()):
            self.memory = None  # freed before a larger one is allocated
            with torch.inference_mode(False):  # later saves write to it outside of inference mode too
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self.memory

    def _copy(
        self,
        storage: _Storage,
        memory: Tensor,
        flat: StateDict,
        paths: dict[str, PathInDict],
        optim_key: str | None,
    ) -> Any:
        """Copy a device's storage. Return the stream of the copy."""
        device = storage.content.device
        module = torch.get_device_module(device)
        stream = module.current_stream(device)
        tops = {key: paths[key][0] for key in storage.tensors}
        # an optimizer is the next writer
        if all(
            top == optim_key or (isinstance(flat[key], RangeTensor) and top != EXTRA)
            for key, top in tops.items()
        ):
            self._watch((key, one) for key, one in storage.tensors.items() if tops[key] == optim_key)
            own = self._streams.get(device) or module.Stream(device)
            self._streams[device] = own
            own.wait_stream(stream)
            stream = own
        with module.stream(stream):
            _place(storage, memory).copy_(storage.content, non_blocking=True)
        self._held.append(storage.content)
        return stream

    def _before_step(self, *_: object) -> None:
        self._record_writes()
        for event in self._pending:
            torch.get_device_module(event.device).current_stream(event.device).wait_event(event)


_CONSTANTS = (type(None), bool, int, float, str, bytes)


def _is_constant(value: object) -> bool:
    """Return True for immutable values, which need not be pickled now."""
    return type(value) in _CONSTANTS or (
        type(value) is tuple and all(type(one) in _CONSTANTS for one in value)
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _storages(tensors: dict[str, Tensor]) -> list[_Storage]:
    """Return the storages to copy as a whole, with their tensors. Other tensors are omitted."""
    by_storage: dict[tuple[torch.device, int], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg()):
            place = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(place, {})[key] = tensor
    storages, at = [], 0
    for own in by_storage.values():
        source = max((one.untyped_storage() for one in own.values()), key=lambda storage: storage.nbytes())
        if source.nbytes() <= 2 * sum(one.nbytes for one in own.values()):
            content = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
            storages.append(_Storage(own, content, at))
            at += _align(content.nbytes)
    return storages


def _place(storage: _Storage, memory: Tensor) -> Tensor:
    return memory[storage.at : storage.at + storage.content.nbytes]


def _like(tensor: Tensor, storage: _Storage, view: Tensor) -> Tensor:
    """Return the tensor's place in the copy; ``view`` is the memory in its dtype."""
    offset = storage.at // tensor.itemsize + int(tensor.storage_offset())
    return view.as_strided(tensor.size(), tensor.stride(), offset)
