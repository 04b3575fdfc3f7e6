"""The two ends of a save: the plan of what each rank writes, and the writing of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from fsdp_c.checkpoint.folder import LAYOUT, CheckpointError, Counted, file_of, publish, write_file
from fsdp_c.checkpoint.layout_file import layout_content
from fsdp_c.checkpoint.metadata import PathInDict
from fsdp_c.checkpoint.objects import pickled
from fsdp_c.checkpoint.pieces import FileWriter, in_memory, is_dense
from fsdp_c.checkpoint.planning import Held, Planned, RankPart, RankPlan, Share, merged
from fsdp_c.checkpoint.replicas import HeldUnit, with_content
from fsdp_c.checkpoint.storage import Report
from fsdp_c.checkpoint.table import RECORD, RankResult, metadata_content, stored
from fsdp_c.checkpoint.values import RangeTensor
from fsdp_c.compat.aliases import StateDict
from fsdp_c.state.sharded_values import from_memory_order, memory_order


class _Write(NamedTuple):
    """A key of a part of this rank's plan."""

    part: int
    position: int
    key: str
    held: Held | None  # None for an object
    fetch: Callable[[], Any]


def _in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The tensor with the strides of its order of dimensions, also where a dimension of one element has others."""
    return (
        tensor if order is None else from_memory_order(tensor.permute(order).reshape(-1), tensor.shape, order)
    )


class Writer:
    """A rank's part of a save: what it holds, as a ``RankPlan``; its file, in the folder ``data``; and on the first
    rank who writes what, and the end, which publishes it all: see [Note: In place at once]."""

    def __init__(
        self,
        state: StateDict,
        paths: dict[str, PathInDict],
        is_first: bool,
        data: Path,
        report: Report,
        set_total: Report,
        contested: dict[str, HeldUnit],
    ) -> None:
        """``paths``: in nested dicts and lists, of the keys of ``state``. ``contested``: see
        fsdp_c/checkpoint/replicas.py."""
        self.contested = contested
        self.state, self.paths, self.is_first = state, paths, is_first
        self.data, self.report, self.set_total = data, report, set_total
        self.planned = Planned([], [])  # on the first rank
        self.writes: list[_Write] = []

    def plan(self) -> RankPlan:
        """What this rank holds."""
        paths: dict[Held | None, list[PathInDict]] = {}
        numbers: dict[Held | None, int] = {}
        for key, value in self.state.items():
            names = self.contested.keys() & {*self.paths.get(key, ())}
            for held, fetch in self._held(key, value):
                if names and held is not None:
                    held = with_content(held, fetch(), self.contested[min(names)])
                number = numbers.setdefault(held, len(numbers))
                own = paths.setdefault(held, [])
                self.writes.append(_Write(number, len(own), key, held, fetch))
                own.append(self.paths.get(key, (key,)))
        return [RankPart.of(*each) for each in paths.items()]

    def _held(self, key: str, value: Any) -> Iterable[tuple[Held | None, Callable[[], Any]]]:
        if isinstance(value, RangeTensor):
            held = value.held
            return [] if held is None else [(held, lambda: value.boxes.values())]
        items = create_default_local_save_plan({key: value}, self.is_first).items
        return [self._held_of_item(item) for item in items]

    def _held_of_item(self, item: WriteItem) -> tuple[Held | None, Callable[[], Any]]:
        value = find_state_dict_object(self.state, item.index)
        if item.type == WriteItemType.BYTE_IO:
            return None, lambda: pickled(value)
        assert item.tensor_data is not None and isinstance(value, Tensor)
        size, chunk = item.tensor_data.size, item.tensor_data.chunk
        order = None if value.is_contiguous() or not is_dense(value) else memory_order(value.stride())
        where = tuple(size), order, tuple(chunk.offsets), tuple(chunk.sizes), 0, chunk.sizes.numel(), True
        return Held(value.dtype, *where), lambda: [_in_order(value, order)]

    def divided(self, plans: list[RankPlan]) -> list[tuple[int, list[Share]]]:
        """On one rank: what each is to write."""
        self.planned = merged(plans)
        return [*enumerate(self.planned.shares)]

    def write(self, own: tuple[int, list[Share]]) -> RankResult | None:
        """Write this rank's file, if it has anything to write."""
        rank, shares = own
        if not shares:
            return None
        # exclusively: an existing file is another rank's
        with (self.data / file_of(rank)).open("xb", buffering=0) as raw, io.BufferedWriter(raw) as file:
            return self._write(rank, shares, FileWriter(file))

    def _write(self, rank: int, shares: list[Share], writer: FileWriter) -> RankResult:
        records = [[b""] * len(positions) for _, positions in shares]
        places = {
            (part, position): (share, nth)
            for share, (part, positions) in enumerate(shares)
            for nth, position in enumerate(positions)
        }
        writes = [(*places[one[:2]], one) for one in self.writes if one[:2] in places]
        writes.sort(key=lambda write: write[2].held is not None)  # what is pickled stands first
        self.set_total(sum(one.held.nbytes for *_, one in writes if one.held is not None))
        known: dict[object, bytes] = {}  # by memory: what is shared under several names is written once
        for share, nth, one in writes:
            try:
                if one.held is None:
                    place = writer.write_bytes(one.fetch().getbuffer())
                    records[share][nth] = RECORD.pack(place.offset, place.nbytes, place.crc32, rank)
                else:
                    written = [_write_box(box, rank, writer, known) for box in one.fetch()]
                    records[share][nth] = b"".join(written)
                    self.report(one.held.nbytes)
            except OSError:
                raise
            except Exception as error:
                raise CheckpointError(f"{one.key}: {error}") from error
        writer.finish()
        return RankResult(writer.size, writer.framing_crc32, [*map(b"".join, records)])

    def finish(self, results: list[RankResult | None]) -> None:
        """On one rank, once all have written: write where everything lies, in both forms, with the checksums, and
        publish it. See [Note: The layout of a checkpoint]."""
        by_rank = {rank: each for rank, each in enumerate(results) if each is not None}
        table = stored(self.planned, by_rank)
        layout = Counted(layout_content(table, [*self.state]))
        write_file(self.data / LAYOUT, layout)
        files = {LAYOUT: (layout.size, layout.crc32)}
        for rank, each in by_rank.items():
            self._check_is_there(self.data / file_of(rank), each.size)
            files[file_of(rank)] = each.size, each.framing_crc32
        names = {rank: f"{self.data.name}/{file_of(rank)}" for rank in by_rank}
        publish(self.data, metadata_content(table, [*self.state], self.data.parent, names), files)

    def _check_is_there(self, written: Path, size: int) -> None:
        found = written.stat().st_size if written.exists() else None
        if found != size:
            raise CheckpointError(
                f"{written}: {size} bytes were written by its rank, and rank 0 finds "
                f"{'no file' if found is None else found}: {self.data.parent} must be on a file system that all "
                "ranks share"
            )


def _write_box(data: Tensor, rank: int, writer: FileWriter, known: dict[object, bytes]) -> bytes:
    key = None
    if data.nbytes and data.device.type != "meta":
        key = data.data_ptr(), data.device, data.dtype, data.shape, data.stride()
    record = known.get(key)
    if record is None:
        start = writer.size
        place = writer.write_tensor(in_memory(data))
        record = RECORD.pack(start, place.offset - start, place.crc32, rank)
        if key is not None:
            known[key] = record
    return record
