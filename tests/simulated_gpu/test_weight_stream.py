"""iter_full_params by the model of time: all-gathers overlap with the caller's copies, in the memory of two
units.

The model has 32 layers on 8 ranks. The caller copies every parameter to the host.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.timeline import measure
from tests.processes import ROOT, output_of_python

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from fsdp_c import FullyShardedDataParallel as FSDP, iter_full_params
from fsdp_c.wrap import ModuleWrapPolicy
from benchmarks.timeline import measure
from benchmarks.timeline.measure import COMMUNICATION, COPY, busy, common, memory, nbytes_of, step, total

options = json.loads(sys.argv[1])
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8)
measure.host_is_free()
measure.set_costs(memory=1e6, least=2.0, pcie=options.pop("pcie"))
measure.set_wire(False, [(1.0, 10.0), (1e9, 10.0 + 1e5)])  # 10,000 bytes in a us
measure.set_wire(True, [(1.0, 10.0), (1e9, 10.0 + 1e5)])
width, layers = 256, 32
layer = lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
model = FSDP(
    nn.Sequential(*(layer() for _ in range(layers))),
    auto_wrap_policy=lambda module, recurse, **_: recurse or type(module) is nn.Sequential,
    device_id=torch.device("cuda", 0),
)
host = torch.empty(width * width, pin_memory=True)
lets_go = options.pop("lets_go")

def run():
    for name, value in iter_full_params(model, **options):
        host[: value.numel()].view(value.shape).copy_(value, non_blocking=True)
        if lets_go:
            del value

run()
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
with step() as taken:
    run()
gathers, copies = busy(taken.of(*COMMUNICATION)), busy(taken.of(COPY))
print(json.dumps({
    "time": taken.time, "gathers": total(gathers), "copies": total(copies), "count": len(taken.of(*COMMUNICATION)),
    "both": total(common(gathers, copies)), "nbytes": torch.cuda.max_memory_allocated() - before,
    "unit": sum(param.numel() for param in layer().parameters()) * 4, "left": torch.cuda.memory_allocated() - before,
}))
sys.stdout.flush(); os._exit(0)
"""


def measured(**options: Any) -> dict[str, float]:
    given = json.dumps({"lets_go": False, "pcie": 10_000.0} | options)
    said = output_of_python("-c", PROGRAM, given, cwd=ROOT, **measure.environment())
    found: dict[str, float] = json.loads(said.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("pcie", [5_000.0, 10_000.0, 20_000.0], ids=["slow copies", "alike", "slow gathers"])
def test_iter_full_params_overlaps_copies_and_all_gathers(pcie: float) -> None:
    taken = measured(pcie=pcie)
    assert taken["count"] == 32
    assert taken["time"] <= 1.1 * max(taken["gathers"], taken["copies"])
    assert taken["nbytes"] <= 2 * taken["unit"] * 1.01
    assert taken["left"] == 0


def test_iter_full_params_holds_two_parts_at_a_time() -> None:
    taken = measured(max_nbytes=300_000)
    assert taken["count"] == 256
    assert taken["time"] <= 1.1 * max(taken["gathers"], taken["copies"])
    assert taken["nbytes"] <= 2 * 300_000


def test_iter_full_params_holds_three_parts_if_the_loop_keeps_one() -> None:
    one = 256 * 256 * 4
    assert 2 * one < measured(max_nbytes=one)["nbytes"] <= 3 * one
    assert measured(max_nbytes=one, lets_go=True)["nbytes"] <= 2 * one
