"""Background saves on gloo ranks, compared with a foreground save and FSDP2's dcp.async_save.

python -m benchmarks.background_save
python -m benchmarks.background_save --mib 64 --saves 2 --markdown table.md
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from benchmarks.ranks import shown, status, told_by_ranks

WAYS = ("foreground", "background", "FSDP2 dcp.save", "FSDP2 async thread", "FSDP2 async process")
COLUMNS = (
    *("first stall ms", "stall ms", "stall CPU ms", "memcpy CPU ms", "wall s"),
    *("step ms alone", "step ms during the save", "peak +MiB"),
)
TEXT = """\
Rank 0 of {ranks} on gloo, {mib} MiB of fp32 parameters ({saved:.0f} MiB saved by each rank, with Adam's
state). Cells show the least of {saves} saves after the first, and the median in brackets. "stall": time until the call
returns; "CPU": CPU time of the calling thread; "memcpy": copy of the same number of bytes in 32 pieces into touched
memory, in the same process before each save; "wall": time until the checkpoint is complete; "peak": growth of resident
memory over its value before the saves, for the rank and its child processes. FSDP2's calls include get_state_dict(),
and its async_save uses a gloo group of its own.
"""


def build(way: str, mib: int, side: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(side, side, bias=False) for _ in range(max(1, mib * 2**18 // side**2))]
    if way.startswith("FSDP2"):
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        model: Any = fully_shard(nn.Sequential(*layers), mesh=mesh)
    else:
        from fsdp_c import FullyShardedDataParallel as FSDP

        options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
        model = FSDP(nn.Sequential(*[FSDP(layer, **options) for layer in layers]), **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@functools.cache
def own_group() -> Any:
    """Create a process group for async_save. In the default group its collectives interleave with those of
    the steps, and gloo aborts the process.
    """
    return dist.new_group(backend="gloo")


def _watch(is_there: Callable[[], bool], start: float, walls: list[float]) -> None:
    while not is_there():
        time.sleep(0.005)
    walls.append(time.perf_counter() - start)


def start_of_save(way: str, model: Any, optimizer: Any, path: Path) -> Callable[[], bool]:
    """Begin a save and return a function that returns True once the checkpoint is complete."""
    if not way.startswith("FSDP2"):
        from fsdp_c import checkpoint

        handle = checkpoint.save(model, optimizer, path, background=way == "background")
        return handle.done
    own, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": own, "optim": of_optimizer}
    if way == "FSDP2 dcp.save":
        dcp.save(state, checkpoint_id=path)
        return lambda: True
    kind = AsyncCheckpointerType.THREAD if way.endswith("thread") else AsyncCheckpointerType.PROCESS
    future: Any = dcp.async_save(
        state, checkpoint_id=path, async_checkpointer_type=kind, process_group=own_group()
    )
    return lambda: future.done() and future.result() is not None


def memcpy_ms(memory: list[torch.Tensor]) -> float:
    start = time.thread_time()
    for part, whole in zip(memory[0].chunk(32), memory[1].chunk(32), strict=True):
        whole.copy_(part)
    return (time.thread_time() - start) * 1e3


def rank_body(rank: int, told: Any, way: str, args: argparse.Namespace, folder: str) -> None:
    model, optimizer = build(way, args.mib, args.side)
    x = torch.randn(args.batch, args.side)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3

    def agreed(value: bool) -> bool:
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    for _ in range(3):
        step()
    saved = int(3 * args.mib * 2**20 / args.ranks)
    memory = [torch.ones(saved, dtype=torch.uint8) for _ in range(2)]
    alone = [step() for _ in range(args.steps)]
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    stalls, computed, walls, meanwhile, copies, of_children = [], [], [], [], [], 0.0
    for number in range(args.saves + 1):
        path = Path(folder) / f"step-{number}"
        dist.barrier()  # all ranks copy at the same time, as in a save
        copies.append(memcpy_ms(memory))
        dist.barrier()
        start, used = time.perf_counter(), time.thread_time()
        is_there = start_of_save(way, model, optimizer, path)
        stalls.append((time.perf_counter() - start) * 1e3)
        computed.append((time.thread_time() - used) * 1e3)
        watch = threading.Thread(target=_watch, args=(is_there, start, walls))
        watch.start()
        steps = []
        while not agreed(not watch.is_alive()):
            steps.append(step())
        meanwhile += steps if number else []
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        of_children = max(of_children, sum(status("VmHWM", child) for child in children))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
    if rank == 0:
        peak = status("VmHWM") - before + of_children
        cpu = shown(computed[1:]), shown(copies[1:])
        row = (f"{stalls[0]:.0f}", shown(stalls[1:]), *cpu, shown(walls[1:], 2), shown(alone))
        told.send((*row, shown(meanwhile), f"{peak:.0f}"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a normal exit waits for the process of async_save


def measured(way: str, args: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return told_by_ranks(rank_body, args.ranks, way, args, folder) or ("failed",) * len(COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="MiB of parameters over all ranks")
    parser.add_argument(
        "--side", type=int, default=1024, help="rows and columns of each layer's square matrix"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps without a save, measured first")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--folder", help="folder for checkpoints (default: that of temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--picture", type=Path, help="draw the pauses of training here")
    args = parser.parse_args()
    lines = [f"| | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    found = {}
    for way in args.ways:
        found[way] = measured(way, args)
        lines.append(f"| {way} | {' | '.join(found[way])} |")
        print(lines[-1], flush=True)
    text = TEXT.format(ranks=args.ranks, mib=args.mib, saved=3 * args.mib / args.ranks, saves=args.saves)
    surroundings = (
        f"torch {torch.__version__}, CPython {platform.python_version()}, {os.cpu_count()} processors\n"
    )
    table = "\n".join([text, surroundings, *lines])
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    if args.picture:
        draw(found, args.picture)


def draw(found: dict[str, tuple[str, ...]], path: Path) -> None:
    """Draw the medians as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {"training pauses": "stall ms", "a memcpy, of the processor": "memcpy CPU ms"}
    rows = {way: dict(zip(COLUMNS, row, strict=True)) for way, row in found.items() if "failed" not in row}
    figure, panel = pyplot.subplots(figsize=(7, 0.6 * len(rows) + 1.2))
    for index, (label, column) in enumerate(columns.items()):
        medians = [float(row[column].partition("(")[2].rstrip(")")) for row in rows.values()]
        places = [place - 0.2 + 0.4 * index for place in range(len(rows))]
        bars = panel.barh(places, medians, height=0.38, label=label)
        panel.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    panel.set_yticks(range(len(rows)), rows)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("ms per save, median")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
