"""A step of Muon on sharded parameters on gloo ranks: by owner ranks, by every rank redundantly, and by FSDP2
on DTensors.

python -m benchmarks.whole_parameters
python -m benchmarks.whole_parameters --ranks 4 --width 256 --markdown table.md
python -m benchmarks.whole_parameters --timeline 6.7B nvlink8 ib512  # on machines that are not there, by a model
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
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
COUNTED = ("WholeParameters", "every rank all", PLAIN)  # collectives of DTensors bypass the counters
COLUMNS = (
    "step ms",
    "times the plain step",
    "flops of a rank / equal share",
    "MiB sent",
    "optimizer +MiB",
)
TEXT = """\
{ranks} ranks on gloo, one thread each, {layers} layers of 4 matrices, width {width}: {mib:.0f} MiB of fp32 parameters.
Numbers are of rank 0, the least of {steps} steps after the first; gradients are computed before. "every rank all": each
rank all-gathers parameters and gradients and steps all of them. "one rank, plain": the same parameters, unsharded, in
one process without peers. "flops": matrix products of the rank with most of them, as counted by torch, divided by an
equal share of the plain step's. "MiB sent": by rank 0 in a step. "optimizer +MiB": peak growth of resident memory since
the creation of the optimizer.
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
    """Counts the bytes that this rank passes to the collectives used by both ways of fsdp_c."""

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
    """Return the model with gradients, and a function that creates the optimizer and returns its step."""
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
    """Run Muon on full copies of the parameters on each rank, then copy this rank's shards out of them."""
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


# ---- modelled machines

MODELLED = """\
A step of Muon over the blocks' matrices and AdamW over the rest, in fp32, by the model of time (docs/testing.md), at no
cost of the host. Nothing is computed, and this process is the rank with most of Muon's work. "slower": the longer of
computation and transfers. "every rank all": the whole computation, and an all-gather of gradients and parameters of
each block, with perfect overlap. The two small all-reduces by which ranks agree are not included.
"""


def modelled(model_name: str, machine_name: str) -> dict[str, float]:
    """Simulate the step with the model of time. Runs in a process of the simulated GPU."""
    import torch._meta_registrations  # shapes of operators registered in Python only

    from benchmarks.timeline import measure
    from benchmarks.timeline.models import build
    from benchmarks.timeline.row import Row, machine_of, set_machine
    from benchmarks.timeline.shapes import MODELS
    from fsdp_c.optim import whole_parameters

    machine, shape = machine_of(machine_name), MODELS[model_name]
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=machine["world_size"])
    set_machine(machine)
    measure.host_is_free()
    model, parameters = build(Row("fsdp_c", model_name, machine_name), shape, shape.sequence, machine)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    choose = whole_parameters._choose_owners

    def give_most_to_rank_0(wholes: Any) -> None:
        choose(wholes)
        costs: dict[tuple[int, int], int] = {}
        for whole in wholes:
            if is_for_muon(whole.name, whole.held):
                costs[whole.owner] = costs.get(whole.owner, 0) + whole.cost
        most = max(costs, key=lambda owner: costs[owner])
        for whole in wholes:
            whole.owner = {most: (0, 0), (0, 0): most}.get(whole.owner, whole.owner)

    # exchanged values are undefined here, so set the owners
    whole_parameters._choose_owners = give_most_to_rank_0
    whole_parameters._agree_on_gradients = lambda wholes, _: (wholes, False)
    whole_parameters._raise_everywhere = lambda *_: None
    optimizer = WholeParameters(model, muon_and_adamw)
    sent = Sent()
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with sent.counting(), measure.step() as taken:
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    del optimizer

    block = build(Row("alone", model_name, machine_name), shape, shape.sequence, machine)[0].blocks[0].float()
    named = [(f"blocks.{name}", param) for name, param in block.named_parameters()]
    for _, param in named:
        param.grad = torch.empty_like(param)
    inner = muon_and_adamw(named)
    nbytes = sum(param.nbytes for _, param in named)
    whole = torch.empty(nbytes // 4, device="cuda")
    shard = torch.empty(len(whole) // machine["world_size"], device="cuda")
    for _ in range(2):
        with measure.step() as of_all:
            for each in inner:
                each.step()
    with measure.step() as gathered:
        dist.all_gather_into_tensor(whole[: len(shard) * machine["world_size"]], shard)
    blocks = len(list(model.module.blocks))
    return {
        "time": taken.time / 1e3,
        "compute": taken.compute / 1e3,
        "moves": taken.communication / 1e3,
        "sent": sent.nbytes / 2**20,
        "peak": peak / 2**20,
        "all compute": of_all.compute * blocks / 1e3,
        "all moves": gathered.time * 2 * blocks / 1e3,
        "all sent": 2 * shard.nbytes * (machine["world_size"] - 1) * blocks / 2**20,
    }


def is_for_muon(name: str, param: Tensor) -> bool:
    return param.dim() == 2 and "blocks" in name


def muon_and_adamw(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    matrices = [param for name, param in named if is_for_muon(name, param)]
    others = [param for name, param in named if not is_for_muon(name, param)]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, foreach=True)]


def modelled_page(model_name: str, machines: list[str]) -> str:
    from benchmarks.timeline import measure

    heads = ("step ms", "computation", "movement", "/ slower", "MiB sent", "peak +MiB")
    alike = ("every rank all: ms at best", "computation", "movement", "MiB sent")
    columns = (*heads, *alike)
    lines = [f"| {model_name} on | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for machine in machines:
        command = [sys.executable, "-m", "benchmarks.whole_parameters", "--modelled", model_name, machine]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | measure.environment(160)
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found = json.loads(done.stdout.splitlines()[-1])
        slower = max(found["compute"], found["moves"])
        cells = [f"{found[key]:.1f}" for key in ("time", "compute", "moves")]
        cells += [f"{found['time'] / slower:.2f}", f"{found['sent']:.0f}", f"{found['peak']:.0f}"]
        at_best = max(found["all compute"], found["all moves"])
        cells += [f"{each:.1f}" for each in (at_best, found["all compute"], found["all moves"])]
        cells.append(f"{found['all sent']:.0f}")
        lines.append(f"| {machine} | {' | '.join(cells)} |")
    return MODELLED + "\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_parameters", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--timeline", nargs="+", metavar=("MODEL", "MACHINE"))
    parser.add_argument("--modelled", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.modelled:
        print(json.dumps(modelled(*options.modelled)), flush=True)
        os._exit(0)
    if options.timeline:
        print(modelled_page(options.timeline[0], options.timeline[1:]))
        return
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
