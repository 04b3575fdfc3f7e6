"""One step of FlatAdamW beside torch's fused and foreach AdamW, on the CPU; and, with --averages, updates of
ParameterAverage beside AveragedModel's.

python -m benchmarks.optim
python -m benchmarks.optim --averages
python -m benchmarks.optim --threads 1 2 --markdown table.md
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common, kernels

import torch  # isort: skip
from torch import nn  # isort: skip

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # isort: skip

from fsdp_c.optim import FlatAdamW, ParameterAverage
from fsdp_c.sharding.sharded_module import units_of
from fsdp_c.state.state_dict_saving import local_shard

MB = 1 << 20
STATE_NAMES = ("exp_avg", "exp_avg_sq")
COUNTED = """\
The time of one `step()` in microseconds, the least of many in turn with each other: torch's AdamW with `foreach=True`
and with `fused=True`, FlatAdamW, and memcpy on one thread for the bytes that a step has to read and write, once each
(half read, half written). 'MB' is the size of all parameters. "bf16, fp32 state" is `state_dtype=torch.float32`,
"8-bit state" `state_dtype=torch.uint8`, "masters" `master_dtype=torch.float32`, "stochastic"
`rounding="stochastic"`, none of which torch has.
"""
HEADINGS = [
    "parameters",
    "tensors",
    "MB",
    "foreach",
    "fused",
    "FlatAdamW",
    "memcpy",
    "fused / ours",
    "fused / memcpy",
    "ours / memcpy",
]

OF_AVERAGES = """\
The processor's time of one update in microseconds, the least of many in turn with each other: of ParameterAverage on
rank 0 of 2, whose group sends nothing; of a loop that has all shards and averages at hand, `torch._foreach_lerp_` (of
averages in another dtype: a cast and a `lerp_` for each); and of AveragedModel with the whole model. "held": MiB that
the average takes on a rank.
"""
AVERAGE_HEADINGS = [
    *("average", "units", "MB", "AveragedModel", "loop", "ours", "ours / loop", "AveragedModel / ours"),
    *("held by AveragedModel", "held by ours"),
]


@dataclass(frozen=True)
class Setting:
    """Parameters of one dtype, their state of another, so many tensors of one size."""

    name: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    tensors: int
    mb: float
    kept: dict[str, Any] = field(default_factory=dict)  # options that torch has not
    kept_nbytes: int = 0  # of an element, besides

    def params(self) -> list[nn.Parameter]:
        numel = int(self.mb * MB) // self.dtype.itemsize // self.tensors
        params = [nn.Parameter(torch.randn(numel).to(self.dtype)) for _ in range(self.tensors)]
        for param in params:
            param.grad = torch.randn(numel).to(self.dtype)
        return params

    def moved(self) -> int:
        """Bytes: parameter and state read and written, gradient read."""
        numel = int(self.mb * MB) // self.dtype.itemsize
        state_nbytes = len(STATE_NAMES) * self.state_dtype.itemsize + self.kept_nbytes
        return numel * (3 * self.dtype.itemsize + 2 * state_nbytes)


def settings(mb: list[float]) -> Iterator[Setting]:
    dtypes = {
        "fp32": (torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.bfloat16),
        "bf16, fp32 state": (torch.bfloat16, torch.float32),
    }
    for (name, (dtype, state_dtype)), size in itertools.product(dtypes.items(), mb):
        yield Setting(name, dtype, state_dtype, 1, size)
    stochastic = {"rounding": "stochastic"}
    for size in mb:
        masters = {"master_dtype": torch.float32}
        yield Setting("bf16 with masters", torch.bfloat16, torch.float32, 1, size, masters, 2)
        yield Setting("bf16 stochastic", torch.bfloat16, torch.bfloat16, 1, size, stochastic)
        yield Setting("bf16 stochastic, fp32 state", torch.bfloat16, torch.float32, 1, size, stochastic)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            yield Setting(f"{name}, 8-bit state", dtype, torch.uint8, 1, size)
    for count in (100, 1000):
        yield Setting("fp32", torch.float32, torch.float32, count, 4)


def optimizers(setting: Setting) -> dict[str, torch.optim.Optimizer]:
    made: dict[str, torch.optim.Optimizer] = {
        "FlatAdamW": FlatAdamW(setting.params(), state_dtype=setting.state_dtype, **setting.kept),
    }
    if setting.state_dtype == setting.dtype and not setting.kept:
        made["fused"] = torch.optim.AdamW(setting.params(), fused=True)
        made["foreach"] = torch.optim.AdamW(setting.params(), foreach=True)
    return made


def measure(setting: Setting, seconds: float, clock: Callable[[], int]) -> dict[str, float]:
    """Least microseconds by heading."""
    made = optimizers(setting)
    calls: list[Callable[[], Any]] = [optimizer.step for optimizer in made.values()]
    calls.append(kernels.memcpy_of(setting.moved()))
    return dict(zip([*made, "memcpy"], kernels.least_times(calls, seconds, clock), strict=True))


def cells(setting: Setting, times: dict[str, float]) -> list[str]:
    ours, fused = times["FlatAdamW"], times.get("fused")
    shown = [
        f"{times[name]:.0f}" if name in times else "" for name in ("foreach", "fused", "FlatAdamW", "memcpy")
    ]
    of_fused = [f"{fused / other:.2f}" if fused else "" for other in (ours, times["memcpy"])]
    ratios = [*of_fused, f"{ours / times['memcpy']:.2f}"]
    return [setting.name, str(setting.tensors), f"{setting.mb:g}", *shown, *ratios]


@dataclass(frozen=True)
class Averaged:
    """A model of so many blocks, and what is averaged."""

    name: str
    blocks: int
    width: int
    decay: float | None = 0.999
    dtype: torch.dtype = torch.float32
    kept_in: torch.dtype | None = None

    def cells(self, seconds: float) -> list[str]:
        plain = common.Stack(self.blocks, 8, self.width).to(self.dtype)
        model = common.wrap("fsdp_c", copy.deepcopy(plain), "FULL_SHARD", True, False)
        model(torch.zeros(1, self.width, dtype=self.dtype))  # what a first step prepares
        ours = ParameterAverage(model, self.decay, dtype=self.kept_in)
        function = None if self.decay is None else get_ema_multi_avg_fn(self.decay)
        theirs = AveragedModel(plain, multi_avg_fn=function)
        shards = [local_shard(unit) for unit in units_of(model)]
        averages = [shard.to(self.kept_in or self.dtype, copy=True) for shard in shards]
        weight = 1e-3

        def loop() -> None:
            if self.kept_in is None:
                torch._foreach_lerp_(averages, shards, weight)
            else:
                for average, shard in zip(averages, shards, strict=True):
                    average.lerp_(shard.to(average.dtype), weight)

        calls = [lambda: theirs.update_parameters(plain), torch.no_grad()(loop), ours.update]
        whole, at_hand, own = kernels.least_times(calls, seconds, time.thread_time_ns)
        total = sum(param.nbytes for param in plain.parameters()) / MB
        held = sum(average.nbytes for average in ours.held()[0].values()) / MB
        times = f"{whole:.0f}", f"{at_hand:.0f}", f"{own:.0f}", f"{own / at_hand:.2f}", f"{whole / own:.2f}"
        return [self.name, str(len(shards)), f"{total:.1f}", *times, f"{total:.1f}", f"{held:.1f}"]


AVERAGED = [
    Averaged("exponential, fp32", 8, 512),
    Averaged("exponential, fp32", 32, 512),
    Averaged("exponential, fp32", 64, 16),
    Averaged("equal weights, fp32", 8, 512, decay=None),
    Averaged("exponential, bf16", 32, 512, dtype=torch.bfloat16),
    Averaged("exponential, of bf16 in fp32", 32, 512, dtype=torch.bfloat16, kept_in=torch.float32),
]


def table_of_averages(seconds: float) -> list[str]:
    common.init_noop_group(2)
    lines = ["", "## Averages", "", OF_AVERAGES, "| " + " | ".join(AVERAGE_HEADINGS) + " |"]
    lines.append("|---" + "|---:" * (len(AVERAGE_HEADINGS) - 1) + "|")
    print(*lines, sep="\n")
    for setting in AVERAGED:
        lines.append("| " + " | ".join(setting.cells(seconds)) + " |")
        print(lines[-1], flush=True)
    return lines


def table_of_steps(args: argparse.Namespace, about: str) -> list[str]:
    lines = [f"# Steps of AdamW, {time.strftime('%Y-%m-%d')}", "", COUNTED, about]
    print(*lines, sep="\n")
    for threads in args.threads:
        torch.set_num_threads(threads)
        heading = ["", f"## {threads} thread{'s' * (threads > 1)}", "", "| " + " | ".join(HEADINGS) + " |"]
        lines += [*heading, "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
        print(*lines[-5:], sep="\n")
        for setting in settings(args.mb):
            clock = time.thread_time_ns if args.processor_time else time.perf_counter_ns
            lines.append("| " + " | ".join(cells(setting, measure(setting, args.seconds, clock))) + " |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=1.0, help="per setting")
    parser.add_argument("--processor-time", action="store_true", help="of one thread: on a machine at work")
    parser.add_argument("--averages", action="store_true", help="these alone")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    kernels.keep_freed_memory()
    about = f"{kernels.versions()}; load {os.getloadavg()[0]:.1f}."
    if args.averages:
        torch.set_num_threads(1)
        lines = [f"# Averages of parameters, {time.strftime('%Y-%m-%d')}", "", about]
        lines += table_of_averages(args.seconds)
    else:
        lines = table_of_steps(args, about)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
