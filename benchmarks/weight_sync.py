"""Copies of all full parameters on rank 0 into the memory of an inference engine: iter_full_params on gloo
ranks, compared with summon_full_params, full state dicts and FSDP2's full_tensor().

python -m benchmarks.weight_sync
python -m benchmarks.weight_sync --layers 4 --times 2 --markdown table.md
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard

from benchmarks.common import fsdp_class
from benchmarks.ranks import shown, status, told_by_ranks

Named = Iterable[tuple[str, Tensor]]
COLUMNS = ("s", "rank 0's CPU s", "peak of rank 0, +MiB", "peak of rank 1, +MiB")
TEXT = """\
{ranks} ranks on gloo, {mib} MiB of fp32 parameters: {layers} units of {tensors} matrices of {side} x {side}. Each rank
that receives tensors copies them into touched memory: only rank 0 for "rank 0", otherwise all ranks. Cells show the
least of {times} times after a first, and the median in brackets. "s": time until all ranks are done; "CPU": CPU time of
all threads of rank 0's process; "peak": growth of resident memory, gloo's own included. malloc returns freed blocks of
a MiB and more at once (MALLOC_MMAP_THRESHOLD_).
"""


def summoned(model: Any, rank0_only: bool) -> Iterator[tuple[str, Tensor]]:
    fsdp = type(model)
    with fsdp.summon_full_params(model, writeback=False, rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            yield from model.named_parameters()


def state_dict(model: Any, rank0_only: bool) -> Named:
    fsdp = type(model)
    config = FullStateDictConfig(rank0_only=rank0_only, offload_to_cpu=rank0_only)
    with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state: dict[str, Tensor] = model.state_dict()
    return state.items()


def full_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.state_dict().items():
        yield name, param.full_tensor()


def streamed(**options: Any) -> Callable[[Any], Named]:
    from fsdp_c import iter_full_params

    return lambda model: iter_full_params(model, **options)


def ways(args: argparse.Namespace) -> dict[str, tuple[str, Callable[[Any], Named]]]:
    """Return for each way the implementation that wraps the model and the function that yields its
    parameters.
    """
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    return {
        "iter_full_params": ("fsdp_c", streamed()),
        "iter_full_params, bfloat16": ("fsdp_c", streamed(**half)),
        "iter_full_params, rank 0": ("fsdp_c", streamed(rank0_only=True)),
        "iter_full_params, rank 0, bfloat16": ("fsdp_c", streamed(rank0_only=True, **half)),
        "summon_full_params": ("fsdp_c", lambda model: summoned(model, False)),
        "summon_full_params, rank 0": ("fsdp_c", lambda model: summoned(model, True)),
        "full state dict": ("fsdp_c", lambda model: state_dict(model, False)),
        "full state dict, rank 0": ("fsdp_c", lambda model: state_dict(model, True)),
        "FSDP1 summon_full_params": ("FSDP1", lambda model: summoned(model, False)),
        "FSDP2 full_tensor()": ("FSDP2", full_tensors),
    }


def build(whose: str, args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(*(nn.Linear(args.side, args.side, bias=False) for _ in range(args.tensors)))
        for _ in range(args.layers)
    ]
    if whose == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (args.ranks,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(nn.Sequential(*layers), mesh=mesh)
    fsdp = fsdp_class("torch.fsdp1" if whose == "FSDP1" else whose)
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return fsdp(nn.Sequential(*(fsdp(layer, **options) for layer in layers)), **options)


def taken_by(come: Callable[[Any], Named], model: Any, memory: dict[str, Tensor]) -> tuple[float, float]:
    """Return the wall time and the CPU time of this process, in seconds."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    for name, value in come(model):
        memory[name.replace("_fsdp_wrapped_module.", "")].copy_(value.detach())
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - used


def rank_body(rank: int, told: Any, way: str, args: argparse.Namespace) -> None:
    whose, come = ways(args)[way]
    model = build(whose, args)
    names = [f"{layer}.{one}.weight" for layer in range(args.layers) for one in range(args.tensors)]
    dtype = torch.bfloat16 if "bfloat16" in way else torch.float32
    memory = {name: torch.ones(args.side, args.side, dtype=dtype) for name in names}
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    taken = [taken_by(come, model, memory) for _ in range(args.times + 1)][1:]
    peaks = [torch.zeros(1) for _ in range(args.ranks)]
    dist.all_gather(peaks, torch.tensor([status("VmHWM") - before]))
    if rank == 0:
        assert all(value.ne(1).any() for value in memory.values())
        times = [shown(list(each), 2) for each in zip(*taken, strict=True)]
        told.send((*times, *(f"{float(peak):.0f}" for peak in peaks[:2])))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tensors", type=int, default=8, help="square matrices per layer")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--ways", nargs="*", help="names as in the table (default: all)")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    mib = args.layers * args.tensors * args.side**2 / 2**18
    text = TEXT.format(**vars(args), mib=f"{mib:g}")
    about = f"torch {torch.__version__}, CPython {platform.python_version()}, {os.cpu_count()} processors; "
    lines = [f"| | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for way in args.ways or ways(args):
        row = told_by_ranks(rank_body, args.ranks, way, args) or ("failed",) * len(COLUMNS)
        lines.append(f"| {way} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    table = "\n".join([text, f"{about}load {os.getloadavg()[0]:.1f}\n", *lines])
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
