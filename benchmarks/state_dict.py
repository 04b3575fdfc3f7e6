"""State dicts of models and optimizers on gloo ranks, with fsdp_c, torch's FSDP1 and FSDP2 in one run.

python -m benchmarks.state_dict
python -m benchmarks.state_dict --gib 1 --against torch.fsdp1
python -m benchmarks.state_dict --markdown table.md
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch import nn  # isort: skip
from torch.distributed.checkpoint import state_dict as dcp  # isort: skip
from torch.distributed.fsdp import (  # isort: skip
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

COUNTED = """\
CPU milliseconds of all threads of rank 0, the least of {repeats} calls, and the peak growth of its resident memory
during a call, in MiB, results included; the allocator returns freed memory before it. FSDP2's state dicts are those of
torch.distributed.checkpoint.state_dict, in the same forms.
"""
MIB = 2**20
OPERATIONS = ("get", "load", "optimizer get", "optimizer to_load")
FSDP1_CONFIGS = {
    "FULL": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False),
        FullOptimStateDictConfig(offload_to_cpu=False),
    ),
    "SHARDED": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}
FSDP2_OPTIONS = {"FULL": dcp.StateDictOptions(full_state_dict=True), "SHARDED": dcp.StateDictOptions()}


class Measured(NamedTuple):
    """The least CPU time in milliseconds, and the highest peak in MiB."""

    cpu_ms: float
    peak_mib: float


class LargeBlock(common.Block):
    """Three square matrices of ``numel`` elements in all. A subclass of Block, so that wrapping makes it a
    unit.
    """

    def __init__(self, numel: int) -> None:
        nn.Module.__init__(self)
        side = int((numel / 3) ** 0.5) // 8 * 8
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(weight[0, 0] for weight in self.weights)


def build(implementation: str, args: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model and its optimizer after one step of Adam."""
    torch.manual_seed(0)
    if args.gib:
        plain: nn.Module = nn.Sequential(*[LargeBlock(int(args.gib * 2**30 / 4 / 8)) for _ in range(8)])
        x = torch.ones(4)
    else:
        plain = common.Stack(args.units, args.params, args.width)
        x = torch.randn(2, args.width)
    model = common.wrap(implementation, plain, "FULL_SHARD", not args.flat, False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# ----------------------------------------------------------------- measured operations


def operations(
    implementation: str, kind: str, model: Any, optimizer: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the operations in order. Each load loads the result of the get before it."""
    if implementation == "torch.fsdp2":
        options = FSDP2_OPTIONS[kind]
        state = dcp.get_model_state_dict(model, options=options)
        yield "get", lambda: dcp.get_model_state_dict(model, options=options)
        yield "load", lambda: dcp.set_model_state_dict(model, state, options=options)
        optim = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        yield "optimizer get", lambda: dcp.get_optimizer_state_dict(model, optimizer, options=options)
        yield (
            "optimizer to_load",
            lambda: dcp.set_optimizer_state_dict(model, optimizer, optim, options=options),
        )
        return
    fsdp = common.fsdp_class(implementation)
    with fsdp.state_dict_type(model, *FSDP1_CONFIGS[kind]):  # type: ignore[attr-defined]
        state = model.state_dict()
        yield "get", model.state_dict
        yield "load", lambda: model.load_state_dict(state)
        state = None
        optim = fsdp.optim_state_dict(model, optimizer)  # type: ignore[attr-defined]
        yield "optimizer get", lambda: fsdp.optim_state_dict(model, optimizer)  # type: ignore[attr-defined]
        yield "optimizer to_load", lambda: fsdp.optim_state_dict_to_load(model, optimizer, optim)  # type: ignore[attr-defined]


def measure(call: Callable[[], Any], repeats: int) -> Measured:
    times, peaks = [], []
    allocator = ctypes.CDLL("libc.so.6")
    for _ in range(repeats):
        gc.collect()
        # memory that the allocator keeps of earlier calls would hide as much of the growth
        allocator.malloc_trim(0)
        dist.barrier()
        reset_peak()
        before, started = status("VmRSS"), time.process_time()
        result = call()
        times.append(time.process_time() - started)
        peaks.append(status("VmHWM") - before)
        del result
    return Measured(min(times) * 1e3, max(peaks) / MIB)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def work(rank: int, args: argparse.Namespace, store: str, results: str) -> None:
    """Run one rank. Rank 0 writes the measurements."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    found = {}
    for implementation in (*args.against, "fsdp_c"):
        model, optimizer = build(implementation, args)
        for kind in args.types:
            for name, call in operations(implementation, kind, model, optimizer):
                found[f"{kind} {name}|{implementation}"] = measure(call, args.repeats)
        del model, optimizer, call
        gc.collect()
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------- the table


def table(found: dict[str, list[float]], args: argparse.Namespace) -> str:
    names = [*args.against, "fsdp_c"]
    lines = [
        "| | " + " | ".join(names) + " | " + " | ".join(f"{name} / fsdp_c" for name in args.against) + " |"
    ]
    lines.append("|---" * (1 + len(names) + len(args.against)) + "|")
    for kind in args.types:
        for operation in OPERATIONS:
            row = [Measured(*found[f"{kind} {operation}|{name}"]) for name in names]
            cells = [f"{one.cpu_ms:.0f} ms, +{max(one.peak_mib, 0):.0f}" for one in row]
            ratios = [f"{one.cpu_ms / row[-1].cpu_ms:.1f}" for one in row[:-1]]
            lines.append(f"| {kind} {operation} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines)


def describe(args: argparse.Namespace) -> str:
    what = f"{args.gib:g} GiB in 8 units" if args.gib else f"{args.units} units of {args.params} parameters"
    form = "flat parameters" if args.flat else "original parameters"
    return (
        f"{what}, {form}, {args.ranks} gloo ranks, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--params", type=int, default=12, help="parameters per unit")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--gib", type=float, default=0, help="instead, 8 units of this size in all")
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--types", nargs="+", choices=list(FSDP1_CONFIGS), default=list(FSDP1_CONFIGS))
    parser.add_argument(
        "--against", nargs="*", choices=common.IMPLEMENTATIONS[:2], default=common.IMPLEMENTATIONS[:2]
    )
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    args = parser.parse_args()
    heading = describe(args)
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        torch.multiprocessing.spawn(work, (args, os.path.join(folder, "store"), results), nprocs=args.ranks)
        found = json.loads(Path(results).read_text())
    text = f"{heading}\n\n{COUNTED.format(repeats=args.repeats)}\n{table(found, args)}\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
