"""Four threads build, step and drop their own units at once, while a fifth collects garbage all the time.

``python -m tests.faults.threads ROUNDS``. The interpreter switches threads as often as possible, so that C
code that holds a borrowed reference across a call, or relies on a GIL that torch has released, is interrupted
there by another thread.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.collectives import init_fake_group

SWITCH_INTERVAL_S = 1e-6
KINDS: list[dict[str, Any]] = [
    {"use_orig_params": True},
    {"use_orig_params": False},
    {"use_orig_params": True, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
]


def build(arguments: dict[str, Any]) -> FSDP:
    inner, outer = nn.Linear(5, 4), nn.Linear(4, 3)
    for module in (inner, outer):
        for param in module.parameters():
            nn.init.constant_(param, 0.5)
    arguments = {"device_id": torch.device("cpu"), **arguments}
    return FSDP(nn.Sequential(FSDP(inner, **arguments), outer), **arguments)


def results(arguments: dict[str, Any]) -> list[Tensor]:
    """Return loss and gradients of two steps, and the parameters from summon_full_params."""
    model = build(arguments)
    found = []
    for _ in range(2):
        loss = model(torch.ones(2, 5)).float().square().sum()
        loss.backward()
        found += [
            loss.detach(),
            *(param.grad.clone() for param in model.parameters() if param.grad is not None),
        ]
        model.zero_grad()
    with FSDP.summon_full_params(model):
        found += [param.detach().clone() for param in model.parameters()]
    return found


def wrong_rounds(kind: dict[str, Any], expected: list[Tensor], rounds: int) -> int:
    """Return the number of rounds with different results."""
    return sum(not all(map(torch.equal, results(kind), expected)) for _ in range(rounds))


def collect_until(done: threading.Event) -> None:
    while not done.is_set():
        gc.collect()


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    init_fake_group(rank=0, world_size=2)
    expected = [results(kind) for kind in KINDS]
    gc.collect()
    gc.freeze()  # exclude imported objects from collections
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    done = threading.Event()
    collector = threading.Thread(target=collect_until, args=(done,))
    collector.start()
    try:
        with ThreadPoolExecutor(len(KINDS)) as pool:
            wrong = list(pool.map(wrong_rounds, KINDS, expected, [rounds] * len(KINDS)))
    finally:
        done.set()
        collector.join()
    for _ in range(2):  # a freed root releases its units, which the second round collects
        gc.collect()
    units = sum(isinstance(one, (_C.Handle, _C.Unit, _C.Runtime)) for one in gc.get_objects())
    print(json.dumps({"wrong": wrong, "units": units, "live": _C.live_unsharded_nbytes()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
