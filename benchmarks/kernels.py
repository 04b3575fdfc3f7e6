"""The CPU kernels compared with torch's operators and with memcpy of the same number of bytes.

python -m benchmarks.kernels
python -m benchmarks.kernels --mb 1 64 --only accumulate --capability avx2 default
python -m benchmarks.kernels --threads 1 2 --json times.json
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common  # noqa: F401  (sets the number of threads before torch is imported)

import torch  # isort: skip
from torch import Tensor  # isort: skip

from fsdp_c import _C

OPS = torch.ops.fsdp_c
MB = 1 << 20
TENSORS = 12  # tensors of a flat parameter, or tensors scaled together
LIMIT = 1.2  # the kernels' goal: at most this many times memcpy
COUNTED = """\
'memcpy' is the time of memcpy on one thread for the bytes that a kernel must read and write once: half of them read,
half of them written. Times are in microseconds, the least of many calls. torch's operators with the same result and
our kernels are each called in turn with memcpy, all from Python. 'call' is the time of our kernel for the same number
of tensors with one element each. 'ours / memcpy' compares the kernel alone: both times are without the time of such a
tiny call. 'MB' is the size of the elements in fp32; they are in 12 tensors unless the name says otherwise. Memory is
reused, so that new outputs cause no page faults.
"""


@dataclass(frozen=True)
class Case:
    """One kernel at one size: bytes moved, torch's implementation (None if there is none) and ours."""

    name: str
    moved: int
    torch: Callable[[], Any] | None
    ours: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """Shortest times of one kernel at one size, in microseconds."""

    kernel: str
    mb: float  # size of the tensor in fp32
    threads: int
    capability: str
    moved: int
    torch: float | None
    ours: float
    call: float  # our kernel on tiny tensors: cost of the call itself
    memcpy: float
    memcpy_call: float

    @property
    def ratio(self) -> float:
        """The kernel's time divided by memcpy's, both without the cost of the call from Python."""
        return (self.ours - self.call) / (self.memcpy - self.memcpy_call)


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory: page faults of fresh memory would take longer than the kernels."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: allocate everything on the heap
        libc.mallopt(-1, 1 << 31 - 1)  # M_TRIM_THRESHOLD: return nothing to the system
    except (OSError, AttributeError):
        pass


def split(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return TENSORS tensors of ``numel`` elements in all."""
    return [part.clone() for part in torch.randn(numel).to(dtype).chunk(TENSORS)]


def offsets_of(tensors: list[Tensor]) -> list[int]:
    return list(itertools.accumulate((tensor.numel() for tensor in tensors), initial=0))[:-1]


def packs(numel: int) -> Iterator[Case]:
    """Yield the cases of flattening, with and without cast and division, as for a unit's gradients before
    reduce-scatter.
    """
    for source, target, divisor in (
        (torch.float32, torch.float32, 1.0),
        (torch.float32, torch.bfloat16, 1.0),
        (torch.float32, torch.float32, 8.0),
        (torch.float32, torch.float32, 3.0),
        (torch.bfloat16, torch.float32, 8.0),
        (torch.bfloat16, torch.bfloat16, 8.0),
        (torch.float32, torch.bfloat16, 8.0),
        (torch.float16, torch.float32, 8.0),
    ):
        tensors, out = split(numel, source), torch.empty(numel, dtype=target)
        offsets = offsets_of(tensors)

        def by_torch(tensors: list[Tensor] = tensors, out: Tensor = out, divisor: float = divisor) -> None:
            if out.dtype == tensors[0].dtype:
                torch.cat(tensors, out=out)
            else:
                out.copy_(torch.cat(tensors))
            if divisor != 1.0:
                out.div_(divisor)

        def by_us(
            tensors: list[Tensor] = tensors,
            out: Tensor = out,
            divisor: float = divisor,
            offsets: list[int] = offsets,
        ) -> None:
            OPS.pack_gradients(out, tensors, offsets, divisor)

        name = f"pack {short(source)} -> {short(target)}" + (f" / {divisor:g}" if divisor != 1.0 else "")
        yield Case(name, numel * (source.itemsize + target.itemsize), by_torch, by_us)


def accumulations(numel: int) -> Iterator[Case]:
    """Yield the cases of adding a reduced shard to the accumulated one, with post-division and upcast."""
    for source, divisor in (
        (torch.float32, 1.0),
        (torch.float32, 8.0),
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 8.0),
        (torch.float16, 8.0),
    ):
        total, shard = torch.zeros(numel), torch.randn(numel).to(source)

        def by_torch(total: Tensor = total, shard: Tensor = shard, divisor: float = divisor) -> None:
            total.add_((shard / divisor if divisor != 1.0 else shard).to(torch.float32))

        def by_us(total: Tensor = total, shard: Tensor = shard, divisor: float = divisor) -> None:
            OPS.accumulate_shard(total, shard, divisor)

        name = f"accumulate fp32 += {short(source)}" + (f" / {divisor:g}" if divisor != 1.0 else "")
        yield Case(name, numel * (8 + source.itemsize), by_torch, by_us)


GROUPS = (packs, accumulations)


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def least_times(
    calls: list[Callable[[], Any]], seconds: float, clock: Callable[[], int] = time.perf_counter_ns
) -> list[float]:
    """Return the least time of each call in microseconds. Calls alternate for ``seconds``, at least five
    times.
    """
    best = [math.inf] * len(calls)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = clock()
            call()
            best[i] = min(best[i], (clock() - start) / 1e3)
        rounds += 1
    return best


def memcpy_of(moved: int) -> Callable[[], Any]:
    """Return a memcpy that moves ``moved`` bytes: half of them read, half of them written."""
    source, target = (torch.zeros(moved // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), moved // 2)


def measure(case: Case, tiny: Case, seconds: float) -> dict[str, float | None]:
    """Return the times of a row. Each call alternates with memcpy only: long vector code slows the clock for
    a while after it.
    """
    copy, tiny_copy = memcpy_of(case.moved), memcpy_of(tiny.moved)
    theirs = least_times([case.torch, copy], seconds)[0] if case.torch is not None else None
    ours, memcpy = least_times([case.ours, copy], seconds)
    call, memcpy_call = least_times([tiny.ours, tiny_copy], seconds / 10)
    return {"torch": theirs, "ours": ours, "call": call, "memcpy": memcpy, "memcpy_call": memcpy_call}


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    for capability, mb, threads in itertools.product(args.capability, args.mb, args.threads):
        _C.use_cpu_capability(capability)
        torch.set_num_threads(threads)
        for group in GROUPS:
            for case, tiny in zip(group(int(mb * MB) // 4), group(TENSORS), strict=True):
                if all(word in case.name for word in args.only):
                    times = measure(case, tiny, args.seconds)
                    yield Row(case.name, mb, threads, capability, case.moved, **times)  # type: ignore[arg-type]


def cells(row: Row) -> list[str]:
    theirs = f"{row.torch:.0f}" if row.torch else ""
    return [
        row.kernel,
        f"{row.mb:g}",
        theirs,
        f"{row.ours:.0f}",
        f"{row.call:.0f}",
        f"{row.memcpy:.0f}",
        f"{row.torch / row.memcpy:.2f}" if row.torch else "",
        f"{row.ratio:.2f}",
        f"{row.torch / row.ours:.1f}" if row.torch else "",
    ]


HEADINGS = [
    "kernel",
    "MB",
    "torch",
    "ours",
    "call",
    "memcpy",
    "torch / memcpy",
    "ours / memcpy",
    "torch / ours",
]
WIDTHS = [32, 5, 9, 9, 6, 9, 15, 14, 13]


def print_row(row: Row) -> None:
    named = f"{cells(row)[0]:32}"
    print(
        named,
        *(f"{cell:>{width}}" for cell, width in zip(cells(row)[1:], WIDTHS[1:], strict=True)),
        flush=True,
    )


def versions() -> str:
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "")
    return f"torch {torch.__version__}, CPython {platform.python_version()}, {model or platform.machine()}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, nargs="+", default=[1, 4, 16, 64], help="sizes of the tensors in fp32"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--capability", nargs="+", default=[_C.cpu_capabilities()[0]], choices=_C.cpu_capabilities()
    )
    parser.add_argument("--only", nargs="*", default=[], help="words in the name of the kernel")
    parser.add_argument("--seconds", type=float, default=0.5, help="per kernel and size")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    keep_freed_memory()
    print(versions(), f"load {os.getloadavg()[0]:.1f}", "", COUNTED, sep="\n")
    print(
        f"{HEADINGS[0]:32}",
        *(f"{head:>{width}}" for head, width in zip(HEADINGS[1:], WIDTHS[1:], strict=True)),
    )
    rows = []
    for row in measure_all(args):
        if not rows or (row.capability, row.threads) != (rows[-1].capability, rows[-1].threads):
            print(f"-- {row.capability}, {row.threads} thread{'s' * (row.threads > 1)}")
        print_row(row)
        rows.append(row)
    single = [row.ratio <= LIMIT for row in rows if row.threads == 1]
    print(f"{sum(single)} of {len(single)} within {LIMIT} x memcpy on one thread")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
