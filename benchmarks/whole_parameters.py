"""A step of Muon over sharded parameters on gloo ranks: by owners, by every rank alike, and FSDP2 on DTensors.

python -m benchmarks.whole_parameters
python -m benchmarks.whole_parameters --ranks 4 --width 256 --markdown table.md
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ranks import status, told_by_ranks
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import WholeParameters

PLAIN = "one rank, plain"
WAYS = ("WholeParameters", "every rank all", "FSDP2, DTensors", PLAIN)
COUNTED = ("WholeParameters", "every rank all", PLAIN)  # DTensors pass the counters by
COLUMNS = (
    "step ms",
    "times the plain step",
    "flops of a rank / equal share",
    "MiB sent",
    "optimizer +MiB",
)
TEXT = """\
{ranks} ranks on gloo, one thread each, {layers} layers of 4 matrices, width {width}: {mib:.0f} MiB of fp32 parameters.
Rank 0, the least of {steps} steps after the first; gradients are there. "every rank all": parameters and gradients
are gathered on each rank, which steps over all of them. "one rank, plain": the same parameters, not sharded, in one
process without others. "flops": of matrix products, of the rank with most, as torch counts them, over
the plain step's divided by the ranks. "MiB sent": by rank 0 in a step. "optimizer +MiB": the peak
of resident memory over what there was before the optimizer was made.
"""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(x)[..., : x.shape[-1]])
        return x + self.down(torch.relu(self.up(x)))


class Sent:
    """Counts what this rank hands to the collectives that both ways of fsdp_c use."""

    def __init__(self) -> None:
        self.nbytes = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def watched(call: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.nbytes += count(*args, **kwargs)
                return call(*args, **kwargs)

            return run

        others = dist.get_world_size() - 1
        counts: dict[str, Callable[..., int]] = {
            "all_to_all_single": lambda out, given, *_, **__: given.nbytes,
            "isend": lambda tensor, *_, **__: tensor.nbytes,
            "all_gather_into_tensor": lambda out, given, *_, **__: given.nbytes * others,
        }
        found = {name: getattr(dist, name) for name in counts}
        for name, count in counts.items():
            setattr(dist, name, watched(found[name], count))
        try:
            yield
        finally:
            for name, call in found.items():
                setattr(dist, name, call)


def stepper(way: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Callable[[], None]]]:
    """The model with gradients, and what makes its optimizer and returns its step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Layer(options.width) for _ in range(options.layers)))
    if way == "FSDP2, DTensors":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif way != PLAIN:
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    model(torch.randn(4, options.width)).square().mean().backward()
    if way == "WholeParameters":
        return model, lambda: WholeParameters(model, torch.optim.Muon, lr=1e-3).step
    if way != "every rank all":
        return model, lambda: torch.optim.Muon(model.parameters(), lr=1e-3).step
    return model, lambda: everywhere(model)


def everywhere(model: nn.Module) -> Callable[[], None]:
    """Muon over whole copies on each rank, of which its shards then take their part."""
    assert isinstance(model, FSDP)
    with FSDP.summon_full_params(model, with_grads=True):
        copies = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    optimizer = torch.optim.Muon(copies, lr=1e-3)

    def step() -> None:
        with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
            for own, param in zip(copies, model.parameters(), strict=True):
                own.grad = param.grad
            optimizer.step()
            for own, param in zip(copies, model.parameters(), strict=True):
                param.copy_(own)
                own.grad = None

    return step


def measure(rank: int, told: Any, way: str, options: argparse.Namespace) -> None:
    model, make = stepper(way, options)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step = make()
    sent, times = Sent(), []
    with sent.counting():
        for index in range(options.steps + 1):
            dist.barrier()
            sent.nbytes, start = 0, time.perf_counter()
            step()
            times += [time.perf_counter() - start] if index else []
    peak = status("VmHWM") - before
    with FlopCounterMode(display=False) as counted:
        step()
    flops = torch.tensor(counted.get_total_flops())
    dist.all_reduce(flops, dist.ReduceOp.MAX)
    if rank == 0:
        told.send((min(times) * 1e3, int(flops), sent.nbytes / 2**20, peak))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_parameters", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        way: told_by_ranks(measure, 1 if way == PLAIN else options.ranks, way, options) for way in WAYS
    }
    plain_ms, plain_flops = found[PLAIN][:2]
    lines = [f"| way | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for way, (step_ms, flops, sent, memory) in found.items():
        share = flops * (1 if way == PLAIN else options.ranks) / plain_flops
        counted = (f"{share:.2f}", f"{sent:.1f}") if way in COUNTED else ("", "")
        lines.append(
            f"| {way} | {step_ms:.0f} | {step_ms / plain_ms:.2f} | {' | '.join(counted)} | {memory:.0f} |"
        )
    mib = options.layers * 12 * options.width**2 * 4 / 2**20
    text = TEXT.format(**vars(options), mib=mib)
    page = (
        f"{text}\ntorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.\n\n"
        + "\n".join(lines)
    )
    print(page)
    if options.markdown:
        options.markdown.write_text(page + "\n")


if __name__ == "__main__":
    main()
