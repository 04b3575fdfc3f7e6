"""One tensor in a checkpoint file: the bytes of ``torch.save``, but written directly from the tensor's memory.

[Note: A piece]
DCP stores each part of a tensor as a separate file of ``torch.save``, concatenated in a ``.distcp`` file.
Such a file is a zip archive of stored members; around the tensor's bytes (the *data*) it has a few hundred
bytes that are equal for equal shapes (the *framing*). The archive requires a CRC-32 of the data, which is
also the piece's checksum, computed once and recorded with the place of the data in the layout. torch can
therefore read the piece as its own, and fsdp_c reads the data without unpickling, directly into place if
possible.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp_c.sharding.flattening import are_dense

MAX_NBYTES = 64 * 2**20  # maximum size of a piece: memory needed to read a part of one
_COPY_NBYTES = 8 * 2**20
_READ_NBYTES = 2**20
_ALIGNMENT = 64
_DATA = b"archive/data/0"


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, without a copy. The view keeps the tensor alive.

    Raises NotImplementedError for a tensor without memory of its own.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    if not tensor.data_ptr():
        raise NotImplementedError(
            f"{type(tensor).__name__} is a tensor of tensors. Save its component tensors"
        )
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    data.owner = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(data).cast("B")


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements are contiguous in memory, in any order of dimensions."""
    return are_dense(tensor.shape, tensor.stride())


def dense_on_cpu(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU and dense: itself if it is."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.contiguous()


def narrow_box(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    """Return a view of a box of the tensor."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class FileWriter:
    """Writer of a file of pieces. ``framing_crc32`` covers all bytes except the data of pieces."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.framing_crc32 = 0

    def _frame(self, content: bytes) -> None:
        self.framing_crc32 = zlib.crc32(content, self.framing_crc32)
        self.file.write(content)
        self.size += len(content)

    def write_tensor(self, tensor: Tensor) -> tuple[int, int, int]:
        """Append a dense CPU tensor of at most MAX_NBYTES.

        Return (start of the piece, bytes before its data, CRC-32 of the data).
        """
        data, start = memory(tensor), self.size
        crc32 = zlib.crc32(data)
        head, tail = _framing(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), crc32, self.size % _ALIGNMENT
        )
        self._frame(head)
        self._write_data(data)
        self._frame(tail)
        return start, len(head), crc32

    def write_bytes(self, data: memoryview) -> tuple[int, int, int]:
        """Append an object that is not a tensor. Return (start, length, CRC-32)."""
        start = self.size
        self._write_data(data)
        return start, len(data), zlib.crc32(data)

    def _write_data(self, data: memoryview) -> None:
        for start in range(0, len(data), _COPY_NBYTES):
            self.file.write(data[start : start + _COPY_NBYTES])
        self.size += len(data)

    def finish(self) -> None:
        """Flush everything to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


def read_data(file: BinaryIO, begin: int, crc32: int, target: memoryview) -> bool:
    """Read data of a piece at ``begin`` into all of ``target``. Return True if the checksum matches.

    Several threads may read one file: its position is unchanged, and the GIL is released.
    """
    found = 0
    for start in range(0, len(target), _COPY_NBYTES):
        part = target[start : start + _COPY_NBYTES]
        done = 0
        while done < len(part):
            count = os.preadv(file.fileno(), [part[done:]], begin + start + done)
            if not count:
                return False
            done += count
        found = zlib.crc32(part, found)
    return found == crc32


def crc32_of(file: BinaryIO, start: int, end: int, crc32: int = 0) -> int:
    """Return ``crc32`` continued over bytes [start, end) of a file; -1 if the file ends before ``end``."""
    file.seek(start)
    while start < end:
        content = file.read(min(_READ_NBYTES, end - start))
        if not content:
            return -1
        crc32 = zlib.crc32(content, crc32)
        start += len(content)
    return crc32


# ----------------------------------------------------------------- framing


class _Tensor:
    """Object that is pickled as a tensor with the archive's member data/0 as its data."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        numel = math.prod(shape)
        name = torch.storage._dtype_to_storage_type_map().get(dtype)
        # dtypes newer than torch.save's storage classes are pickled by dtype
        kind, count = (
            (getattr(torch, name), numel) if name else (torch.storage.UntypedStorage, numel * dtype.itemsize)
        )
        storage = ("storage", kind, "0", "cpu", count)
        rebuild = torch._utils._rebuild_tensor_v2 if name else torch._utils._rebuild_tensor_v3
        rest = () if name else (dtype,)
        self.reduced = rebuild, (storage, 0, shape, strides, False, OrderedDict(), *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None


@functools.lru_cache(maxsize=4096)
def _data_pkl(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump(_Tensor(dtype, shape, strides))
    return content.getvalue()


def _headers(name: bytes, crc32: int, size: int, offset: int, extra: bytes = b"") -> tuple[bytes, bytes]:
    """Return the header of a member at ``offset`` of the archive, and its entry in the directory."""
    common = struct.pack("<HHHHHIIIH", 20, 0, 0, 0, 33, crc32, size, size, len(name))
    local = struct.pack("<I24sH", 0x04034B50, common, len(extra)) + name + extra
    return local, struct.pack("<IH24sHHHHII", 0x02014B50, 20, common, 0, 0, 0, 0, 0, offset) + name


def _framing(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], crc32: int, misalignment: int
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a piece that begins ``misalignment`` bytes off alignment."""
    head = directory = b""
    content = [(b"archive/data.pkl", _data_pkl(dtype, shape, strides)), (b"archive/byteorder", b"little")]
    for name, value in [*content, (b"archive/version", b"3\n")]:
        local, central = _headers(name, zlib.crc32(value), len(value), len(head))
        head, directory = head + local + value, directory + central
    nbytes = math.prod(shape) * dtype.itemsize
    # the data are aligned by an extra field of kind "FB", as in torch; readers skip it
    padding = -(misalignment + len(head) + 30 + len(_DATA) + 4) % _ALIGNMENT
    extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    local, central = _headers(_DATA, crc32, nbytes, len(head), extra)
    head, directory = head + local, directory + central
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 4, 4, len(directory), len(head) + nbytes, 0)
    return head, directory + end


TAIL_NBYTES = len(_framing(torch.uint8, (1,), (1,), 0, 0)[1])  # bytes after the data of every piece
