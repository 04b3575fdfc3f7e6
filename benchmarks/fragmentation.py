"""Memory that torch's allocator reserves over steps of changing lengths: fsdp_c beside FSDP1 and FSDP2.

``python -m benchmarks.fragmentation`` on a GPU, or ``python -m tests.real_cuda -m benchmarks.fragmentation``
without one, where torch's allocator is the real one as well. One process is rank 0 of four whose collectives
send nothing: memory is taken and given back as with others. Each library gets the same lengths, in a process
of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LIBRARIES = ("FSDP1", "FSDP2", "fsdp_c")
SETTINGS = {"default": "", "expandable segments": "expandable_segments:True"}
MODELS = {"large activations": (256, 2048), "large parameters": (512, 512)}  # width, and the longest sequence
LAYERS, WORLD_SIZE = 5, 4


class Layer(nn.Module):
    """Parameters and activations of two linear layers, and no products, which take long without a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(4 * width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu((x * self.up.mean()).repeat(1, 4))
        return x + wide[:, : x.shape[1]] * self.down.mean()


def wrapped(library: str, width: int) -> nn.Module:
    model = nn.Sequential(*(Layer(width) for _ in range(LAYERS)))
    if library == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    import torch.distributed.fsdp as fsdp1
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import fsdp_c

    fsdp: Any = fsdp1.FullyShardedDataParallel if library == "FSDP1" else fsdp_c.FullyShardedDataParallel
    return fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True, device_id=0)


def measure(library: str, width: int, longest: int, steps: int) -> None:
    """The numbers of one row."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    model, lengths = wrapped(library, width), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        model(torch.empty(lengths.randint(8, longest), width, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    allocated, reserved = (stats[f"{what}_bytes.all.peak"] for what in ("allocated", "reserved"))
    sizes = f"{allocated / 2**20:.1f} | {reserved / 2**20:.1f} | {100 * (1 - allocated / reserved):.0f} %"
    print(f"{sizes} | {stats['num_device_alloc']} | {stats['num_alloc_retries']}", flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fragmentation")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--one", nargs=2, help="the numbers of one library and model, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        library, model = arguments.one
        measure(library, *MODELS[model], arguments.steps)
    print("| model | allocator | library | allocated, MiB | reserved, MiB | unused | cudaMalloc | retries |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for model, setting, library in itertools.product(MODELS, SETTINGS, LIBRARIES):
        command = [sys.executable, "-m", "benchmarks.fragmentation", "--steps", str(arguments.steps)]
        environment = os.environ | {"PYTORCH_ALLOC_CONF": SETTINGS[setting]}
        command += ["--one", library, model]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        print(f"| {model} | {setting} | {library} | {done.stdout.splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
