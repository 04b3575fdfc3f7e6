"""Division of a save's work: each rank summarizes its values, and every rank assigns the same writer to each.

The time for it is proportional to the number of differing lists of keys and of parts on ranks.

[Note: Parts by arithmetic]
Shards of a unit cut equal layers at equal places. Therefore neither plans nor results list individual boxes:
a rank's part of a tensor is a ``Held``, tensors with equal parts share one list of keys, and a box is
identified by its number. Boxes and their sizes are computed wherever they are needed.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp_c import _C
from fsdp_c.checkpoint import pieces
from fsdp_c.checkpoint.contents import Box, PathInDict, do_tile
from fsdp_c.state.sharded_values import strides_in

Offsets = tuple[int, ...]
Order = tuple[int, ...] | None  # dimensions in memory, from the outermost; None for a contiguous tensor


class HeldBox(NamedTuple):
    """Box of a tensor, and its layout in memory."""

    offsets: Offsets
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None  # None if contiguous

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class Held(NamedTuple):
    """The elements [start, start + numel), in memory order, of a box of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: Order
    offsets: Offsets
    sizes: tuple[int, ...]
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def boxes(self) -> Sequence[HeldBox]:
        """Return the boxes in memory order."""
        return boxes_of_pieces(self, pieces.MAX_NBYTES)


@functools.lru_cache(maxsize=1024)
def boxes_of_pieces(held: Held, max_nbytes: int) -> Sequence[HeldBox]:
    """Return the boxes for pieces of at most ``max_nbytes``.

    They are cut at multiples of a number of elements, so that all ranks cut the tensor at the same places.
    """
    sizes, order = held.sizes, held.order
    outer = sizes if order is None else tuple(sizes[dim] for dim in order)
    step = max_nbytes // held.dtype.itemsize
    start, end = held.start, held.start + held.numel
    parts = [] if math.prod(held.shape) else [((0,) * len(sizes), outer)]
    while start < end:
        following = min(end, (start // step + 1) * step)
        parts += _C.flat_range_boxes(outer, start, following)
        start = following
    if order is not None:
        parts = [(_natural(offsets, order), _natural(sizes, order)) for offsets, sizes in parts]
    return [
        HeldBox(tuple(map(int.__add__, offsets, held.offsets)), sizes, _strides(sizes, order))
        for offsets, sizes in parts
    ]


def _natural(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Reorder from memory order to the order of the dimensions."""
    return tuple(value for _, value in sorted(zip(order, values, strict=True)))


def _strides(sizes: tuple[int, ...], order: Order) -> tuple[int, ...] | None:
    strides = strides_in(sizes, order)
    each = zip(sizes, strides, strides_in(sizes, None), strict=True)
    return strides if any(size != 1 and own != natural for size, own, natural in each) else None


# ----------------------------------------------------------------- assignment of writers

# (start of a piece in its file, bytes before its data, CRC-32 of the data, rank of the file); for an object
# its length instead of the bytes before
RECORD = struct.Struct("<QQII")

Positions = Sequence[int]  # positions in a list of keys


class RankPart(NamedTuple):
    """Keys with equal parts on a rank."""

    held: Held | None  # None for objects
    packed: bytes  # compressed paths of the keys

    @classmethod
    def of(cls, held: Held | None, paths: list[PathInDict]) -> RankPart:
        return cls(held, zlib.compress(pickle.dumps(paths), 1))

    @property
    def paths(self) -> list[PathInDict]:
        paths: list[PathInDict] = pickle.loads(zlib.decompress(self.packed))  # written by a rank of this job
        return paths


RankPlan = list[RankPart]  # all parts on one rank
# number of a part in a rank's plan, and positions of the keys that the rank writes
Share = tuple[int, Positions]


# (rank, number of its share) of the writers of a group's keys, each of which writes every n-th key
Sources = list[tuple[int, int]]


class GroupBox(NamedTuple):
    """Box of the tensors of a group, and its ranges as written."""

    held: Held  # the whole box
    starts: list[int]  # starts of the ranges, each of which ends at the next

    def ranges(self) -> list[Held]:
        ends = [*self.starts[1:], self.held.numel]
        return [self.held._replace(start=s, numel=e - s) for s, e in zip(self.starts, ends, strict=True)]


@dataclass
class Group:
    """Equally divided tensors; or objects, without boxes."""

    paths: list[PathInDict]
    boxes: list[GroupBox]
    sources: list[Sources]  # by box and range; one for objects
    # records of written data: by box, range, key and box of the range; of objects by key
    records: bytes = b""


class Planned(NamedTuple):
    """Plan of all ranks."""

    groups: list[Group]
    shares: list[list[Share]]  # shares by rank


def key_of(path: PathInDict) -> str:
    """Return DCP's key for a path in a nested dict."""
    return ".".join(map(str, path))


def places_of(groups: list[Group], order: Iterable[str]) -> dict[str, tuple[Group, int]]:
    """Return the group of each key, and the position in it. Keys in ``order`` are first."""
    found = {key_of(path): (group, slot) for group in groups for slot, path in enumerate(group.paths)}
    return {key: found[key] for key in dict.fromkeys([*order, *found]) if key in found}


def path_below(path: PathInDict, root: str) -> PathInDict:
    """Return the rest of a path in a nested dict below the key ``root``; () if no prefix of the path has that key."""
    return next((path[depth:] for depth in range(1, len(path)) if key_of(path[:depth]) == root), ())


class _Row(NamedTuple):
    """Part of a rank's plan, restricted to one group."""

    rank: int
    part: int
    held: Held | None
    positions: Positions


def merge_plans(plans: Sequence[RankPlan]) -> Planned:
    """Assign one writer to each value. Raise ValueError if ranks hold only a part of a tensor, or overlapping parts."""
    by_list = {part.packed: part for plan in plans for part in plan}
    lists = {packed: part.paths for packed, part in by_list.items()}
    writers = _Writers(len(plans))
    groups = [_group(paths, rows, writers) for paths, rows in _rows_by_group(plans, lists)]
    return Planned(groups, writers.shares)


def _rows_by_group(
    plans: Sequence[RankPlan], lists: dict[bytes, list[PathInDict]]
) -> list[tuple[list[PathInDict], list[_Row]]]:
    """Return groups of keys that are in the same lists, with the parts that contain them."""
    found_in: dict[PathInDict, list[tuple[bytes, int]]] = {}  # (list, position in it) by path
    for packed, paths in lists.items():
        for position, path in enumerate(paths):
            found_in.setdefault(path, []).append((packed, position))
    together: dict[tuple[bytes, ...], list[PathInDict]] = {}
    for path, places in found_in.items():
        together.setdefault(tuple(packed for packed, _ in places), []).append(path)
    groups: list[tuple[list[PathInDict], list[_Row]]] = [(paths, []) for paths in together.values()]
    of_list: dict[bytes, list[tuple[list[_Row], Positions]]] = {packed: [] for packed in lists}
    for paths, rows in groups:
        for nth, (packed, first) in enumerate(found_in[paths[0]]):
            positions: Positions = [found_in[path][nth][1] for path in paths]
            run = range(first, first + len(positions))  # a range pickles in a few bytes; the usual case
            of_list[packed].append((rows, run if positions == [*run] else positions))
    for rank, plan in enumerate(plans):
        for number, part in enumerate(plan):
            for rows, positions in of_list[part.packed]:
                rows.append(_Row(rank, number, part.held, positions))
    return groups


def _group(paths: list[PathInDict], rows: list[_Row], writers: _Writers) -> Group:
    key, first = key_of(paths[0]), rows[0].held
    if any((row.held is None) != (first is None) for row in rows):
        raise ValueError(f"{key} is a tensor on some ranks and another value on others")
    if first is None:
        return Group(paths, [], [writers.assign_writers(rows, len(paths))])
    by_box: dict[Box, list[tuple[Held, _Row]]] = {}
    for row in rows:
        # where replicas differ in shape or dtype, the first rank's are written
        if row.held is not None and (row.held.shape, row.held.dtype) == (first.shape, first.dtype):
            by_box.setdefault((row.held.offsets, row.held.sizes), []).append((row.held, row))
    group = Group(paths, [], [])
    for each in by_box.values():
        _add_box(group, key, each, writers)
    if not do_tile(list(by_box), first.shape):
        numel = sum(box.held.numel for box in group.boxes)
        raise ValueError(
            f"{key}: ranks hold {numel} of {math.prod(first.shape)} elements, or some of them twice"
        )
    return group


def _add_box(group: Group, key: str, held: list[tuple[Held, _Row]], writers: _Writers) -> None:
    by_start: dict[int, list[tuple[Held, _Row]]] = {}
    for each in held:
        by_start.setdefault(each[0].start, []).append(each)
    whole = held[0][0]
    box, end = GroupBox(whole._replace(start=0, numel=math.prod(whole.sizes)), []), 0
    for start, rows in sorted(by_start.items()):
        own = rows[0][0]
        if start != end or any(other.numel != own.numel for other, _ in rows):
            raise ValueError(
                f"{key}: ranks hold no element {min(start, end)} of a part of it, or some of them twice"
            )
        if own[:5] != whole[:5]:
            raise ValueError(f"{key}: ranks have its dimensions in different orders in memory")
        end = start + own.numel
        box.starts.append(start)
        equal = [row for other, row in rows if other == own]
        group.sources.append(writers.assign_writers(equal, len(group.paths)))
    if end != box.held.numel:
        raise ValueError(f"{key}: ranks hold {end} of {box.held.numel} elements of a part of it")
    group.boxes.append(box)


class _Writers:
    """Shares of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.shares: list[list[Share]] = [[] for _ in range(world_size)]
        self.loads = [0] * world_size

    def assign_writers(self, rows: list[_Row], count: int) -> Sources:
        """Divide the keys among ranks with equal parts, beginning with those with the least data to write."""
        rows = sorted(rows, key=lambda row: self.loads[row.rank])[:count]
        sources = []
        for nth, row in enumerate(rows):
            sources.append((row.rank, len(self.shares[row.rank])))
            own = row.positions[nth :: len(rows)]
            self.shares[row.rank].append((row.part, own))
            self.loads[row.rank] += len(own) * (row.held.nbytes if row.held else 1)
        return sources


# ----------------------------------------------------------------- results


class RankResult(NamedTuple):
    """Result of a rank's write."""

    size: int  # size of its file
    framing_crc32: int
    records: list[bytes]  # records by share, key and box


def put_records(planned: Planned, results: dict[int, RankResult]) -> None:
    """Store the records of ``results``, by rank, in the groups."""

    def records(sources: Sources, keys: int) -> bytes:
        """Return the records of all keys of a group."""
        contents = [results[rank].records[share] for rank, share in sources]
        if len(contents) == 1:
            return contents[0]
        nbytes = sum(map(len, contents)) // keys
        rounds = range(0, len(contents[0]), nbytes)  # the first writer has a key in each round
        return b"".join(content[at : at + nbytes] for at in rounds for content in contents)

    for group in planned.groups:
        group.records = b"".join(records(each, len(group.paths)) for each in group.sources)
