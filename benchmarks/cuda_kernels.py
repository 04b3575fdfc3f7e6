"""Bandwidth of each CUDA kernel as a fraction of a copy's on the same GPU, compared with torch's operations.

python -m benchmarks.cuda_kernels [--json out.json]

Goal: 90 % of the copy's bandwidth from 64 MiB on. The benchmark needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fsdp_c  # noqa: F401  (registers the operators)

MEBIBYTE = 1 << 20
SIZES = [4, 16, 64, 256]
REPEATS = 10
MOST_COPIES = 32  # the host waits after about a thousand launches on a stream
HEAD_START = 1_000_000  # device cycles in which the host enqueues one call
MOST_CYCLES = 2_000_000_000
ops = torch.ops.fsdp_c


class Case(NamedTuple):
    """One operation by fsdp_c and by torch, and the number of bytes that any implementation must move."""

    name: str
    ours: Callable[[], Any]
    torchs: Callable[[], Any] | None  # None if torch has no such operation
    nbytes: int


def pieces(flat: Tensor, count: int = 12) -> list[Tensor]:
    """Split ``flat`` into the tensors of one unit, of unequal sizes."""
    ends = [flat.numel() * (i + 1) ** 2 // count**2 for i in range(count)]
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def cases(numel: int, device: str) -> list[Case]:
    """Return all kernels of a step, each on ``numel`` elements."""
    fp32, bf16 = torch.randn(numel, device=device), torch.randn(numel, device=device).bfloat16()
    out32, out16 = torch.empty_like(fp32), torch.empty_like(bf16)
    grads16, grads32 = pieces(bf16), pieces(fp32)
    offsets = [grad.storage_offset() for grad in grads16]

    def pack(out: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_copy_(out, grads)
        torch._foreach_div_(out, 2.0)

    def packed(name: str, out: Tensor, grads: list[Tensor], nbytes: int) -> Case:
        views = pieces(out)
        return Case(
            f"pack {name}",
            lambda: ops.pack_gradients(out, grads, offsets, 2.0),
            lambda: pack(views, grads),
            nbytes * numel,
        )

    def accumulate() -> None:
        fp32.add_((bf16 / 2.0).float())

    return [
        Case("copy fp32", lambda: out32.copy_(fp32), lambda: out32.copy_(fp32), 8 * numel),
        packed("bf16", out16, grads16, 4),
        packed("bf16 -> fp32", out32, grads16, 6),
        packed("fp32 -> bf16", out16, grads32, 6),
        Case("fp32 += bf16 / 2", lambda: ops.accumulate_shard(fp32, bf16, 2.0), accumulate, 10 * numel),
    ]


def call(bodies: list[Callable[[], Any]]) -> None:
    """Call each body and keep all results to the end, so that no two calls write to the same memory."""
    _ = [body() for body in bodies]


def seconds(bodies: list[Callable[[], Any]]) -> float:
    """Return the shortest time of one call. Each of several calls in a row uses memory that the others
    evicted from the cache.

    The calls are enqueued while the device sleeps, so that the host's time is not measured.
    """
    call(bodies)  # loads the kernels
    best, cycles, done = float("inf"), HEAD_START * len(bodies), 0
    while done < REPEATS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        call(bodies)
        end.record()
        if start.query() and cycles < MOST_CYCLES:  # the device began before the host's last call
            cycles *= 2
            continue
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000 / len(bodies))
        done += 1
    return best


def measure(mebibytes: int) -> list[dict[str, Any]]:
    """Return the rows of one size. ``ours`` and ``torch`` are fractions of a copy's bandwidth."""
    numel = mebibytes * MEBIBYTE // 4
    copies = [cases(numel, "cuda") for _ in range(min(MOST_COPIES, max(2, 512 // mebibytes)))]
    rows: list[dict[str, Any]] = []
    for same in zip(*copies, strict=True):
        nbytes = same[0].nbytes
        ours = nbytes / seconds([case.ours for case in same])
        torchs = nbytes / seconds([case.torchs for case in same if case.torchs]) if same[0].torchs else None
        copy = rows[0]["copy GB/s"] * 1e9 if rows else ours  # the first case is the copy
        rows.append(
            {
                "kernel": same[0].name,
                "MiB": mebibytes,
                "copy GB/s": copy / 1e9,
                "ours": ours / copy,
                "torch": torchs / copy if torchs else None,
            }
        )
    return rows


def main() -> None:
    """Print the table, and write it as JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="MiB of fp32 input")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here")
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(versions)
    print(f"{'kernel':36}{'MiB':>6}{'copy GB/s':>12}{'ours':>8}{'torch':>8}")
    rows = []
    for size in arguments.sizes:
        for row in measure(size):
            rows.append(row)
            torchs = "" if row["torch"] is None else f"{row['torch']:.0%}"
            print(
                f"{row['kernel']:36}{size:6}{row['copy GB/s']:12.0f}{row['ours']:8.0%}{torchs:>8}", flush=True
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"on": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
