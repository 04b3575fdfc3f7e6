"""Archives of torch.save within a checkpoint, looked at before torch reads them.

[Note: One view of an archive]
A zip archive can be laid out so that one reader sees other records in it than the next: torch a tensor of a
gigabyte in a few compressed bytes, or code, where Python sees four empty files. So an archive is read only as
torch.save lays it out: its directory stands right before the end, lists each record once, uncompressed, and
the records lie apart. Then torch's own reader must see the same records at the same places. Records of
TorchScript, which is code, are refused before anything is unpickled: ``torch.load`` would run them.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO, NamedTuple

import torch

from fsdp_c.checkpoint.folder import require
from fsdp_c.checkpoint.pickles import check_pickle, check_values

_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_MAX32 = 2**32 - 1


class _Record(NamedTuple):
    offset: int  # of the data, from the beginning of the file
    nbytes: int


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


def _read_records(file: BinaryIO) -> dict[str, _Record]:
    """The records of an archive, by the names that torch has for them: see [Note: One view of an archive].

    ValueError for one that is damaged, or laid out otherwise; RuntimeError where torch cannot read it.
    """
    start, end, count = _directory(file)
    directory = _read(file, start, end - start)
    records: dict[str, _Record] = {}
    headers: list[tuple[int, int]] = []  # of each record, where it begins and where its data end
    at = 0
    for _ in range(count):
        require(at + _CENTRAL.size <= len(directory), "its directory is damaged")
        magic, _, _, flags, method, _, _, _, packed, nbytes, *lengths, _, _, _, header = _CENTRAL.unpack_from(
            directory, at
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
        records[name] = _Record(offset, nbytes)
        headers.append((header, offset + nbytes))
    require(at == len(directory), "its directory is damaged")
    begins = [*(begin for begin, _ in sorted(headers)), start]
    apart = begins[0] == 0 and all(
        end <= begin for (_, end), begin in zip(sorted(headers), begins[1:], strict=True)
    )
    require(apart, "its records do not lie one behind the other")
    _check_as_torch_sees(file, records)
    return records


def _check_as_torch_sees(file: BinaryIO, records: dict[str, _Record]) -> None:
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


def check_archive(file: BinaryIO) -> None:
    """ValueError for an archive that could run code, or take more memory or time than its bytes warrant."""
    records = _read_records(file)
    require("data.pkl" in records, "it has no data.pkl")
    content = _read(file, records["data.pkl"].offset, records["data.pkl"].nbytes)
    check_pickle(content)
    check_values(content)
