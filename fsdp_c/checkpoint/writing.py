"""Plan and write of each rank's part of a save.

[Note: Replicas or experts]
Parameters of one name over several process groups are replicas of each other, or one expert per group; groups
do not distinguish the two cases. Therefore ranks exchange the groups of their units. A name is contested if
groups do not connect all ranks that hold it: it is saved once only if its values are equal on all of them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_c.checkpoint.contents import PathInDict
from fsdp_c.checkpoint.folder import LAYOUT, CheckpointError, file_of, publish, write_file
from fsdp_c.checkpoint.layout_file import layout_content
from fsdp_c.checkpoint.metadata import metadata_content
from fsdp_c.checkpoint.model_state import uncompiled
from fsdp_c.checkpoint.objects import pickle_object
from fsdp_c.checkpoint.pieces import FileWriter, dense_on_cpu, is_dense, memory
from fsdp_c.checkpoint.planning import (
    RECORD,
    Held,
    Offsets,
    Planned,
    RankPart,
    RankPlan,
    RankResult,
    Share,
    merge_plans,
    places_of,
    put_records,
)
from fsdp_c.checkpoint.values import RangeTensor, boxes_of
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding.holders import Holders, Ranks
from fsdp_c.sharding.sharded_module import units_with_paths
from fsdp_c.sharding.traversal import clean_name, clean_path, joined
from fsdp_c.state.sharded_values import memory_order, to_memory_order


class _Write(NamedTuple):
    """Value on this rank."""

    key: str
    held: Held | None  # None for an object
    fetch: Callable[[], Any]  # returns its boxes, perhaps of a copy, or its pickled content
    memory: Tensor | None  # its own memory; None for an object


def _write_of(key: str, value: Any) -> _Write:
    """Return a value's write. A plain tensor gets no RangeTensor: there may be thousands."""
    if not isinstance(value, Tensor):
        return _Write(key, None, lambda: pickle_object(value), None)
    if isinstance(value, RangeTensor):
        return _Write(key, value.held, value.boxes.values, value.local)
    shape = tuple(value.shape)
    order = None if value.is_contiguous() or not is_dense(value) else memory_order(value.stride())
    whole = Held(value.dtype, shape, order, (0,) * len(shape), shape, 0, value.numel())
    return _Write(key, whole, lambda: boxes_of(to_memory_order(value, order), whole).values(), value)


@dataclass
class Writer:
    """Part of a save on one rank: its plan; its file, in the folder ``data``; and on the first rank the publication.

    See [Note: In place at once].
    """

    state: StateDict
    paths: dict[str, PathInDict]  # of the keys of ``state`` in nested containers
    data: Path
    contested: dict[str, HeldUnit]  # units by name
    planned: Planned = field(init=False)  # plan of all ranks
    writes: list[list[_Write]] = field(init=False)  # writes by part of this rank's plan

    def plan(self) -> tuple[RankPlan, Checksums]:
        """Return this rank's plan, and the checksums of its contested names."""
        parts: dict[Held | None, list[_Write]] = {}
        checksums: Checksums = {}
        for key, value in self.state.items():
            if isinstance(value, RangeTensor) and not value.is_saved:
                continue
            write = _write_of(key, value)
            names = self.contested.keys() & {*self.paths[key]}
            if names and write.held is not None:
                place = key, write.held.offsets, write.held.start
                checksums[place] = _checksum(write.held, write.fetch(), self.contested[min(names)])
            parts.setdefault(write.held, []).append(write)
        self.writes = [*parts.values()]
        plan = [RankPart.of(held, [self.paths[one.key] for one in own]) for held, own in parts.items()]
        return plan, checksums

    def write(self, rank: int, by_rank: list[tuple[RankPlan, Checksums]]) -> RankResult | None:
        """Write this rank's file, if it has a share. ``by_rank``: ``plan()`` of all ranks."""
        _refuse_different(checksums for _, checksums in by_rank)
        self.planned = merge_plans([plan for plan, _ in by_rank])
        shares = self.planned.shares[rank]
        if not shares:
            return None
        # exclusively: an existing file belongs to another rank
        with (self.data / file_of(rank)).open("xb", buffering=0) as raw, io.BufferedWriter(raw) as file:
            return self._write(rank, shares, FileWriter(file))

    def _write(self, rank: int, shares: list[Share], writer: FileWriter) -> RankResult:
        records = [[b""] * len(positions) for _, positions in shares]
        writes = [
            (share, nth, self.writes[part][position])
            for share, (part, positions) in enumerate(shares)
            for nth, position in enumerate(positions)
        ]
        writes.sort(key=lambda write: write[2].held is not None)  # objects first
        # records by memory: tensors shared under several names are written once
        known: dict[object, bytes] = {}
        for share, nth, one in writes:
            try:
                if one.memory is None:
                    records[share][nth] = RECORD.pack(*writer.write_bytes(one.fetch().getbuffer()), rank)
                else:
                    place = _place(one.memory), one.held
                    if place not in known:
                        boxes = (dense_on_cpu(box) for box in one.fetch())
                        known[place] = b"".join(RECORD.pack(*writer.write_tensor(box), rank) for box in boxes)
                    records[share][nth] = known[place]
            except OSError:
                raise
            except Exception as error:
                raise CheckpointError(f"{one.key}: {error}") from error
        writer.finish()
        return RankResult(writer.size, writer.framing_crc32, [*map(b"".join, records)])

    def finish(self, results: list[RankResult | None]) -> None:
        """Write the places of all data, in both formats, with checksums, and publish the checkpoint.

        Called on one rank, once all have written. See [Note: The layout of a checkpoint].
        """
        by_rank = {rank: each for rank, each in enumerate(results) if each is not None}
        put_records(self.planned, by_rank)
        groups = self.planned.groups
        places = places_of(groups, self.state)
        files = {LAYOUT: write_file(self.data / LAYOUT, layout_content(groups, places))}
        for rank, each in by_rank.items():
            written = self.data / file_of(rank)
            found = written.stat().st_size if written.exists() else None
            if found != each.size:
                raise CheckpointError(
                    f"{written}: {each.size} bytes were written by its rank, and rank 0 finds "
                    f"{'no file' if found is None else found}: {self.data.parent} must be on a file system that "
                    "all ranks share"
                )
            files[file_of(rank)] = each.size, each.framing_crc32
        names = {rank: f"{self.data.name}/{file_of(rank)}" for rank in by_rank}
        publish(self.data, metadata_content(groups, places, self.data.parent, names), files)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors with the same elements in the same memory have in common."""
    address = tensor.data_ptr() or id(tensor)  # 0 for a subclass that wraps others
    return address, tensor.device, tensor.stride(), tensor.is_conj(), tensor.is_neg()


# ----------------------------------------------------------------- replicas or experts

Groups = frozenset[Ranks]  # each includes this rank


class HeldUnit(NamedTuple):
    """Unit held by fewer ranks than save, according to its groups."""

    path: str
    groups: Groups
    names: tuple[str, ...]  # names of its parameters in the model


def partly_held_units(model: nn.Module, count: int) -> list[HeldUnit]:
    """Return the units held by fewer than ``count`` ranks. Ranks of tensor parallelism are in one group."""
    found = []
    for path, module in units_with_paths(model):
        if module._handle is not None and (holders := Holders.of(module)).size < count:
            names = (clean_name(joined(path, param.fqn)) for param in module._handle.managed_params)
            found.append(HeldUnit(clean_path(path), holders.groups, tuple(map(uncompiled, names))))
    return found


def contested_params(own: list[HeldUnit], by_rank: Iterable[list[HeldUnit]]) -> dict[str, HeldUnit]:
    """Return the parameters of ``own`` units that ranks hold over unconnected groups, with their units.

    ``by_rank``: the units of all ranks.
    """
    held: dict[str, set[Groups]] = {}
    for unit in (unit for units in by_rank for unit in units):
        for name in unit.names:
            held.setdefault(name, set()).add(unit.groups)
    return {name: unit for unit in own for name in unit.names if not _are_connected(held[name])}


def _are_connected(held: Iterable[Groups]) -> bool:
    pools: list[set[int]] = []
    for groups in held:
        pool = {rank for ranks in groups for rank in ranks}
        pools = [pool.union(*(one for one in pools if one & pool)), *(one for one in pools if not one & pool)]
    return len(pools) == 1


class _Checksum(NamedTuple):
    """Checksum of a part of a parameter, to be compared between ranks."""

    held: Held
    crc32: int
    unit: str  # path of the unit
    ranks: list[int]  # ranks of the unit's groups


# by key, offsets of a box, and start of a range in it
Checksums = dict[tuple[str, Offsets, int], _Checksum]


def _checksum(held: Held, boxes: Iterable[Tensor], unit: HeldUnit) -> _Checksum:
    crc32 = 0
    for box in boxes:
        crc32 = zlib.crc32(memory(dense_on_cpu(box)), crc32)
    return _Checksum(held, crc32, unit.path, sorted(frozenset().union(*unit.groups)))


def _refuse_different(by_rank: Iterable[Checksums]) -> None:
    """Raise ValueError for a contested name with different values on ranks."""
    found: Checksums = {}
    for place, one in (each for checksums in by_rank for each in checksums.items()):
        other = found.setdefault(place, one)
        if other[:2] != one[:2]:
            raise ValueError(
                f"{place[0]}: {ranks_text(other.ranks)} and {ranks_text(one.ranks)} hold different values of it, in "
                f"units of the name {one.unit!r} over process groups that share no rank, as for experts. Give modules "
                "of different parameters different names, and load with strict=False; or save the modules of each "
                "group to a path of its own, with process_group=..."
            )
