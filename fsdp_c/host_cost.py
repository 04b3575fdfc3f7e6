"""What a unit costs this machine's host in a training step, measured.

python -m fsdp_c.host_cost

Units of tiny linear layers are stepped on the CPU, for two depths and two numbers of parameters. What is
timed is all that the host does for a unit: its work in fsdp_c, and the operators of its layers, forward and
backward. These stand for the launches of a GPU's kernels, which may take the host more or less. Collectives
cost what passing through torch costs: nothing is sent.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_c.tools.host_bound import HostCost as HostCost
from fsdp_c.wrap import ModuleWrapPolicy

WORLD_SIZE = 8  # ranks that are imagined
DEPTHS = (4, 12)
LAYERS = (1, 6)  # of a unit; each has two parameters
WIDTH = 8
STEPS = 40
PARAMS = 2  # of a layer


def measure() -> HostCost:
    """Run ``python -m fsdp_c.host_cost`` in its own process, some seconds. RuntimeError where that fails."""
    command = [sys.executable, "-m", "fsdp_c.host_cost", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return HostCost(*json.loads(done.stdout.splitlines()[-1]))


class _Unit(nn.Sequential):
    """What is wrapped."""


def _step_us(depth: int, layers: int) -> float:
    """The shortest of some steps."""
    units = (_Unit(*(nn.Linear(WIDTH, WIDTH, device="cpu") for _ in range(layers))) for _ in range(depth))
    policy = ModuleWrapPolicy({_Unit})
    device = torch.device("cpu")
    model = FullyShardedDataParallel(
        nn.Sequential(*units), auto_wrap_policy=policy, device_id=device, use_orig_params=True
    )
    batch, times = torch.randn(2, WIDTH, device=device), []
    gc.collect()
    for _ in range(STEPS):
        start = time.perf_counter()
        model(batch).sum().backward()
        for param in model.parameters():
            param.grad = None
        times.append(1e6 * (time.perf_counter() - start))
    return min(times)


def _unit_us(layers: int) -> float:
    """What a further unit adds to a step."""
    few, many = (_step_us(depth, layers) for depth in DEPTHS)
    return (many - few) / (DEPTHS[1] - DEPTHS[0])


def _measure_here() -> HostCost:
    """In a process without a process group of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    gc.disable()
    few, many = (_unit_us(layers) for layers in LAYERS)
    param_us = max(0.0, (many - few) / (PARAMS * (LAYERS[1] - LAYERS[0])))
    dist.destroy_process_group()
    return HostCost(max(few - PARAMS * LAYERS[0] * param_us, 1.0), param_us)


def main() -> None:
    """Print what is measured, as JSON for ``measure`` or as a line to read."""
    parser = argparse.ArgumentParser(
        "python -m fsdp_c.host_cost", description="Measure a unit's cost, some seconds."
    )
    parser.add_argument("--json", action="store_true", help="print numbers alone (default: a line to read)")
    as_json = parser.parse_args().json
    warnings.simplefilter("ignore")
    cost = _measure_here()
    if as_json:
        print(json.dumps(cost))
    else:
        print(
            f"a unit takes {cost.unit_us:.0f} us of the host in a step, and {cost.param_us:.1f} us per "
            "parameter"
        )
        print(f"as an argument of python -m fsdp_c plan: --host-us {cost.unit_us:.0f} {cost.param_us:.1f}")


if __name__ == "__main__":
    main()
