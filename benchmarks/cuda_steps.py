"""Steps of Llamas on one GPU with fsdp_c, torch's FSDP1 and FSDP2, each compared with the timeline. The
process is rank 0 of 8; its collectives copy on the device and send nothing.

python -m benchmarks.cuda_steps --json steps.json                        # needs a GPU
python -m benchmarks.cuda_steps --beside steps.json --markdown steps.md  # needs none
python -m benchmarks.cuda_steps --gpus 2 --json steps.json               # NCCL between the GPUs of this machine

Each row runs in its own process. "alone" is the model in bf16, without FSDP and optimizer. "narrow" is a
model so small that the device is idle: the time of its forward and backward is the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timeline.row import ALONE, IMPLEMENTATIONS, Row, in_processes, peaks_MiB, train
from benchmarks.timeline.shapes import MODELS, Model

WORLD, WARM_UP, REPEATS = 8, 4, 5
MACHINE = "h100_copies"
NARROW = Model(256, 1024, 4, 24, 32, family="mpt")
MOST_KERNELS = 24
MEMORY = ("requested_MiB", "allocated_MiB", "reserved_MiB")


def rows(models: list[str], offload: bool) -> list[Row]:
    options: dict[str, Any] = {"machine": MACHINE, "offload": offload}
    return [Row(name, model, **options) for model in models for name in (ALONE, *IMPLEMENTATIONS)]


# ---- measurement, in a process with a GPU


def copying_group() -> type:
    """Return a process group class whose collectives write this rank's result on the device, one kernel each."""
    from benchmarks.common import NoopGroup

    class CopyingGroup(NoopGroup):
        def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
            of_ranks = output.view(WORLD, -1)
            of_ranks[1:].copy_(input.view(1, -1))
            if of_ranks.data_ptr() != input.data_ptr():
                of_ranks[0].copy_(input.view(-1))
            return super()._allgather_base(output, input)

        def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
            output.view(-1).copy_(input.view(-1)[: output.numel()])
            return super()._reduce_scatter_base(output, input)

        all_gather_single = _allgather_base
        reduce_scatter_single = _reduce_scatter_base

    return CopyingGroup


def join_copies(row: Row) -> None:
    """Make this process rank 0 of WORLD."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks import common

    group = common.NoopGroup if row.model == "narrow" else copying_group()
    dist.Backend.register_backend(
        "copies", lambda store, rank, size, timeout: group(size), devices=["cpu", "cuda"]
    )
    dist.init_process_group("copies", rank=0, world_size=WORLD, store=FakeStore())


def measure(row: Row) -> dict[str, Any]:
    """Times in ms and memory in MiB of one row: of one rank that copies, or under torchrun of ranks with NCCL."""
    import torch
    import torch.distributed as dist

    from benchmarks.timeline.models import build

    torch.manual_seed(0)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    is_narrow = row.model == "narrow"
    shape = NARROW if is_narrow else MODELS[row.model]
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        join_copies(row)
    model, _ = build(row, shape, shape.sequence, {"gpus_per_node": dist.get_world_size()})
    torch.autograd.profiler._is_profiler_enabled = False  # which the timeline wants
    for buffer in model.buffers():
        buffer.normal_()
    has_optimizer = row.implementation != ALONE and not is_narrow
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) if has_optimizer else None
    tokens = torch.randint(shape.vocabulary, (row.batch, shape.sequence), device="cuda")

    def step() -> None:
        train(row, model, optimizer, tokens)

    for number in range(WARM_UP):
        step()
        if number == 0:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"step_ms": 1e3 * seconds(step, torch.cuda.synchronize, 20 if is_narrow else 3)}
    found |= zip(MEMORY, peaks_MiB(), strict=True)
    if not is_narrow:
        found["kernels"] = kernels(step)
    return found | {"on": torch.cuda.get_device_name(), "torch": torch.__version__}


def seconds(step: Callable[[], None], synchronize: Callable[[], None], count: int) -> float:
    """Return the median time of one step over several runs of ``count`` steps. The host may run ahead."""
    found = []
    for _ in range(REPEATS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def kernels(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Return the kernels with the longest total time in a step: name, launches, ms in all."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        times[event.name] += event.device_time
        launches[event.name] += 1
    return [(name[:120], launches[name], time / 1e3) for name, time in times.most_common(MOST_KERNELS)]


def in_own_process(row: Row, gpus: int) -> dict[str, Any]:
    """The row and its numbers, those of rank 0; only the row where it failed."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"] if gpus else []
    module = [*torchrun, "benchmarks.cuda_steps", "--row", json.dumps(vars(row))]
    command = [sys.executable, "-W", "ignore", "-m", *module]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{row} failed", file=sys.stderr)
        return {"row": vars(row)}
    return {"row": vars(row)} | json.loads(done.stdout.splitlines()[-1])


# ---- comparison with the timeline


def table(measured: list[dict[str, Any]]) -> str:
    """Return a Markdown table of each measured number and the model's prediction."""
    known = [one for one in measured if "step_ms" in one]
    large = [one for one in known if one["row"]["model"] != "narrow"]
    lines = [
        "| model | | step ms | by the model | "
        + " | ".join(f"{name[:-4]} MiB | by the model" for name in MEMORY)
        + " |",
        "|---|---|" + "---:|" * 8,
    ]
    for one, told in zip(large, in_processes([Row(**one["row"]) for one in large]), strict=True):
        row = told.row
        name = f"{row.model}{', offload' if row.offload else ''}"
        cells = [f"{one['step_ms']:.1f}", f"{told.step_ms:.1f}"]
        for key in MEMORY:
            cells += [f"{one[key]:.0f}", f"{getattr(told, key):.0f}"]
        lines.append(f"| {name} | {row.implementation} | " + " | ".join(cells) + " |")
    narrow = {
        one["row"]["implementation"]: one["step_ms"] for one in known if one["row"]["model"] == "narrow"
    }
    if ALONE in narrow:
        lines += ["", "| | forward and backward, ms | us per unit over the plain model |", "|---|---:|---:|"]
        for name, ms in narrow.items():
            each = 1e3 * (ms - narrow[ALONE]) / (NARROW.blocks + 1)
            lines.append(f"| {name} | {ms:.2f} | {each:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the steps, or compare earlier measurements with the timeline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", default=["narrow", "0.4B", "1.3B", "6.7B"], choices=["narrow", *MODELS]
    )
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="N ranks with NCCL, each on its GPU")
    parser.add_argument("--offload", action="store_true", help="parameters and the optimizer to the CPU")
    parser.add_argument("--json", type=Path, help="where what was measured goes")
    parser.add_argument("--beside", type=Path, help="what was measured, to stand beside the timeline")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        measured = json.dumps(measure(Row(**json.loads(arguments.row))))
        if os.environ.get("RANK", "0") == "0":
            print(measured, flush=True)
        os._exit(0)  # threads of autograd may still be there
    if arguments.beside:
        text = table(json.loads(arguments.beside.read_text()))
        print(text)
        if arguments.markdown:
            arguments.markdown.write_text(text + "\n")
        return
    found = []
    for row in rows(arguments.model, arguments.offload):
        one = in_own_process(row, arguments.gpus)
        found.append(one)
        numbers = {name: one.get(name) for name in ("step_ms", *MEMORY)}
        print(row.model, row.implementation, numbers, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    if any("step_ms" not in one for one in found):
        raise SystemExit("some rows failed: their errors are above")


if __name__ == "__main__":
    main()
