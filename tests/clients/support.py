"""Helpers for the tests of all libraries: environment of a launched rank, shims, and unsharded reference."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

from tests.ranks import device_type

ROOT = Path(__file__).resolve().parents[2]
# fp32 on both sides, with sums in a different order
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
TIMEOUT_S = 180.0  # per body: the first one of a library still imports parts of it
ON_CPU = device_type() == "cpu"  # on GPUs the libraries need no shims


def require(*names: str) -> None:
    """Skip the calling module unless the libraries are installed. Unlike importorskip, nothing is imported
    here.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (pip install -r requirements/clients.txt)",
            allow_module_level=True,
        )


def launched(rank: int, world_size: int) -> None:
    """Set this process up as torchrun would, and install fsdp_c after the import of the libraries."""
    import fsdp_c

    torch.set_default_device(None)  # the library moves models and data
    os.environ.update(
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="none",
    )
    fsdp_c.install()


def environment(**settings: str) -> dict[str, str]:
    """Return the environment of a command that imports this tree, on this process' device."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | own | settings


@functools.cache
def gpus_that_are_cpus() -> None:
    """Let accelerate and the Trainer treat CPUs as distributed GPUs, to which they restrict FSDP.

    With ``sync_module_states`` they also query the GPU on which parameters are allocated.
    """
    if not ON_CPU:
        return
    from accelerate import FullyShardedDataParallelPlugin as Plugin
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import dataclasses

    set_device, post_init = PartialState.set_device, Plugin.__post_init__

    def set_device_and_type(state: PartialState) -> None:
        set_device(state)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    def post_init_with_gpu(plugin: Plugin) -> None:
        gpu = mock.patch.object(dataclasses, "is_cuda_available", lambda: True)
        with gpu, mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
            post_init(plugin)

    PartialState.set_device = set_device_and_type
    Plugin.__post_init__ = post_init_with_gpu


def assert_ours(model: nn.Module) -> None:
    """Assert that the library has built units of fsdp_c on this test's device, and none of torch's."""
    import fsdp_c

    units = [module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel"]
    assert units, "nothing was wrapped"
    assert all(type(unit).__module__.startswith("fsdp_c") for unit in units)
    assert all(unit.compute_device.type == device_type() for unit in units)
    assert sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel is fsdp_c.FullyShardedDataParallel


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict on every rank's CPU. Collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}


def assert_same_parameters(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal names, and values within TOLERANCE."""
    assert sorted(found) == sorted(expected), f"{sorted(set(found) ^ set(expected))} are on one side only"
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def train_reference(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    micro_batches: int = 1,
) -> list[float]:
    """Train the unsharded ``model`` on the batches of all ranks and return the losses by step.
    ``loss_of(model, micro batch)`` returns one loss.
    """
    losses = []
    for step in steps:
        total = 0.0
        for micro in range(micro_batches):
            loss = loss_of(model, step * micro_batches + micro) / micro_batches
            loss.backward()
            total += loss.item()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
