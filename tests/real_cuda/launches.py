"""What fsdp_c's kernels are launched with: as nvcc's host code hands it to the runtime, with no kernel run.

``watched()`` gives the launches of its body. The structures are those of csrc/kernels/, its headers and .cu
files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

I32, I64, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
TABLE_NBYTES, MOST_NDIM = 4096 - 128, 64
KERNELS = Path(__file__).resolve().parents[2] / "csrc/kernels"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, None, torch.uint8]  # as in enum dtype
CUDA = 2


def structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# ---- what launchers take: kernels.h

TensorView = structure(
    "TensorView",
    data=POINTER,
    dtype=I32,
    device=I32,
    device_index=I32,
    ndim=I32,
    sizes=POINTER,
    strides=POINTER,
)
KernelStream = structure(
    "KernelStream", parallel_for=POINTER, cuda_stream=POINTER, device_index=I32, device=I32
)
PackSource = structure("PackSource", view=TensorView, numel=I64, offset=I64, output_strides=POINTER)
# ---- what kernels take: the .cu files

Segment = structure("Segment", output=POINTER, input=POINTER, numel=I64, zeros=I64, first_chunk=I64)
SEGMENTS = TABLE_NBYTES // ctypes.sizeof(Segment) - 1
SegmentTable = structure("SegmentTable", num_chunks=I64, count=I32, items=Segment * SEGMENTS)
Strided = structure(
    "Strided",
    input=POINTER,
    output=POINTER,
    numel=I64,
    num_tiles=I64,
    ndim=I32,
    rows=I32,
    sizes=I64 * MOST_NDIM,
    strides=I64 * MOST_NDIM,
)
TABLES = {"elementwise": SegmentTable, "strided": Strided, "transposed": Strided}

# ---- launches


class CLaunch(ctypes.Structure):  # device/launch.h
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", POINTER),
        ("arguments", ctypes.POINTER(POINTER)),
        ("nbytes", ctypes.POINTER(ctypes.c_size_t)),
        ("count", ctypes.c_size_t),
        ("device", ctypes.c_int),
    ]


@cache
def runtime() -> Any:
    return ctypes.CDLL(str(Path(os.environ["FAKE_CUDA"]) / "libcudart.so.13"))


@dataclass
class Launch:
    """One that did not run. ``table`` is its first argument; ``rest`` are the bytes of the others."""

    kernel: str
    mangled: bytes
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    device: int
    table: Any
    rest: list[bytes]

    def run_block(self, block: int) -> None:
        """What this one of its blocks does."""
        kept = [ctypes.create_string_buffer(each, len(each)) for each in (bytes(self.table), *self.rest)]
        arguments = (POINTER * len(kept))(*(ctypes.addressof(each) for each in kept))
        how = (ctypes.c_uint * 3)(*self.grid), (ctypes.c_uint * 3)(*self.block), self.shared, self.stream
        launch = CLaunch(self.mangled, *how, arguments, None, len(kept), self.device)
        runtime().fake_cuda_run_block(ctypes.byref(launch), I64(block))


def launch_of(made: CLaunch) -> Launch:
    arguments = [ctypes.string_at(made.arguments[i], made.nbytes[i]) for i in range(made.count)]
    (kernel,) = [name for name in TABLES if f"{len(name)}{name}".encode() in made.name]
    table = TABLES[kernel]
    assert len(arguments[0]) == ctypes.sizeof(table), (kernel, len(arguments[0]))
    how = tuple(made.grid), tuple(made.block), made.shared, made.stream or 0, made.device
    return Launch(kernel, made.name, *how, table.from_buffer_copy(arguments[0]), arguments[1:])


@contextlib.contextmanager
def watched() -> Iterator[list[Launch]]:
    """Launches of fsdp_c's kernels in the body, of which none runs."""
    seen: list[Launch] = []
    as_watcher = ctypes.CFUNCTYPE(None, ctypes.POINTER(CLaunch))
    watcher = as_watcher(lambda made: seen.append(launch_of(made.contents)))
    runtime().fake_cuda_watch_launches(watcher)
    try:
        yield seen
    finally:
        runtime().fake_cuda_watch_launches(None)


# ---- launchers


@cache
def launchers() -> dict[str, Any]:
    """By their names in struct kernel_table, on the first device's current stream; each asserts success."""
    library = ctypes.CDLL(os.environ["FSDP_C_CUDA_KERNELS"])
    library.fsdp_c_cuda_kernels.restype = POINTER
    table = library.fsdp_c_cuda_kernels(ctypes.byref(ctypes.c_char_p()))
    pointers = ctypes.cast(table, ctypes.POINTER(POINTER))
    return {name: launcher(pointers[1 + i]) for i, name in enumerate(names())}


def names() -> list[str]:
    """In their order. What gives a text launches nothing, and comes last."""
    fields = re.search(r"struct kernel_table {(.*?)};", (KERNELS / "table.h").read_text(), re.DOTALL)
    assert fields
    without_arguments = re.sub(r"\)\([^)]*\)", ")", fields[1].partition("const char *(")[0])
    return re.findall(r"\*(\w+)[,;)]", without_arguments)


def launcher(address: int) -> Any:
    call = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def launch(*arguments: Any) -> None:
        stream = KernelStream(None, torch.cuda.current_stream(0).cuda_stream, 0, CUDA)
        assert call(*arguments, ctypes.byref(stream)) == 0

    return launch


kept: list[Any] = []  # what was given by address


def array(kind: Any, *items: Any) -> Any:
    """Of a structure, whose fields each tuple has, or of numbers."""
    made = [kind(*item) if isinstance(item, tuple) else item for item in items]
    return (kind * len(made))(*made)


def at(tensor: Tensor | None) -> Any:
    return POINTER(None if tensor is None else tensor.data_ptr())


def dtype(tensor: Tensor) -> int:
    return DTYPES.index(tensor.dtype)


def numbers(values: Sequence[int]) -> int:
    kept.append(array(I64, *values))
    return ctypes.addressof(kept[-1])


def view(tensor: Tensor | None) -> Any:
    if tensor is None:
        return TensorView()
    shape = numbers(tensor.shape), numbers(tensor.stride())
    return TensorView(tensor.data_ptr(), dtype(tensor), CUDA, 0, tensor.ndim, *shape)


def source(tensor: Tensor, offset: int) -> Any:
    """Of a pack, with its place in the output."""
    return PackSource(view(tensor), tensor.numel(), offset)
