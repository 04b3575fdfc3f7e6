"""Archives of torch.save, read without trusting them: where each record lies, and tensors one by one.

[Note: One view of an archive]
A zip archive can be laid out so that one reader sees other records in it than the next: torch a tensor of a
gigabyte in a few compressed bytes, or code, where Python sees four empty files. So an archive is read only as
torch.save lays it out: its directory stands right before the end, lists each record once, uncompressed, and
the records lie apart. Then torch's own reader must see the same records at the same places. Records of
TorchScript, which is code, are refused before anything is unpickled: ``torch.load`` would run them.

Tensors come out of the pickle on the meta device. Their storages stand for records, of which ``read_stored``
reads what a tensor needs: into memory rather than by a mapping, so that a file that is cut meanwhile is an
error and no signal.
"""

from __future__ import annotations

import io
import os
import pickletools
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, UntypedStorage, _weights_only_unpickler
from torch.storage import TypedStorage

from fsdp_c.checkpoint.folder import CheckpointError, require
from fsdp_c.checkpoint.pickles import check_pickle, check_values, rebuilt
from fsdp_c.checkpoint.pieces import memory

_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_MAX32 = 2**32 - 1
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of before 1.6 begin
_READ_NBYTES = 2**20


class Record(NamedTuple):
    offset: int  # of the data, from the beginning of the file
    nbytes: int
    crc32: int  # 0 also where torch was told to write none


def open_file(path: Path) -> BinaryIO:
    """Open to read. CheckpointError for what is no file: a device, or a named pipe, which would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb")


def is_archive(path: Path) -> bool:
    """Whether a file begins like a zip archive, as torch.save has written since 1.6."""
    with open_file(path) as file:
        return file.read(4) == b"PK\3\4"


# ----------------------------------------------------------------- records


def _read(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    content = file.read(nbytes)
    require(len(content) == nbytes, "it is torn")
    return content


def _directory(file: BinaryIO) -> tuple[int, int, int]:
    """Where the list of records begins, where it ends, and how many they are."""
    end = file.seek(0, os.SEEK_END) - _END.size
    require(end >= 0, "it is torn")
    magic, *disks, here, count, nbytes, start, comment = _END.unpack(_read(file, end, _END.size))
    require(
        magic == 0x06054B50 and disks == [0, 0] and here == count and not comment,
        "no archive of torch.save ends so",
    )
    if end >= _LOCATOR64.size:
        magic, disk, at, _ = _LOCATOR64.unpack(_read(file, end - _LOCATOR64.size, _LOCATOR64.size))
        if magic == 0x07064B50:
            end -= _LOCATOR64.size + _END64.size
            require(disk == 0 and at == end, "no archive of torch.save ends so")
            magic, length, _, _, *disks, here, count, nbytes, start = _END64.unpack(
                _read(file, end, _END64.size)
            )
            sound = magic == 0x06064B50 and length == _END64.size - 12 and disks == [0, 0] and here == count
            require(sound, "no archive of torch.save ends so")
    require(start + nbytes == end, "its directory lies elsewhere than torch.save puts it")
    return start, end, count


def _in_64_bits(extra: bytes, fields: list[int]) -> list[int]:
    """``fields`` with those that need more than 32 bits from the ``extra`` field."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack(f"<{nbytes // 8}Q", extra[at + 4 :][: nbytes // 8 * 8]))
            return [next(wide, each) if each == _MAX32 else each for each in fields]
        at += 4 + nbytes
    return fields


def read_records(file: BinaryIO) -> dict[str, Record]:
    """The records of an archive, by the names that torch has for them: see [Note: One view of an archive].

    ValueError for one that is damaged, or laid out otherwise; RuntimeError where torch cannot read it.
    """
    start, end, count = _directory(file)
    directory = _read(file, start, end - start)
    records: dict[str, Record] = {}
    headers: list[tuple[int, int]] = []  # of each record, where it begins and where its data end
    at = 0
    for _ in range(count):
        require(at + _CENTRAL.size <= len(directory), "its directory is damaged")
        magic, _, _, flags, method, _, _, crc32, packed, nbytes, *lengths, _, _, _, header = (
            _CENTRAL.unpack_from(directory, at)
        )
        named = at + _CENTRAL.size
        at = named + sum(lengths)
        require(magic == 0x02014B50 and at <= len(directory), "its directory is damaged")
        whole = directory[named : named + lengths[0]].decode()
        extra = directory[named + lengths[0] : at - lengths[2]]
        nbytes, packed, header = _in_64_bits(extra, [nbytes, packed, header])
        require(
            method == 0 and packed == nbytes and not flags & 1,
            "it holds compressed data, which torch.save does not write",
        )
        local = _LOCAL.unpack(_read(file, header, _LOCAL.size))
        require(local[0] == 0x04034B50 and local[3] == 0, f"its record {whole!r} is damaged")
        offset = header + _LOCAL.size + local[9] + local[10]
        _, _, name = whole.partition("/")
        require(name not in records, f"it holds {name!r} twice")
        records[name] = Record(offset, nbytes, crc32)
        headers.append((header, offset + nbytes))
    require(at == len(directory), "its directory is damaged")
    begins = [*(begin for begin, _ in sorted(headers)), start]
    apart = begins[0] == 0 and all(
        end <= begin for (_, end), begin in zip(sorted(headers), begins[1:], strict=True)
    )
    require(apart, "its records do not lie one behind the other")
    _check_as_torch_sees(file, records)
    return records


def _check_as_torch_sees(file: BinaryIO, records: dict[str, Record]) -> None:
    names = {name.lower() for name in records}
    require(len(names) == len(records), "it holds two records of one name")
    script = "constants.pkl" in names or any(name.startswith("code/") for name in names)
    require(not script, "it is a TorchScript archive, which holds code: save its state_dict() instead")
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)
    seen = reader.get_all_records()
    same = sorted(seen) == sorted(records)
    same = same and all(reader.get_record_offset(name) == record.offset for name, record in records.items())
    require(same, "torch sees other records in it than its directory lists")


def check_archive(file: BinaryIO) -> dict[str, Record]:
    """Its records. ValueError for one that could run code, or take more memory or time than its bytes warrant."""
    records = read_records(file)
    require("data.pkl" in records, "it has no data.pkl")
    content = _read(file, records["data.pkl"].offset, records["data.pkl"].nbytes)
    check_pickle(content)
    check_values(content)
    return records


# ----------------------------------------------------------------- one archive


class Stored(NamedTuple):
    """A storage on the meta device, and the record that it stands for."""

    storage: UntypedStorage
    path: Path
    record: Record
    is_swapped: bool  # the record has the other order of bytes


StoredByAddress = dict[int, Stored]  # by UntypedStorage._cdata


class Archive:
    """A file of torch.save: values are read by ``unpickle``, and tensors among them by ``read_stored``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            self.records = check_archive(file)
            self.pickled = self._content(file, "data.pkl")
            order = self._content(file, "byteorder") if "byteorder" in self.records else b"little"
        require(order in (b"little", b"big"), f"its order of bytes is {order[:10]!r}")
        self.is_swapped = order == b"big"
        self.by_key: dict[str, Stored] = {}

    def _content(self, file: BinaryIO, name: str) -> bytes:
        return _read(file, self.records[name].offset, self.records[name].nbytes)

    @property
    def stored(self) -> StoredByAddress:
        return {each.storage._cdata: each for each in self.by_key.values()}

    def unpickle(self, unpickler: type) -> Any:
        """The values, with tensors on the meta device. Raises whatever a damaged pickle makes of it."""
        reader = unpickler(io.BytesIO(self.pickled), encoding="utf-8")
        reader.persistent_load = self._storage
        return reader.load()

    def _storage(self, persistent_id: Any) -> TypedStorage:
        kind, storage_type, key, _, numel, *view = persistent_id
        require(
            kind == "storage" and type(key) is str and type(numel) is int, "it refers to something outside"
        )
        require(view in ([], [None]), "a view of a storage, as torch 0.3 saved it")
        dtype = torch.uint8 if storage_type is UntypedStorage else storage_type.dtype
        record = self._record(key, numel, dtype)
        if record is None or not 0 <= numel * dtype.itemsize <= record.nbytes:
            raise ValueError(f"{numel} elements of {dtype} are not in its record data/{key[:20]}")
        if key not in self.by_key:
            storage = UntypedStorage(record.nbytes, device="meta")
            self.by_key[key] = Stored(storage, self.path, record, self.is_swapped)
        return TypedStorage(wrap_storage=self.by_key[key].storage, dtype=dtype, _internal=True)

    def _record(self, key: str, numel: int, dtype: torch.dtype) -> Record | None:
        return self.records.get(f"data/{key}")

    def problems(self) -> Iterator[str]:
        """Reads everything and compares it with its checksums."""
        with open_file(self.path) as file:
            for name, record in self.records.items():
                end = record.offset + record.nbytes
                if record.crc32 and crc32_of(file, record.offset, end) != record.crc32:
                    yield f"{self.path}: {name} is damaged: its checksum does not match"


class LegacyFile(Archive):
    """A file of torch.save of before 1.6: five pickles, the fourth of them the values, and then storages."""

    def __init__(self, path: Path) -> None:
        self.path, self.records, self.by_key, self.is_swapped = path, {}, {}, False
        self.numels: dict[str, int] = {}
        with open_file(path) as file:
            # torch would unpack a tar archive as well
            require(file.read(len(_LEGACY)) == _LEGACY, "not a file of torch.save")
            _, _, self.pickled, keys = (_next_pickle(file) for _ in range(4))  # after the first
            self.data = file.tell()
            self.nbytes = file.seek(0, os.SEEK_END)
        self.keys = _weights_only_unpickler.Unpickler(io.BytesIO(keys)).load()

    def unpickle(self, unpickler: type) -> Any:
        values = super().unpickle(unpickler)
        require(
            type(self.keys) is list and sorted(self.keys) == sorted(self.by_key),
            "its storages are not those of its values",
        )
        at = self.data
        with open_file(self.path) as file:
            for key in self.keys:
                stored = self.by_key[key]
                require(
                    _read(file, at, 8) == self.numels[key].to_bytes(8, "little"),
                    "a storage is of another size",
                )
                self.by_key[key] = stored._replace(record=stored.record._replace(offset=at + 8))
                at += 8 + stored.record.nbytes
        require(at <= self.nbytes, "it is torn")
        return values

    def _record(self, key: str, numel: int, dtype: torch.dtype) -> Record | None:
        """A place is known once all storages are, which come in the order of their keys."""
        self.numels.setdefault(key, numel)
        nbytes = numel * dtype.itemsize
        return Record(0, nbytes, 0) if nbytes <= self.nbytes else None


def _next_pickle(file: BinaryIO) -> bytes:
    """The bytes of the pickle that begins here, checked as that of an archive is."""
    start = file.tell()
    for _ in pickletools.genops(file):
        pass
    content = _read(file, start, file.tell() - start)
    check_pickle(content)
    check_values(content)
    return content


def crc32_of(file: BinaryIO, start: int, end: int, crc32: int = 0) -> int:
    """Of bytes of a file, behind others whose checksum is ``crc32``; -1 where it ends before them."""
    file.seek(start)
    while start < end:
        content = file.read(min(_READ_NBYTES, end - start))
        if not content:
            return -1
        crc32 = zlib.crc32(content, crc32)
        start += len(content)
    return crc32


# ----------------------------------------------------------------- tensors


def is_within(tensor: Tensor, stored: StoredByAddress) -> bool:
    """Whether a tensor is one that ``read_stored`` reads, dense in its record, or has no data."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    place = stored.get(tensor.untyped_storage()._cdata)
    if place is None:
        # others were made by their size, of whatever lay in memory
        return tensor.is_meta or not tensor.nbytes
    available = place.record.nbytes
    return (
        tensor.nbytes <= available and (tensor.storage_offset() + span(tensor)) * tensor.itemsize <= available
    )


def span(tensor: Tensor) -> int:
    """How many elements of its storage lie between a tensor's first and last, with both."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def read_stored(value: Any, stored: StoredByAddress) -> Any:
    """``value`` with the data of tensors in it, which share memory as they did, or of itself.

    CheckpointError for a file that is torn, or a tensor of more elements than are there.
    """
    return _read_value(value, stored, None if isinstance(value, Tensor) else {})


def _read_value(value: Any, stored: StoredByAddress, read: dict[Any, UntypedStorage] | None) -> Any:
    """``read``: what was read already, whole; None to read of a record what one tensor needs."""
    if isinstance(value, Tensor):
        place = stored.get(value.untyped_storage()._cdata) if value.is_meta else None
        return _read_tensor(value.detach(), place, stored, read) if place else value
    if isinstance(value, dict):
        found = {key: _read_value(one, stored, read) for key, one in value.items()}
        return found if type(value) is dict else type(value)(found)
    if type(value) is list:
        return [_read_value(one, stored, read) for one in value]
    if isinstance(value, tuple):
        return rebuilt(value, [_read_value(one, stored, read) for one in value])
    return value


def _read_tensor(
    tensor: Tensor, place: Stored, stored: StoredByAddress, read: dict[Any, UntypedStorage] | None
) -> Tensor:
    if not is_within(tensor, stored):
        raise CheckpointError(
            f"{place.path}: a tensor of {tuple(tensor.shape)} has more elements than the file"
        )
    first, dtype = int(tensor.storage_offset()), tensor.dtype
    if read is None:
        storage, first = _read_storage(place, dtype, first, span(tensor)), 0
    else:
        key = place.storage._cdata, dtype
        if key not in read:
            read[key] = _read_storage(place, dtype, 0, place.record.nbytes // dtype.itemsize)
        storage = read[key]
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, first, tensor.shape, tensor.stride())


def _read_storage(place: Stored, dtype: torch.dtype, first: int, numel: int) -> UntypedStorage:
    data = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
    read_into(place.path, place.record.offset + first * dtype.itemsize, data)
    if place.is_swapped:
        data.untyped_storage().byteswap(dtype)
    return data.untyped_storage()


def read_into(path: Path, offset: int, data: Tensor) -> None:
    """Fill ``data``, which is contiguous, from a file. CheckpointError for one that ends before."""
    target, done = memory(data), 0
    with open_file(path) as file:
        file.seek(offset)
        while done < len(target):
            count = file.readinto(target[done:])  # type: ignore[attr-defined]  # BinaryIO does not name it
            if not count:
                raise CheckpointError(f"{path}: torn: it ends before {offset + len(target)} bytes")
            done += count
