"""One copy of what is saved, in memory of the host's, so that training may go on while it is written.

[Note: A copy beside the next step]
What comes from one storage and lies close together is copied as one piece: the shard of a unit, not its
parameters. On a GPU shards and the optimizer's state are copied by a stream of their own, into pinned memory,
beside the forward and the backward of the next step, which only read them. The host does not wait. Who writes
to them next is an optimizer: its step is preceded by a wait of its stream for the copy, through torch's hook
for steps of all optimizers. What a forward may change, buffers and what the script passes in ``extra``, is
copied by the current stream, in its order. What else writes to parameters or to the optimizer's state before
that shows in their versions, which are compared when the copy is over, or right before the optimizer's step:
such a save fails.
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
from fsdp_c.checkpoint.pieces import span
from fsdp_c.checkpoint.values import RangeTensor
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import first_names

EXTRA = "extra"  # its key in a checkpoint
_ALIGNMENT = 64
_GAP_NBYTES = 4096  # between what is copied in one piece


class _Source(NamedTuple):
    key: str
    value: Tensor  # as it is saved
    tensor: Tensor  # its memory
    is_contiguous: bool
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
        copies: StateDict = dict.fromkeys(flat)
        sources = []
        for key, value in flat.items():
            if _is_constant(value) or (isinstance(value, RangeTensor) and not value.is_saved):
                copies[key] = value  # such a part of a tensor is written by others
            elif isinstance(value, Tensor):
                source = _source(key, value)
                if source is None:
                    copies[key] = value.detach().to("cpu", copy=True)
                else:
                    sources.append(source)
            else:
                try:
                    copies[key] = Pickled(value)
                except TypeError as error:
                    raise CheckpointError(f"{key}: {error}") from error
        pieces = list(_pieces(sources))
        on_device = [piece for piece in pieces if not piece.sources[0].tensor.is_cpu]
        memory = self._memory(pieces, pinned=bool(on_device))
        self._watched, self._written = {}, []
        if on_device:
            self._watch(params)
        streams = {self._copy(piece, memory, paths): piece.sources[0].tensor.device for piece in on_device}
        # copied in one call, with Python's part before it: what it moves is not in any cache after
        on_cpu: list[tuple[Tensor, Tensor]] = []
        views = {dtype: memory.view(dtype) for dtype in {one.tensor.dtype for one in sources}}
        for piece in pieces:
            for one in piece.sources:
                copy = _like(one, piece, views[one.tensor.dtype])
                copies[one.key] = one.value._like(copy) if isinstance(one.value, RangeTensor) else copy
            if one.tensor.is_cpu:
                is_whole = len(piece.sources) == 1 and one.is_contiguous
                on_cpu.append((copy, one.tensor) if is_whole else (_place(piece, memory), _bytes(piece)))
        if on_cpu:
            torch._foreach_copy_([copy for copy, _ in on_cpu], [given for _, given in on_cpu])
        self._follow(streams)
        return copies

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

    def _memory(self, pieces: list[_Piece], pinned: bool) -> Tensor:
        nbytes = _aligned(pieces[-1].at + pieces[-1].end - pieces[-1].start) if pieces else 0
        if self.memory is None or self.memory.nbytes < nbytes or (pinned and not self.memory.is_pinned()):
            self.memory = None  # before there is another
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self.memory

    def _copy(self, piece: _Piece, memory: Tensor, paths: dict[str, PathInDict]) -> Any:
        """Of memory of a device. Returns the stream that copies."""
        device = piece.sources[0].tensor.device
        module = torch.get_device_module(device)
        stream = module.current_stream(device)
        given = _bytes(piece)
        if all(_is_of_training(one, paths[one.key]) for one in piece.sources):
            self._watch((one.key, one.tensor) for one in piece.sources if _is_of_optimizer(paths[one.key]))
            own = self._streams.get(device) or module.Stream(device)
            self._streams[device] = own
            own.wait_stream(stream)
            stream = own
        with module.stream(stream):
            _place(piece, memory).copy_(given, non_blocking=True)
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


def _is_of_optimizer(path: PathInDict) -> bool:
    return path[0] != EXTRA and ("param_groups" in path or "state" in path)


def _is_of_training(source: _Source, path: PathInDict) -> bool:
    """Whether an optimizer is the next to write to it."""
    is_param = isinstance(source.value, RangeTensor) and path[0] != EXTRA
    return is_param or _is_of_optimizer(path)


def _source(key: str, value: Tensor) -> _Source | None:
    """The memory of a value; None for what has none that can be copied as bytes."""
    tensor = value.local if isinstance(value, RangeTensor) else value.detach()
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    is_contiguous = tensor.is_contiguous()
    nbytes = tensor.nbytes if is_contiguous else span(tensor) * tensor.itemsize
    if nbytes > 2 * tensor.nbytes:
        return None
    start = int(tensor.storage_offset()) * tensor.itemsize
    return _Source(key, value, tensor, is_contiguous, start, start + nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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
            at += _aligned(end - start)
            first = last


def _bytes(piece: _Piece) -> Tensor:
    source = piece.sources[0].tensor
    given = torch.empty(0, dtype=torch.uint8, device=source.device)
    size = (piece.end - piece.start,)
    given.set_(source.untyped_storage(), piece.start, size)  # type: ignore[call-overload]  # is not declared
    return given


def _place(piece: _Piece, memory: Tensor) -> Tensor:
    return memory[piece.at : piece.at + piece.end - piece.start]


def _like(source: _Source, piece: _Piece, view: Tensor) -> Tensor:
    """Its place in the copy, of which ``view`` is all in its dtype."""
    own, offset = source.tensor, piece.at + source.start - piece.start
    return view.as_strided(own.size(), own.stride(), offset // own.itemsize)
