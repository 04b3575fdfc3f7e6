"""One step of FlatAdamW beside torch's fused and foreach AdamW, on the CPU.

python -m benchmarks.optim
python -m benchmarks.optim --threads 1 2 --markdown table.md
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kernels

import torch  # isort: skip
from torch import nn  # isort: skip

from fsdp_c.optim import FlatAdamW

MB = 1 << 20
STATE_NAMES = ("exp_avg", "exp_avg_sq")
COUNTED = """\
The time of one `step()` in microseconds, the least of many in turn with each other: torch's AdamW with `foreach=True`
and with `fused=True`, FlatAdamW, and memcpy on one thread for the bytes that a step has to read and write, once each
(half read, half written). 'MB' is the size of all parameters. "bf16, fp32 state" is `state_dtype=torch.float32`, which
torch has not.
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
    "ours / memcpy",
]


@dataclass(frozen=True)
class Setting:
    """Parameters of one dtype, their state of another, so many tensors of one size."""

    name: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    tensors: int
    mb: float

    def params(self) -> list[nn.Parameter]:
        numel = int(self.mb * MB) // self.dtype.itemsize // self.tensors
        params = [nn.Parameter(torch.randn(numel).to(self.dtype)) for _ in range(self.tensors)]
        for param in params:
            param.grad = torch.randn(numel).to(self.dtype)
        return params

    def moved(self) -> int:
        """Bytes: parameter and state read and written, gradient read."""
        numel = int(self.mb * MB) // self.dtype.itemsize
        return numel * (3 * self.dtype.itemsize + 2 * len(STATE_NAMES) * self.state_dtype.itemsize)


def settings(mb: list[float]) -> Iterator[Setting]:
    dtypes = {
        "fp32": (torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.bfloat16),
        "bf16, fp32 state": (torch.bfloat16, torch.float32),
    }
    for (name, (dtype, state_dtype)), size in itertools.product(dtypes.items(), mb):
        yield Setting(name, dtype, state_dtype, 1, size)
    for count in (100, 1000):
        yield Setting("fp32", torch.float32, torch.float32, count, 4)


def optimizers(setting: Setting) -> dict[str, torch.optim.Optimizer]:
    made: dict[str, torch.optim.Optimizer] = {
        "FlatAdamW": FlatAdamW(setting.params(), state_dtype=setting.state_dtype),
    }
    if setting.state_dtype == setting.dtype:
        made["fused"] = torch.optim.AdamW(setting.params(), fused=True)
        made["foreach"] = torch.optim.AdamW(setting.params(), foreach=True)
    return made


def measure(setting: Setting, seconds: float) -> dict[str, float]:
    """Least microseconds by heading."""
    made = optimizers(setting)
    calls: list[Callable[[], Any]] = [optimizer.step for optimizer in made.values()]
    calls.append(kernels.memcpy_of(setting.moved()))
    return dict(zip([*made, "memcpy"], kernels.least_times(calls, seconds), strict=True))


def cells(setting: Setting, times: dict[str, float]) -> list[str]:
    ours, fused = times["FlatAdamW"], times.get("fused")
    shown = [
        f"{times[name]:.0f}" if name in times else "" for name in ("foreach", "fused", "FlatAdamW", "memcpy")
    ]
    ratios = [f"{fused / ours:.2f}" if fused else "", f"{ours / times['memcpy']:.2f}"]
    return [setting.name, str(setting.tensors), f"{setting.mb:g}", *shown, *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=1.0, help="per setting")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    kernels.keep_freed_memory()
    title, about = f"# Steps of AdamW, {time.strftime('%Y-%m-%d')}", kernels.versions()
    lines = [title, "", COUNTED, f"{about}; load {os.getloadavg()[0]:.1f}."]
    print(*lines, sep="\n")
    for threads in args.threads:
        torch.set_num_threads(threads)
        heading = ["", f"## {threads} thread{'s' * (threads > 1)}", "", "| " + " | ".join(HEADINGS) + " |"]
        lines += [*heading, "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
        print(*lines[-5:], sep="\n")
        for setting in settings(args.mb):
            lines.append("| " + " | ".join(cells(setting, measure(setting, args.seconds))) + " |")
            print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
