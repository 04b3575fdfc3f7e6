"""Loads of a checkpoint on gloo ranks, compared with dcp.load and with a memcpy plus checksum, the least work
of any load.

python -m benchmarks.checkpoint_load
python -m benchmarks.checkpoint_load --mib 64 --loads 2 --ranks 1 --markdown table.md
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.background_save import build
from benchmarks.ranks import shown, told_by_ranks

WAYS = ("load", "load by other ranks", "one thread", "dcp.load of model_state", "FSDP2 dcp.load")
COLUMNS = ("warm ms", "GB/s", "CPU ms", "dropped ms", "GB/s", "memcpy, checksum ms", "read dropped ms")
TEXT = """\
Rank 0 of {ranks} on gloo, {mib} MiB of fp32 parameters ({saved:.0f} MiB loaded by each rank, with Adam's state). Cells
show the least of {loads} loads after the first, and the median in brackets. "warm": the files are in the page cache;
"dropped": posix_fadvise(DONTNEED) has evicted them; "CPU": CPU time of all threads, warm; "memcpy, checksum": the same
number of bytes from memory to memory, by one thread, in blocks of 1 MiB; "read dropped": the same number of bytes of
the rank's files into memory, by one thread, without a checksum. FSDP2's calls include get_state_dict() and
set_state_dict().
"""


def drop(folder: Path) -> None:
    for path in folder.rglob("*.distcp"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copied_with_checksum(nbytes: int) -> float:
    source, target = (memoryview(bytearray(b"\1" * nbytes)) for _ in range(2))
    start, crc32 = time.perf_counter(), 0
    for at in range(0, nbytes, 2**20):
        target[at : at + 2**20] = source[at : at + 2**20]
        crc32 = zlib.crc32(target[at : at + 2**20], crc32)
    return (time.perf_counter() - start) * 1e3


def read_alone(folder: Path, nbytes: int) -> float:
    drop(folder)
    target, start = memoryview(bytearray(2**20)), time.perf_counter()
    for path in sorted(folder.rglob("*.distcp")):
        with path.open("rb", buffering=0) as file:
            while nbytes > 0 and (count := file.readinto(target)):
                nbytes -= count
    return (time.perf_counter() - start) * 1e3


def load_of(way: str, model: Any, optimizer: Any, folder: Path) -> Callable[[], object]:
    """Save the checkpoint and return the function that loads it."""
    from fsdp_c import checkpoint
    from fsdp_c.checkpoint import storage

    if way == "FSDP2 dcp.load":
        dcp.save(
            dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder
        )

        def load() -> None:
            own, of_optimizer = get_state_dict(model, optimizer)
            dcp.load({"model": own, "optim": of_optimizer}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=of_optimizer)

        return load
    if not (folder / ".metadata").exists():  # not yet saved for an earlier way
        checkpoint.save(model, optimizer, folder)
    if way == "dcp.load of model_state":
        return lambda: dcp.load(
            {"model": checkpoint.model_state(model), "optim": checkpoint.optim_state(model, optimizer)},
            checkpoint_id=folder,
        )
    if way == "one thread":
        storage.reading_threads = lambda: 1
    return lambda: checkpoint.load(model, optimizer, folder)


def rank_body(
    rank: int, told: Any, way: str, args: argparse.Namespace, folder: str, only_saves: bool
) -> None:
    ranks = dist.get_world_size()
    model, optimizer = build(way, args.mib, args.side)
    model(torch.randn(2, args.side)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = Path(folder) / "checkpoint"
    load = load_of(way, model, optimizer, path)
    nbytes = int(3 * args.mib * 2**20 / ranks)
    found: list[list[float]] = [[] for _ in range(5)]
    if not only_saves:
        for _ in range(args.loads + 1):
            for is_dropped in (False, True):
                dist.barrier()
                if is_dropped and rank == 0:
                    drop(path)
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                load()
                found[2 if is_dropped else 0].append((time.perf_counter() - start) * 1e3)
                if not is_dropped:
                    found[1].append((time.process_time() - used) * 1e3)
            dist.barrier()
            if rank == 0:
                found[3].append(copied_with_checksum(nbytes))
                found[4].append(read_alone(path, nbytes))
    if rank == 0 and not only_saves:
        warm, cpu, dropped, copied, read = (values[1:] for values in found)
        rates = [f"{nbytes / min(values) / 1e6:.2f}" for values in (warm, dropped)]
        told.send((shown(warm), rates[0], shown(cpu), shown(dropped), rates[1], shown(copied), shown(read)))
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, ranks: int, args: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if way == "load by other ranks":
            told_by_ranks(rank_body, ranks + 1, way, args, folder, True)
        return told_by_ranks(rank_body, ranks, way, args, folder, False) or ("failed",) * len(COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--mib", type=int, default=256, help="MiB of parameters over all ranks")
    parser.add_argument(
        "--side", type=int, default=1024, help="rows and columns of each layer's square matrix"
    )
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--folder", help="folder for checkpoints (default: that of temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    surroundings = (
        f"torch {torch.__version__}, CPython {platform.python_version()}, {os.cpu_count()} processors\n"
    )
    lines = [surroundings]
    for ranks in args.ranks:
        lines.append(TEXT.format(ranks=ranks, mib=args.mib, saved=3 * args.mib / ranks, loads=args.loads))
        lines += [f"| | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
        for way in args.ways:
            lines.append(f"| {way} | {' | '.join(measured(way, ranks, args))} |")
            print(lines[-1], flush=True)
        lines.append("")
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
