"""One copy of what is saved, in memory of the host's, so that training may go on while it is written.

[Note: A copy beside the next step]
What comes from one storage and lies close together is copied as one piece: the shard of a unit, not its
parameters. On a GPU shards and the optimizer's state are copied by a stream of their own, into pinned memory,
beside the forward and the backward of the next step, which only read them. The host does not wait. Who writes
to them next is an optimizer: its step is preceded by a wait of its stream for the copy, through torch's hook
for steps of all optimizers. What a forward may change, buffers and what the script passes in ``extra``, is
copied by the current stream, in its order; so are averages of parameters, which ``update()`` may write to
before the next step. What else writes to parameters or to the optimizer's state before that shows in their
versions, which are compared when the copy is over, or right before the optimizer's step: such a save fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.checkpoint.metadata import PathInDict
from fsdp_c.checkpoint.objects import Pickled
from fsdp_c.checkpoint.values import LocalParts, PartialTensor, RangeTensor
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names

AVERAGES = "averages"  # the key in a checkpoint under which those of parameters are
_ALIGNMENT = 64
_GAP_NBYTES = 4096  # between what is copied in one piece


class _Source(NamedTuple):
    key: str
    tensor: Tensor
    start: int  # bytes of its storage
    end: int


class _Piece(NamedTuple):
    """Bytes of one storage, and the first of them in the copy."""

    sources: list[_Source]
    start: int
    end: int
    at: int


class HostCopies:
    """The memory, which is kept from one save to the next, and what is on its way into it."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._on_the_way: list[tuple[torch.device, Any]] = []  # devices and events
        self._held: list[Tensor] = []  # until they have been copied
        self._watched: dict[str, tuple[Tensor, int]] = {}  # what nothing else may write to, and its version
        self._written: list[str] = []  # names of what something else has written to
        self._lock = threading.Lock()
        self._hook: Any = None

    @torch.no_grad()
    def copied(
        self, flat: StateDict, paths: dict[str, PathInDict], params: Iterable[tuple[str, Tensor]]
    ) -> StateDict:
        """``flat`` with copies of all its tensors, and with what else is in it pickled. ``params``: those of
        units, as the script has them."""
        copies: StateDict = {}
        sources = []
        for key, value in flat.items():
            if _is_constant(value) or (isinstance(value, RangeTensor) and value.held is None):
                copies[key] = value  # such a part of a tensor is written by others
            elif isinstance(value, Tensor):
                tensor = _tensor_of(value)
                if tensor is None:
                    copies[key] = value.detach().to("cpu", copy=True)
                else:
                    sources.append(_source(key, tensor))
            else:
                try:
                    copies[key] = Pickled(value)
                except TypeError as error:
                    raise CheckpointError(f"{key}: {error}") from error
        pieces = list(_pieces(sources))
        memory = self._memory(pieces)
        optim = {key for key, path in paths.items() if "param_groups" in path or "state" in path}
        averages = {key for key, path in paths.items() if path[0] == AVERAGES}
        streams: dict[Any, torch.device] = {}
        self._watched, self._written = {}, []
        self._watch(params)
        # copied in one call, with Python's part before it: what it moves is not in any cache after
        on_cpu: list[tuple[Tensor, Tensor]] = []
        for piece in pieces:
            beside = all(
                one.key in optim or (isinstance(flat[one.key], RangeTensor) and one.key not in averages)
                for one in piece.sources
            )
            if beside:
                self._watch((one.key, one.tensor) for one in piece.sources if one.key in optim)
            stream = self._copy(piece, memory, beside, on_cpu)
            if stream is not None:
                streams[stream] = piece.sources[0].tensor.device
            for one in piece.sources:
                copies[one.key] = _like(flat[one.key], one, piece, memory)
        if on_cpu:
            torch._foreach_copy_([target for target, _ in on_cpu], [given for _, given in on_cpu])
        self._follow(streams)
        return {key: copies[key] for key in flat}

    def wait(self) -> None:
        """Until all has been copied. For the thread that reads the copies. CheckpointError for what was
        written to meanwhile."""
        for _, event in self._on_the_way:
            event.synchronize()
        self._look()
        self._on_the_way, self._held = [], []
        written, self._written = self._written, []
        if written:
            were = "was" if len(written) == 1 else "were"
            raise CheckpointError(
                f"{first_names(written)} {were} written to, other than by an optimizer's step, before the copy "
                "for this save was over: wait() for the save before such writes"
            )

    def _watch(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if tensor.device.type != "cpu" and not tensor.is_inference():
                self._watched[name] = (tensor, tensor._version)

    def _look(self) -> None:
        """Once: what is written from now on comes after the copy."""
        with self._lock:
            self._written += [name for name, (one, was) in self._watched.items() if one._version != was]
            self._watched = {}

    def _memory(self, pieces: list[_Piece]) -> Tensor:
        nbytes = pieces[-1].at + pieces[-1].end - pieces[-1].start if pieces else 0
        pinned = any(piece.sources[0].tensor.device.type != "cpu" for piece in pieces)
        if self.memory is None or self.memory.nbytes < nbytes or (pinned and not self.memory.is_pinned()):
            self.memory = None  # before there is another
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self.memory

    def _copy(self, piece: _Piece, memory: Tensor, beside: bool, on_cpu: list[tuple[Tensor, Tensor]]) -> Any:
        """Returns the stream that copies; None for what is put into ``on_cpu``."""
        source, numel = piece.sources[0].tensor, piece.end - piece.start
        given = torch.empty(0, dtype=torch.uint8, device=source.device)
        given.set_(source.untyped_storage(), piece.start, (numel,))  # type: ignore[call-overload]  # is not declared
        target = memory[piece.at : piece.at + numel]
        if source.device.type == "cpu":
            on_cpu.append((target, given))
            return None
        module = torch.get_device_module(source.device)
        stream = module.current_stream(source.device)
        if beside:
            own = self._streams.get(source.device) or module.Stream(source.device)
            self._streams[source.device] = own
            own.wait_stream(stream)
            stream = own
        with module.stream(stream):
            target.copy_(given, non_blocking=True)
        self._held.append(given)
        return stream

    def _follow(self, streams: dict[Any, torch.device]) -> None:
        for stream, device in streams.items():
            event = torch.get_device_module(device).Event()
            event.record(stream)
            self._on_the_way.append((device, event))
        if streams and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        self._look()
        for device, event in self._on_the_way:
            torch.get_device_module(device).current_stream(device).wait_event(event)


_CONSTANTS = (type(None), bool, int, float, str, bytes)


def _is_constant(value: object) -> bool:
    """Whether nobody can change it, so that it need not be pickled now."""
    return type(value) in _CONSTANTS or (
        type(value) is tuple and all(type(one) in _CONSTANTS for one in value)
    )


def _tensor_of(value: Tensor) -> Tensor | None:
    """The memory of a value; None for what has none that can be copied as bytes."""
    tensor = value.local if isinstance(value, RangeTensor | LocalParts) else value.detach()
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.device.type == "meta"
        or tensor.layout != torch.strided
    ):
        return None
    if tensor.is_conj() or tensor.is_neg() or _span(tensor) > 2 * tensor.nbytes:
        return None
    return tensor


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _source(key: str, tensor: Tensor) -> _Source:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return _Source(key, tensor, start, start + _span(tensor))


def _pieces(sources: list[_Source]) -> Iterator[_Piece]:
    by_storage: dict[tuple[torch.device, int], list[_Source]] = {}
    for one in sources:
        by_storage.setdefault((one.tensor.device, one.tensor.untyped_storage().data_ptr()), []).append(one)
    at = 0
    for own in by_storage.values():
        own.sort(key=lambda one: one.start)
        first = 0
        while first < len(own):
            start, end, last = own[first].start // _ALIGNMENT * _ALIGNMENT, own[first].end, first + 1
            while last < len(own) and own[last].start <= end + _GAP_NBYTES:
                end = max(end, own[last].end)
                last += 1
            yield _Piece(own[first:last], start, end, at)
            at += -(-(end - start) // _ALIGNMENT) * _ALIGNMENT
            first = last


def _like(value: Tensor, source: _Source, piece: _Piece, memory: Tensor) -> Tensor:
    own, offset = source.tensor, piece.at + source.start - piece.start
    copy = torch.empty(0, dtype=own.dtype, device="cpu")
    copy.set_(memory.untyped_storage(), offset // own.itemsize, own.shape, own.stride())
    return value._like(copy) if isinstance(value, PartialTensor) else copy
