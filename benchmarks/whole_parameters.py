"""A step of Muon over sharded parameters on gloo ranks: by owners, by every rank alike, and FSDP2 on DTensors.

python -m benchmarks.whole_parameters
python -m benchmarks.whole_parameters --ranks 4 --width 256 --markdown table.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import WholeParameters

WAYS = ("WholeParameters", "every rank all", "FSDP2, DTensors", "one rank, plain")
COLUMNS = (
    "step ms",
    "times the plain step",
    "products of a rank / equal share",
    "MiB sent",
    "optimizer +MiB",
)
TEXT = """\
{ranks} ranks on gloo, one thread each, {layers} layers of 4 matrices, width {width}: {mib:.0f} MiB of fp32 parameters.
Rank 0, the least of {steps} steps after the first; gradients are there. "every rank all": parameters and gradients
are gathered on each rank, which steps over all of them. "one rank, plain": the same parameters, not sharded, in one
process without others. "MiB sent": by rank 0 in a step, where fsdp_c or the benchmark sends. "optimizer +MiB": the peak
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


def status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


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
    warnings.simplefilter("ignore")
    if way == "FSDP2, DTensors":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif way != "one rank, plain":
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


def measure(rank: int, ranks: int, way: str, options: argparse.Namespace, store: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
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
    share = 1.0
    if way == "WholeParameters":
        costs = [0] * ranks
        for whole in step.__self__._wholes:  # type: ignore[attr-defined]
            costs[whole.owner[0]] += whole.cost
        share = max(costs) * ranks / sum(costs)
    elif ranks > 1:
        share = float(ranks)
    if rank == 0:
        counted = f"{sent.nbytes / 2**20:.1f}" if way in WAYS[:2] else ""
        pipe.send((min(times) * 1e3, share, counted, status("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def run(way: str, options: argparse.Namespace) -> tuple[float, float, str, float]:
    context = multiprocessing.get_context("spawn")
    ranks = 1 if way == "one rank, plain" else options.ranks
    with tempfile.TemporaryDirectory() as folder:
        receiving, sending = context.Pipe(False)
        target = functools.partial(
            measure, ranks=ranks, way=way, options=options, store=f"{folder}/store", pipe=sending
        )
        processes = [context.Process(target=target, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{way} failed")
        found: tuple[float, float, str, float] = receiving.recv()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_parameters", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found = {way: run(way, options) for way in WAYS}
    plain = found["one rank, plain"][0]
    lines = [f"| way | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for way, (step_ms, share, sent, memory) in found.items():
        lines.append(
            f"| {way} | {step_ms:.0f} | {step_ms / plain:.2f} | {share:.2f} | {sent} | {memory:.0f} |"
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
