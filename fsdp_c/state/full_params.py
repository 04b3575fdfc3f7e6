"""The whole parameters of a sharded model, by units or buckets: for exporters, and copies that follow training."""

from __future__ import annotations

import fnmatch
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_c import _C
from fsdp_c.sharding import common, tensor_parallel
from fsdp_c.sharding.flat_param import ManagedParam
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.state.redistribution import start_gather
from fsdp_c.state.sharded_values import dims_from_memory, memory_shapes
from fsdp_c.state.state_dict_saving import local_shard
from fsdp_c.tools import collective_errors
from fsdp_c.training.unshard_params import check_idle

__all__ = ["iter_full_params"]

_UNITS = {"KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_ALIGNMENT = 128  # bytes, of a unit in a bucket


def iter_full_params(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    ranks: Collection[int] | None = None,
    offload_to_cpu: bool = False,
    prefetch: int = 1,
    buckets: int | str | None = None,
    dtype: torch.dtype | None = None,
    only: str | Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for every parameter, by the names of the unwrapped model's ``state_dict()``.

    Buckets are gathered one after the other, and the next ``prefetch`` of them while the caller does
    something with this one. Memory beyond the shards is that of ``1 + prefetch`` buckets, as long as the
    caller lets go of what it got. So a gather begins once the caller was through with the first tensor of a
    bucket, its smallest, and a loop's variable has none of the bucket before; at once where a bucket is one
    tensor: ``del`` it at the end of the loop's body, or there is a bucket more. On the CPU what was let go of
    is used again.

    Tensors are detached, hold what parameters were when their gather began, and are the caller's own; those
    of a unit may share memory. The names of a shared parameter give one tensor. DTensors come whole, from
    all ranks of tensor parallelism, a bucket at a time. Parameters that no unit manages come first, as
    copies.

    Args:
        model: may have units in it, or be one.
        rank0_only: rank 0 of each sharding group gets tensors. The others get nothing while they take part,
            and send their shards alone: no whole one is on them.
        ranks: the same for these global ranks, such as the first of each node. Under tensor parallelism
            memory for whole tensors is taken on all ranks.
        offload_to_cpu: give tensors in CPU memory.
        prefetch: how many buckets are gathered ahead of the caller.
        buckets: bytes that a bucket has at most (``"512MB"``, ``"1GiB"``, or a number): as many units as fit
            go in one collective, and of a larger one some parameters at a time. A tensor that is larger comes
            whole. By default each unit is a bucket.
        dtype: of floating-point tensors, by default the parameters' own. What is sent has it too:
            ``torch.bfloat16`` halves what float32 parameters take on the wire.
        only: names to yield, as a pattern (``"layers.*.weight"``) or a function of a name; the same on all
            ranks. Units without one are not gathered.

    Collective: every rank goes to the end, or where all get tensors stops at the same. Raises AssertionError
    inside a forward, backward or ``summon_full_params``, ValueError for a negative ``prefetch``, ``buckets``
    that are no size, and ``ranks`` beside ``rank0_only``.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is a number of buckets, 0 or more, not {prefetch}")
    if rank0_only and ranks is not None:
        raise ValueError("rank0_only and ranks both say who gets tensors: pass one of them")
    limit = None if buckets is None else _nbytes(buckets)
    asked = _Asked(rank0_only, ranks, offload_to_cpu, dtype, limit)
    wanted = _filter(only)
    modules = units_with_paths(model)
    for name, tensor in common.unmanaged_tensors(model):
        if wanted(name):
            whole = tensor_parallel.whole(tensor.detach())
            if asked.gives_unmanaged(modules):
                yield name, asked.cast(whole.to("cpu" if offload_to_cpu else whole.device, copy=True))
    waiting = asked.buckets(
        [piece for path, module in modules for piece in asked.pieces(path, module, wanted)]
    )
    started: deque[Callable[[], list[tuple[str, Tensor]]]] = deque()
    memory = _Memory(limit or 0)

    def start(ahead: int) -> None:
        while len(started) < ahead and (bucket := next(waiting, None)) is not None:
            with collective_errors.gathering(*(handle_of(piece.module) for piece in bucket)):
                started.append(asked.start(bucket, memory))

    try:
        start(1 + prefetch)
        while started:
            values = deque(started.popleft()())
            if len(values) < 2:
                start(prefetch)
            while values:
                yield values.popleft()
                start(prefetch)
            start(1)
    finally:
        for wait in started:  # where the caller stops early
            wait()


def _nbytes(size: int | str) -> int:
    """Of ``"512MB"``, or a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", size) if isinstance(size, str) else None
    nbytes = int(float(found[1]) * _UNITS[found[2]]) if found else size
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
        raise ValueError(f'buckets is a size such as "512MB", "1GiB" or a number of bytes, not {size!r}')
    return nbytes


def _filter(only: str | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if isinstance(only, str):
        pattern = only
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return only or (lambda name: True)


class _Place(NamedTuple):
    """Where an original parameter lies in its flat parameter, and how."""

    first: int
    numel: int
    shape: tuple[int, ...]  # with the dimensions in the order that they have in memory
    order: tuple[int, ...] | None


class _Piece(NamedTuple):
    """Of a unit's flat parameter the elements that are gathered at once, and what is yielded of them."""

    module: ShardedModule
    # of all the unit's parameters: asked for once, as each list of the layout's is made anew
    places: list[_Place]
    named: list[tuple[str, ManagedParam]]
    first: int
    end: int


class _Memory:
    """Where buckets are gathered. On the CPU, where fresh pages cost as much as a transfer, what the caller
    has let go of is lent again; a GPU's allocator does so itself, and knows the streams that use it."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._lent: list[tuple[StorageWeakRef, Tensor]] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        free = [own for lent, own in self._lent if lent.expired() and len(own) >= nbytes]
        self._lent = [one for one in self._lent if not one[0].expired()]  # before more is taken
        own = free[0] if free else torch.empty(max(nbytes, self._least), dtype=torch.uint8, device=device)
        if not free:
            _C.prefer_large_pages(own)
        lent = torch.from_numpy(own.numpy())  # a storage of its own, which says whether it is in use
        self._lent.append((StorageWeakRef(lent.untyped_storage()), own))
        return lent[:nbytes]


class _Asked(NamedTuple):
    """What the caller asks for."""

    rank0_only: bool
    ranks: Collection[int] | None
    offload_to_cpu: bool
    dtype: torch.dtype | None
    limit: int | None

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)

    def gives_unmanaged(self, modules: Sequence[tuple[str, ShardedModule]]) -> bool:
        if self.rank0_only:
            return not modules or modules[0][1].rank == 0
        return self.ranks is None or dist.get_rank() in self.ranks

    def receivers(self, group: dist.ProcessGroup) -> list[int]:
        """Ranks of the group."""
        if self.rank0_only:
            return [0]
        if self.ranks is None:
            return list(range(group.size()))
        members = dist.get_process_group_ranks(group)
        return [index for index, rank in enumerate(members) if rank in self.ranks]

    def itemsize(self, module: ShardedModule) -> int:
        return self.cast(handle_of(module).flat_param.new_empty(0)).itemsize

    def pieces(self, path: str, module: ShardedModule, wanted: Callable[[str], bool]) -> list[_Piece]:
        """The unit, or parts of it where it is larger than a bucket."""
        prefix = clean_name(f"{path}.") if path else ""
        named = [(prefix + param.fqn, param) for param in common.managed_params(module._handle)]
        named = [(name, param) for name, param in named if wanted(name)]
        if not named:
            return []
        layout, itemsize = handle_of(module).layout, self.itemsize(module)
        known = zip(layout.param_offsets, layout.param_numels, memory_shapes(module), strict=True)
        places = [_Place(first, numel, *memory) for first, numel, memory in known]
        if self.limit is None or layout.padded_numel * itemsize <= self.limit:
            return [_Piece(module, places, named, 0, layout.padded_numel)]
        pieces: list[_Piece] = []
        for one in sorted(named, key=lambda one: one[1].place):
            place = places[one[1].place]
            end = place.first + place.numel
            if not pieces or (end - pieces[-1].first) * itemsize > self.limit and end > pieces[-1].end:
                pieces.append(_Piece(module, places, [], place.first, end))
            pieces[-1].named.append(one)
            pieces[-1] = pieces[-1]._replace(end=end)
        return pieces

    def buckets(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """What is gathered together: of whole units as many as fit that are alike."""
        bucket: list[_Piece] = []
        before, nbytes = None, 0
        for piece in pieces:
            module, handle = piece.module, handle_of(piece.module)
            is_whole = piece.end - piece.first == handle.layout.padded_numel and handle.layout.sharded
            alike = module.process_group, module.compute_device, handle.flat_param.dtype, handle.is_parallel
            kind, more = (alike, is_whole), self._room(piece)
            if bucket and not (kind == before and is_whole and nbytes + more <= (self.limit or 0)):
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(piece)
            before, nbytes = kind, nbytes + more
        if bucket:
            yield bucket

    def _room(self, piece: _Piece) -> int:
        """In bytes."""
        return -(-(piece.end - piece.first) * self.itemsize(piece.module) // _ALIGNMENT) * _ALIGNMENT

    @torch.no_grad()
    def start(self, bucket: list[_Piece], memory: _Memory) -> Callable[[], list[tuple[str, Tensor]]]:
        """What waits for the whole parameters of a bucket, whose gather has begun. Collective."""
        shards = []
        for module, *_ in bucket:
            with common.bound_runtime(module):
                check_idle(module, summoned=False)
                handle_of(module).writeback()
                shards.append(self.cast(local_shard(module).detach().to(module.compute_device)))
        module, handle = bucket[0].module, handle_of(bucket[0].module)
        receivers = self.receivers(module.process_group)
        gets = module.rank in receivers
        if handle.is_parallel:  # which of them does not matter: all ranks take part in what comes after
            receivers = list(range(module.world_size))
        wholes: list[Tensor] = []
        if module.rank in receivers:
            rooms = [self._room(piece) for piece in bucket]
            taken = memory.take(sum(rooms), module.compute_device).split(rooms)
            wholes = [
                room[: (piece.end - piece.first) * shard.itemsize].view(shard.dtype)
                for room, piece, shard in zip(taken, bucket, shards, strict=True)
            ]
        ranges = [(piece.first, piece.end) for piece in bucket]
        works: list[dist.Work] = []
        if handle.layout.sharded:
            handles = [handle_of(piece.module) for piece in bucket]
            with collective_errors.explained("gathering parameters"), collective_errors.gathering(*handles):
                works = start_gather(shards, ranges, wholes, module.process_group, receivers)
        elif gets:
            wholes[0].copy_(shards[0][slice(*ranges[0])])

        def wait() -> list[tuple[str, Tensor]]:
            with collective_errors.explained("gathering parameters"):
                for work in works:
                    work.wait()
                shards.clear()  # a send does not keep what it reads
                values = [
                    value
                    for piece, whole in zip(bucket, wholes, strict=False)
                    for value in self._values(piece, whole)
                ]
            if not gets:
                return []
            # the next gather waits until the caller is through with one of them
            smallest = min(range(len(values)), key=lambda index: values[index][1].nbytes)
            return [values.pop(smallest), *values]

        return wait

    def _values(self, piece: _Piece, whole: Tensor) -> list[tuple[str, Tensor]]:
        module = piece.module
        extension, extensions = module._fsdp_extension, handle_of(module).flat_param._param_extensions
        there = whole.cpu() if self.offload_to_cpu else whole
        made: dict[int, Tensor] = {}
        for place in dict.fromkeys(param.place for _, param in piece.named):
            start, numel, shape, order = piece.places[place]
            first = start - piece.first
            value = dims_from_memory(there[first : first + numel].view(shape), order)
            if extension is not None and extensions[place] is not None:
                value = tensor_parallel.whole(extension.post_unflatten_transform(value, extensions[place]))
            made[place] = value
        return [(name, made[param.place]) for name, param in piece.named]
