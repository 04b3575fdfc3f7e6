"""An optimizer that steps after the backward, and beside it (fsdp_c.optim.step_in_backward).

python -m benchmarks.step_in_backward                 # for real, on gloo ranks of this machine
python -m benchmarks.step_in_backward --offload       # with CPU offload on GPUs, by the model of time

For real: ms of forward, backward and step, the least of some rounds in which both ways alternate (and their
median). A rank computes with one thread, so the thread that steps gains where a core is idle.

By the model: benchmarks.timeline says when each unit's gradients have come to the host. There the thread steps
unit after unit, at the rate at which AdamW goes through its 28 bytes per element (--host-GB-per-s, of one
rank). Exposed is what is left of that when the backward is over.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import shown, told_by_ranks
from benchmarks.timeline_row import Row, in_a_process, machine_of

BYTES_PER_ELEMENT = 28  # fp32: parameter, gradient and two averages are read, all but the gradient written


# ---- for real


def build(width: int, layers: int) -> Any:
    from fsdp_c import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return FSDP(nn.Sequential(*(FSDP(block, **options) for block in blocks)), **options)


def body(rank: int, told: Any, width: int, layers: int, tokens: int, rounds: int) -> None:
    import torch.distributed as dist

    from fsdp_c.optim import step_in_backward

    torch.set_num_threads(1)
    models = [build(width, layers) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=1e-4, fused=True),
        step_in_backward(models[1], partial(torch.optim.AdamW, lr=1e-4, fused=True)),
    ]
    x = torch.randn(tokens, width)
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for way, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            dist.barrier()
            begin = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number:
                times[way].append(1e3 * (time.perf_counter() - begin))
    same = all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    if rank == 0:
        told.send((shown(times[0], 1), shown(times[1], 1), f"{min(times[1]) / min(times[0]):.2f}", str(same)))


def for_real(given: argparse.Namespace) -> None:
    print(
        "| ranks | width, layers, tokens | step after, ms | beside, ms | ratio | same bits |\n|---|---|---|---|---|---|"
    )
    for ranks in given.ranks:
        for tokens in given.tokens:
            told = told_by_ranks(body, ranks, given.width, given.layers, tokens, given.rounds)
            what = f"{given.width}, {given.layers}, {tokens}"
            print(f"| {ranks} | {what} | " + " | ".join(told or ("failed",)) + " |", flush=True)


# ---- by the model


def exposed_ms(arrivals_us: list[tuple[float, float]], backward_end_us: float) -> float:
    """``arrivals_us``: when each unit's gradients have come, and how long its step takes, in that order."""
    free = 0.0
    for came, takes in arrivals_us:
        free = max(free, came) + takes
    return max(0.0, free - backward_end_us) / 1e3


def by_the_model(given: argparse.Namespace) -> None:
    pcie = machine_of(given.machine)["gpu"]["pcie"]  # bytes per us
    with tempfile.TemporaryDirectory() as folder:
        row = Row("fsdp_c", given.model, given.machine, offload=True)
        result = in_a_process(row, spans=f"{folder}/spans")
        with open(f"{folder}/spans", "rb") as file:
            step = pickle.load(file)
    downloads = [span for span in step.spans if span.name == "copy_ to the host"]
    end = max(span.end for span in step.main)
    print(
        f"{given.model} on {given.machine}: {len(downloads)} units, {result.step_ms:.0f} ms until the last kernel\n"
    )
    print(
        "| GB/s of a rank | AdamW, ms | exposed after the backward | exposed beside it |\n|---|---|---|---|"
    )
    for rate in given.host_GB_per_s:
        takes = [(s.end - s.begin) * pcie / 4 * BYTES_PER_ELEMENT / (1e3 * rate) for s in downloads]
        arrivals = list(zip([span.end for span in downloads], takes, strict=True))
        last = max(0.0, max(span.end for span in downloads) - end) / 1e3
        print(
            f"| {rate:g} | {sum(takes) / 1e3:.0f} | {last + sum(takes) / 1e3:.0f} | {exposed_ms(arrivals, end):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offload", action="store_true", help="by the model of time")
    parser.add_argument("--model", default="6.7B")
    parser.add_argument("--machine", default="nvlink8")
    parser.add_argument("--host-GB-per-s", type=float, nargs="+", default=[25, 50, 100])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    (by_the_model if given.offload else for_real)(given)


if __name__ == "__main__":
    main()
