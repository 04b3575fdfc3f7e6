"""Writing a checkpoint tensor by tensor, in any of the formats, under another name until it is complete."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element

from fsdp_c.checkpoint.folder import (
    CheckpointError,
    absolute,
    beside,
    check_path,
    data_file,
    new_folder,
    sync_published,
)
from fsdp_c.checkpoint.formats import DTYPES, SUFFIXES
from fsdp_c.checkpoint.metadata import PathInDict
from fsdp_c.checkpoint.pieces import Described, FileWriter, in_memory, memory, pickled
from fsdp_c.checkpoint.planning import Box, Group, Held, key_of
from fsdp_c.checkpoint.storage import Info
from fsdp_c.checkpoint.table import RECORD, Stored
from fsdp_c.checkpoint.values import boxes_of
from fsdp_c.checkpoint.writing import write_table
from fsdp_c.compat.aliases import StateDict

MAX_RANKS = 1000  # files that are open together


class Sink(Protocol):
    """A checkpoint that is being written."""

    def add(self, key: str, info: Info, value: Any) -> None:
        """The next entry, in the order in which they were announced."""


def format_of(path: Path) -> str:
    """The format that a name asks for."""
    return SUFFIXES.get(path.suffix, "dcp")


@contextmanager
def open_sink(path: Path, kind: str, entries: dict[str, Info], ranks: int, overwrite: bool) -> Iterator[Sink]:
    """Writes ``path`` once the body has added ``entries``, in their order; where it raises nothing is left.

    Raises FileExistsError for what is there, unless it is to be overwritten.
    """
    check_path(path)
    if not overwrite and (path.is_symlink() or path.exists()):
        raise FileExistsError(f"{path}: exists; choose another name, or --overwrite")
    if kind == "dcp":
        with _dcp_folder(path, ranks) as sink:
            yield sink
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, where a {kind} file is to be written")
    with _new_file(path) as file:
        if kind == "torch":
            with contextlib.closing(TorchSink(file)) as torch_sink:
                yield torch_sink
                torch_sink.finish()
        else:
            yield SafetensorsSink(file, entries)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name once it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as temporary:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_published(path.parent, path)
        finally:
            temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------- DCP


@contextmanager
def _dcp_folder(path: Path, ranks: int) -> Iterator[DcpSink]:
    path = absolute(path)
    with new_folder(path) as temporary:
        names = [data_file(temporary, path, rank) for rank in range(ranks)]
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context((temporary / Path(name).name).open("xb", buffering=2**16))
                for name in names
            }
            sink = DcpSink(files)
            yield sink
            for writer in sink.writers:
                writer.finish()
        sink.finish(temporary, path)


class DcpSink:
    """The files that as many ranks would have written, each an even part of every tensor."""

    def __init__(self, files: dict[str, BinaryIO]) -> None:
        self.names = list(files)
        self.writers = [FileWriter(file) for file in files.values()]
        self.order: list[str] = []
        # what is divided alike: paths, and of each the records by range
        self.tensors: dict[Held, tuple[list[PathInDict], list[list[bytes]]]] = {}
        self.objects: list[Stored] = []

    def add(self, key: str, info: Info, value: Any) -> None:
        self.order.append(key)
        path = info.path if key_of(info.path) == key else (key,)  # a stranger's may be any
        if not info.is_tensor:
            content = io.BytesIO()
            torch.save(value, content)
            place = self.writers[0].write_bytes(content.getbuffer())
            record = RECORD.pack(place.offset, place.nbytes, place.crc32, 0)
            self.objects.append(Stored(Group([path], [], []), [], record))
            return
        shape = tuple(value.shape)
        whole = Held(value.dtype, shape, None, (0,) * len(shape), shape, 0, value.numel(), is_one_piece=False)
        paths, records = self.tensors.setdefault(whole, ([], []))
        flat = in_memory(value).contiguous().view(-1)
        paths.append(path)
        records.append(
            [
                b"".join(self._write(rank, box) for _, box in boxes_of(flat[held.start :], held))
                for rank, held in enumerate(self._parts(whole))
            ]
        )

    def _parts(self, whole: Held) -> list[Held]:
        """Those of the ranks, of which the last may have none."""
        step = max(1, -(-whole.numel // len(self.writers)))
        starts = range(0, max(whole.numel, 1), step)
        return [whole._replace(start=start, numel=min(step, whole.numel - start)) for start in starts]

    def _write(self, rank: int, box: Tensor) -> bytes:
        start = self.writers[rank].size
        place = self.writers[rank].write_tensor(box)
        return RECORD.pack(start, place.offset - start, place.crc32, rank)

    def finish(self, temporary: Path, path: Path) -> None:
        table = self.objects
        for whole, (paths, records) in self.tensors.items():
            box = Box(whole, [part.start for part in self._parts(whole)])
            content = b"".join(itertools.chain.from_iterable(zip(*records, strict=True)))
            table.append(Stored(Group(paths, [box], []), [content], b""))
        files = {}
        for rank, (name, writer) in enumerate(zip(self.names, self.writers, strict=True)):
            if writer.size:
                files[rank] = name, writer.size, writer.framing_crc32
            else:
                (temporary / Path(name).name).unlink()
        write_table(temporary, path, table, self.order, files)


# ----------------------------------------------------------------- torch.save


class TorchSink:
    """A file that ``torch.load`` reads. What describes tensors is written last, so that none is kept."""

    def __init__(self, file: BinaryIO) -> None:
        self.archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self.root: StateDict = {}
        self.count = 0

    def add(self, key: str, info: Info, value: Any) -> None:
        described = self._described(value)
        if not isinstance(value, Tensor):
            _check_picklable(key, described)
        set_element(self.root, info.path, described)

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._written(in_memory(value))
        if type(value) in (list, tuple):
            return type(value)(self._described(one) for one in value)
        return {key: self._described(one) for key, one in value.items()} if type(value) is dict else value

    def _written(self, tensor: Tensor) -> Described:
        name, self.count = str(self.count), self.count + 1
        with self.archive.open(_member(f"data/{name}"), "w", force_zip64=tensor.nbytes >= 2**31) as member:
            data = memory(tensor)
            for start in range(0, len(data), 2**23):
                member.write(data[start : start + 2**23])
        return Described(tensor.dtype, tensor.shape, tensor.stride(), name)

    def finish(self) -> None:
        self.archive.writestr(_member("data.pkl"), pickled(self.root))
        self.archive.writestr(_member("byteorder"), b"little")
        self.archive.writestr(_member("version"), b"3\n")

    def close(self) -> None:
        self.archive.close()


def _check_picklable(key: str, value: object) -> None:
    """What a stranger's file has may be of a class that stands for another one while it is read."""
    try:
        pickled(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{key} holds a value that cannot be written: {error}") from error


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))


# ----------------------------------------------------------------- safetensors


class SafetensorsSink:
    """One safetensors file. Its header comes first, so the entries are known from the beginning."""

    def __init__(self, file: BinaryIO, entries: dict[str, Info]) -> None:
        self.file = file
        names = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, info in entries.items():
            if info.dtype not in names:
                raise CheckpointError(
                    f"{key} is {info.dtype or 'no tensor'}, which safetensors do not hold: use --dtype"
                )
            shape = list(info.shape or ())
            if info.dtype == torch.float4_e2m1fn_x2:
                shape[-1] *= 2  # the format counts the two in each byte
            header[key] = {"dtype": names[info.dtype], "shape": shape, "data_offsets": [at, at + info.nbytes]}
            at += info.nbytes
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        file.write(len(content).to_bytes(8, "little") + content)

    def add(self, key: str, info: Info, value: Tensor) -> None:
        data = memory(in_memory(value).contiguous())
        for start in range(0, len(data), 2**23):
            self.file.write(data[start : start + 2**23])
