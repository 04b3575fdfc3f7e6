"""Host time per unit that sharding adds to one training step: fsdp_c, torch's FSDP1 and FSDP2.

python -m benchmarks.host_overhead
python -m benchmarks.host_overhead --impl torch.fsdp1 fsdp_c --P 12 --world 8 512 --json out.json
python -m benchmarks.host_overhead --instructions          # counted under valgrind instead of timed
python -m tests.simulated_gpu -m benchmarks.host_overhead --device cuda --instructions
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import common

import torch  # isort: skip  (after common, which sets the number of threads)
import torch.distributed as dist  # isort: skip

WIDTH = 8
BATCH = 2
EXTRAS = ("none", "clip", "optim", "fwd", "nosync", "frozen")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
FLOOR_US = 1.0  # lower bound for ratios: measured overheads can be negative
FLOOR_INSTRUCTIONS = 1000.0
COUNTED = """\
Measured: forward, backward and zeroing of the gradients (and the additions of --extra) of a stack of L blocks with P
parameters each, one unit per block and the root, minus the same step of the plain model, divided by the number of
units. Layers are tiny, so that the host's work dominates. Time is CPU time of the thread. All implementations are in
one process and step in turn, so that drifts of the machine affect all alike. 'min' and 'med' are over --steps steps.

Not measured: the collectives, which pass torch's dispatch and then do nothing (the process is rank 0 of --world), and
on the CPU the streams and the allocation of a GPU. --device cuda includes those; on a simulated GPU --instructions
excludes its own libraries, but includes the computation in torch's. torch's FSDP1 all-gathers on a CPU into a list of
world_size chunks and on CUDA into one tensor; the CUDA path is measured unless --cpu-path is given. Ratios are the
overhead of the first --impl with the same use_orig_params, divided by the row's.

--instructions counts with valgrind's callgrind between the same two points, in thousands of instructions per unit and
step: repeatable to a percent on any machine, about a minute for two or three configurations.
"""


@dataclass(frozen=True)
class Config:
    """One model and one process group, on which every implementation is measured."""

    L: int
    P: int
    world: int
    strategy: str
    mp: int
    extra: str

    def __str__(self) -> str:
        precision = "bf16" if self.mp else "fp32"
        return f"L={self.L} P={self.P} world={self.world} {self.strategy} {precision} extra={self.extra}"


@dataclass
class Candidate:
    """One implementation, built and warmed up. ``step`` is measured."""

    impl: str
    orig: int | None  # use_orig_params; None for FSDP2, which has no such option
    units: int
    step: Callable[[], None]

    @property
    def name(self) -> str:
        return self.impl if self.orig is None else f"{self.impl} use_orig_params={bool(self.orig)}"


@dataclass
class Row:
    """A line of the result: the cost of one candidate per unit of the model, in ``unit``."""

    config: Config
    impl: str
    orig: int | None
    unit: str
    plain: float
    step: float
    per_unit_min: float
    per_unit_med: float
    ratio: float

    def as_json(self) -> dict[str, object]:
        row = asdict(self)
        return row.pop("config") | row


# ------------------------------------------------------------------ building


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_overhead",
        description=__doc__,
        epilog=COUNTED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--impl", nargs="+", default=list(common.IMPLEMENTATIONS), choices=common.IMPLEMENTATIONS
    )
    parser.add_argument("--L", type=int, nargs="+", default=[8], help="blocks")
    parser.add_argument("--P", type=int, nargs="+", default=[2, 12, 48], help="parameters per block, even")
    parser.add_argument(
        "--world", type=int, nargs="+", default=[8], help="number of ranks, of which one is real"
    )
    parser.add_argument("--strategy", nargs="+", default=["FULL_SHARD"], choices=STRATEGIES)
    parser.add_argument("--orig", type=int, nargs="+", default=[1, 0], choices=(0, 1), help="use_orig_params")
    parser.add_argument(
        "--mp", type=int, nargs="+", default=[0], choices=(0, 1), help="1: bf16 parameters, fp32 reduction"
    )
    parser.add_argument(
        "--extra",
        nargs="+",
        default=["none"],
        choices=EXTRAS,
        help="clip_grad_norm_, SGD step, forward only, no_sync, every other layer frozen",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--cpu-path", action="store_true", help="keep torch FSDP1's all-gather for CPUs")
    parser.add_argument(
        "--instructions",
        type=int,
        nargs="?",
        const=2,
        default=0,
        metavar="STEPS",
        help="count under valgrind",
    )
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    # set in the process under valgrind
    parser.add_argument("--counting", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if any(params < 2 or params % 2 for params in options.P):
        parser.error("--P takes even numbers from 2: a layer has a weight and a bias")
    if any(number < 1 for number in (*options.L, options.steps, options.warmup)):
        parser.error("--L, --steps and --warmup take numbers from 1")
    if any(world < 2 for world in options.world):
        parser.error("--world takes numbers from 2: one rank shards nothing")
    if options.impl == ["torch.fsdp2"] and "NO_SHARD" in options.strategy:
        parser.error("torch.fsdp2 always shards: --strategy NO_SHARD needs one more --impl")
    return options


def make_step(model: torch.nn.Module, impl: str, x: torch.Tensor, extra: str) -> Callable[[], None]:
    """Return the measured step of a model."""
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True) if extra == "optim" else None
    )

    accumulate = extra == "nosync" and impl != "plain"

    def step() -> None:
        if extra == "fwd":
            with torch.no_grad():
                model(x)
            return
        if accumulate:
            with common.without_reduction(impl, model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        if extra == "clip":
            getattr(
                model,
                "clip_grad_norm_",
                lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
            )(1.0)
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def build(config: Config, impl: str, orig: int | None, warmup: int, device: str) -> Candidate:
    torch.manual_seed(0)
    model: torch.nn.Module = common.Stack(config.L, config.P, WIDTH).to(device)
    if config.extra == "frozen":
        for block in model.blocks:  # type: ignore[union-attr]
            block.layers[::2].requires_grad_(False)
    x = torch.randn(BATCH, WIDTH, device=device)
    if impl == "plain":
        dtype = torch.bfloat16 if config.mp else torch.float32
        model, x = model.to(dtype), x.to(dtype)
    else:
        model = common.wrap(impl, model, config.strategy, bool(orig), bool(config.mp), device)
    candidate = Candidate(impl, orig, config.L + 1, make_step(model, impl, x, config.extra))
    for _ in range(warmup):
        candidate.step()
    return candidate


def configs(options: argparse.Namespace) -> Iterator[Config]:
    for point in itertools.product(
        options.world, options.L, options.P, options.strategy, options.mp, options.extra
    ):
        world, blocks, params, strategy, precision, extra = point
        yield Config(blocks, params, world, strategy, precision, extra)


def candidates(config: Config, options: argparse.Namespace) -> list[Candidate]:
    """Return the plain model first, then every requested implementation."""
    wanted: list[tuple[str, int | None]] = [("plain", None)]
    for impl in options.impl:
        if impl == "torch.fsdp2" and config.strategy == "NO_SHARD":
            continue  # FSDP2 always shards
        wanted += [(impl, None)] if impl == "torch.fsdp2" else [(impl, orig) for orig in options.orig]
    device = "cuda:0" if options.device == "cuda" else "cpu"
    return [build(config, impl, orig, options.warmup, device) for impl, orig in wanted]


@contextlib.contextmanager
def group(world: int) -> Iterator[None]:
    common.init_noop_group(world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ timing


def time_steps(built: list[Candidate], steps: int) -> list[list[float]]:
    """Return the microseconds of every step of every candidate, measured in turn."""
    times: list[list[float]] = [[] for _ in built]
    gc.collect()
    gc.disable()
    for _ in range(steps):
        for candidate, own in zip(built, times, strict=True):
            start = time.thread_time_ns()
            candidate.step()
            own.append((time.thread_time_ns() - start) / 1e3)
    gc.enable()
    return times


def rows_of(
    config: Config,
    described: list[tuple[str, int | None, int]],
    costs: list[list[float]],
    unit: str,
    floor: float,
) -> list[Row]:
    """Convert costs per step, the plain model's first, to costs per unit and ratios."""
    plain_min, plain_med = min(costs[0]), statistics.median(costs[0])
    rows: list[Row] = []
    for (impl, orig, units), own in zip(described[1:], costs[1:], strict=True):
        low, middle = (min(own) - plain_min) / units, (statistics.median(own) - plain_med) / units
        same = [row for row in rows if row.impl == described[1][0] and orig in (row.orig, None)]
        reference = same[0].per_unit_min if same else low
        ratio = max(reference, floor) / max(low, floor)
        rows.append(Row(config, impl, orig, unit, plain_min, min(own), low, middle, ratio))
    return rows


def print_header(unit: str) -> None:
    print(f"added to a step by sharding, {unit} per unit\n")
    print(f"{'':32s} {'step':>10s} {'min':>9s} {'med':>9s}  times less than the first")


def print_rows(config: Config, rows: list[Row]) -> None:
    print(f"{config}, plain step {rows[0].plain:.0f} {rows[0].unit}")
    for row in rows:
        name = Candidate(row.impl, row.orig, 0, lambda: None).name
        print(
            f"  {name:30s} {row.step:10.0f} {row.per_unit_min:9.1f} {row.per_unit_med:9.1f}  {row.ratio:.2f}",
            flush=True,
        )


def run_timed(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    print_header("us")
    for config in configs(options):
        with group(config.world):
            built = candidates(config, options)
            described = [(candidate.impl, candidate.orig, candidate.units) for candidate in built]
            found = rows_of(config, described, time_steps(built, options.steps), "us", FLOOR_US)
            built.clear()
        print_rows(config, found)
        rows += found
    return rows


# ------------------------------------------------------------------ counting instructions


def switch_instrumentation(on: bool) -> None:
    """Switch the instrumentation of the callgrind that runs this process. Python spins meanwhile: valgrind
    handles the request only while code runs.
    """
    command = ["callgrind_control", "-i", "on" if on else "off", str(os.getpid())]
    control = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while control.poll() is None:
        pass
    if control.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {control.returncode}")


def discard_counts() -> None:
    """Dump counts and ignore the dump. From the first dump after a switch, callgrind also subtracts the
    counts before the switch.
    """
    torch._C._valgrind_toggle()
    torch._C._valgrind_toggle_and_dump_stats()


def count_under_valgrind(options: argparse.Namespace) -> None:
    """Write one dump per candidate, in the order of the descriptions file. Runs in the process under
    callgrind.
    """
    described: list[dict[str, object] | None] = []
    for config in configs(options):
        with group(config.world):
            built = candidates(config, options)
            described.append(None)  # the discarded dump
            switch_instrumentation(True)
            discard_counts()
            for candidate in built:
                candidate.step()
                gc.collect()
                gc.disable()
                torch._C._valgrind_toggle()
                for _ in range(options.instructions):
                    candidate.step()
                torch._C._valgrind_toggle_and_dump_stats()
                gc.enable()
                described.append({"impl": candidate.impl, "orig": candidate.orig, "units": candidate.units})
            switch_instrumentation(False)
            built.clear()
    options.counting.write_text(json.dumps(described))


def dumped_totals(folder: Path) -> list[int]:
    """Return the instructions of every dump requested by a client, in order, excluding those of a simulated
    GPU.
    """
    totals = []
    for file in sorted(folder.glob("cg.*"), key=lambda path: int(path.suffix[1:])):
        text = file.read_text()
        if "Trigger: Client Request" in text:
            total = int(re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE).group(1))
            totals.append(total - instructions_in(text, "/build/simulated_gpu/"))
    return totals


def instructions_in(dump: str, folder: str) -> int:
    """Return the instructions that a dump of callgrind attributes to functions in the libraries of a folder,
    without their callees.
    """
    names: dict[str, str] = {}
    total, inside, called = 0, False, False
    for line in dump.splitlines():
        if line.startswith(("ob=", "cob=")):
            number, _, name = line.partition("=")[2].partition(" ")
            names[number] = name or names[number]
            inside = folder in names[number] if line.startswith("ob=") else inside
        elif line.startswith("calls="):
            called = True  # the next line is the inclusive cost of the call: its callees list it themselves
        elif line and (line[0].isdigit() or line[0] in "+-*"):
            total += 0 if called or not inside else int(line.split()[-1])
            called = False
    return total


def run_counted(options: argparse.Namespace, arguments: list[str]) -> list[Row]:
    """Run this command again under callgrind and read its dumps."""
    if missing := [tool for tool in ("valgrind", "callgrind_control") if shutil.which(tool) is None]:
        raise SystemExit(f"--instructions needs {' and '.join(missing)}: install the valgrind package")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        described_at = folder / "described.json"
        tool = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--collect-atstart=no",
            f"--callgrind-out-file={folder}/cg",
        ]
        command = [
            *tool,
            sys.executable,
            "-m",
            "benchmarks.host_overhead",
            *arguments,
            "--counting",
            str(described_at),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"ATEN_CPU_CAPABILITY": "default"}
        )
        if done.returncode:
            raise SystemExit(f"the run under valgrind failed:\n{done.stderr[-4000:]}")
        written = json.loads(described_at.read_text())
        dumped = dumped_totals(folder)
    if len(dumped) != len(written):
        raise SystemExit(f"{len(dumped)} dumps of callgrind for {len(written)} candidates")
    described = [(one["impl"], one["orig"], one["units"]) for one in written if one]
    totals = [total for total, one in zip(dumped, written, strict=True) if one]
    rows: list[Row] = []
    print_header("thousand instructions")
    starts = [index for index, (impl, _, _) in enumerate(described) if impl == "plain"]
    for config, start, end in zip(configs(options), starts, [*starts[1:], len(described)], strict=True):
        costs = [[total / options.instructions / 1e3] for total in totals[start:end]]
        found = rows_of(config, described[start:end], costs, "kIr", FLOOR_INSTRUCTIONS / 1e3)
        print_rows(config, found)
        rows += found
    return rows


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    torch.set_num_threads(1)
    if not options.cpu_path:
        common.give_fsdp1_its_cuda_gather()
    if options.counting:
        count_under_valgrind(options)
        return
    rows = run_counted(options, arguments) if options.instructions else run_timed(options)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
