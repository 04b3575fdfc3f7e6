"""Background saves write the bytes of foreground saves while training continues, and keep their guarantees."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, writing
from tests.checkpoints import ExtraState, loaded_version
from tests.distributed.test_checkpoint import assert_same_tensors, folder_of_ranks
from tests.processes import ROOT, run_python
from tests.ranks import both_views, device, on_ranks

WIDTH = 640  # shards are larger than 1 MiB


class Counting(ExtraState):
    """A module with a buffer changed by its forward, and with extra state changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.own: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.own.append(int(x.shape[0]))
        return x


def made(seed: int = 1, use_orig_params: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    options = {"use_orig_params": use_orig_params, "device_id": device()}
    tied = nn.Linear(WIDTH, WIDTH)
    layers = [fsdp_c.FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), **options) for _ in range(2)]
    inner = nn.Sequential(tied, *layers, Counting(), nn.Linear(WIDTH, WIDTH))
    inner[-1].weight = tied.weight
    model = fsdp_c.FullyShardedDataParallel(inner, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator("cpu").manual_seed(seed + 1000 * dist.get_rank())
    loss = model(torch.randn(4, WIDTH, generator=generator, device="cpu").to(device())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of this rank's shards of all values."""
    state = checkpoint.optim_state(model, optimizer)["state"]
    found = checkpoint.model_state(model) | {
        f"{n}.{s}": v for n, own in state.items() for s, v in own.items()
    }
    return {
        name: getattr(value, "local", value).detach().clone().cpu()
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Delay all writes until the event is set."""
    may_write = threading.Event()
    write = writing.Writer.write

    def later(self: Any, *args: Any) -> Any:
        may_write.wait(60)
        return write(self, *args)

    with mock.patch.object(writing.Writer, "write", later):
        try:
            yield may_write
        finally:
            may_write.set()


@both_views
@on_ranks(2)
def test_what_is_saved_is_what_was_there_whatever_training_does_meanwhile(use_orig_params):
    path = folder_of_ranks() / "ckpt"
    (model, optimizer), unsaved = made(1, use_orig_params), made(1, use_orig_params)
    extra = {"losses": [step(model, optimizer, 0)]}
    losses = [step(*unsaved, seed) for seed in range(3)]
    expected = values(model, optimizer)
    with held_back() as may_write:
        handle = checkpoint.save(model, optimizer, path, extra=extra, background=True)
        for seed in (1, 2):
            extra["losses"].append(step(model, optimizer, seed))
        optimizer.param_groups[0]["lr"] = 7.0
        assert not handle.done() and not (path / ".metadata").exists()
        with pytest.raises(TimeoutError, match=f"saving {re.escape(str(path))} is not finished after 0.01 s"):
            handle.wait(0.01)
        may_write.set()
        handle.wait(60)
    assert handle.done() and extra["losses"] == losses
    assert_same_tensors(values(model, optimizer), values(*unsaved))
    model, optimizer = made(2, use_orig_params)
    found = checkpoint.load(model, optimizer, path)
    assert len(found["losses"]) == 1 and optimizer.param_groups[0]["lr"] == 0.01
    assert_same_tensors(values(model, optimizer), expected)
    assert model.module[3].own == [4]


@on_ranks(2)
def test_the_memory_of_the_copies_is_used_again():
    from fsdp_c.checkpoint.saving import _host_copies

    folder = folder_of_ranks()
    model, optimizer = made()
    step(model, optimizer, 0)
    _host_copies.memory = None  # an earlier test may have needed a larger buffer
    places = []
    for version in range(3):
        with torch.inference_mode(version == 0):
            checkpoint.save(model, optimizer, folder / str(version), background=True)
        places.append(_host_copies.memory.data_ptr())
    expected, (model, optimizer) = values(model, optimizer), made(2)
    checkpoint.load(model, optimizer, folder / "2")  # waits for the last save
    assert_same_tensors(values(model, optimizer), expected)
    own = {value.data_ptr(): value.nbytes for value in values(model, optimizer).values()}
    assert len({*places}) == 1
    assert sum(own.values()) // 2 < _host_copies.memory.nbytes <= 1.1 * sum(own.values())


# ----------------------------------------------------------------- failures


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save_alone(rank, background):
    path = folder_of_ranks() / "ckpt"
    model, optimizer = made()
    own = object() if rank == 0 else None
    checkpoint.save(model, optimizer, path, extra={"a": {"b": own}}, background=True)
    with pytest.raises(CheckpointError, match=r"failed on rank 0: extra.a.b: object cannot be saved"):
        checkpoint.save(model, optimizer, path, background=background)
    assert not path.exists()
    dist.barrier()
    checkpoint.save(model, optimizer, path, background=background).wait()
    checkpoint.load(model, optimizer, path)


@on_ranks(2)
def test_a_mistake_of_all_ranks_before_the_copy_is_raised_unchanged():
    path = folder_of_ranks() / "ckpt"
    model, optimizer = made()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    handle = checkpoint.save(model, other, path, background=True)
    with pytest.raises(
        ValueError, match="group 0 of the optimizer holds parameters that are not the model's"
    ):
        handle.wait()
    handle = checkpoint.save(model, optimizer, "s3://bucket/run", background=True)
    with pytest.raises(ValueError, match="is a URL"):
        handle.wait()


@on_ranks(2)
def test_a_folder_that_is_removed_meanwhile_is_an_error_and_the_next_save_makes_it(rank):
    path = folder_of_ranks() / "run" / "ckpt"
    model, optimizer = made()
    dist.barrier()
    with held_back() as may_write:
        handle = checkpoint.save(model, optimizer, path, background=True)
        while rank == 0 and not list(path.glob("fsdp_c-data-*")):
            time.sleep(0.01)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path.parent)
        dist.barrier()
        may_write.set()
        with pytest.raises(CheckpointError, match="failed on rank [01]: FileNotFoundError"):
            handle.wait(60)
    checkpoint.save(model, optimizer, path, background=True).wait()
    checkpoint.load(model, optimizer, path)


# ----------------------------------------------------------------- how a process ends

SCRIPT = """
import errno, os, signal, sys, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import writing
from tests.checkpoints import fill

rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
model = fsdp_c.FullyShardedDataParallel(torch.nn.Linear(640, 640), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 640)).sum().backward()
optimizer.step()
fill(model, optimizer, 1)
checkpoint.save(model, optimizer, f"{folder}/ckpt", extra={"version": 1})
write = writing.Writer._write

def end_both():
    while not all(os.path.exists(f"{folder}/writing-{each}") for each in range(2)):
        time.sleep(0.01)
    os.kill(os.getpid(), int(sys.argv[4]))

def slow(self, *args):
    result = write(self, *args)
    open(f"{folder}/writing-{rank}", "w").close()
    if what == "foreground":
        end_both()
    time.sleep(60 if what in ("signal", "_exit") else 1)  # longer than this process lives
    if what == "full" and rank == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return result

writing.Writer._write = slow
fill(model, optimizer, 2)
checkpoint.save(model, optimizer, f"{folder}/ckpt", extra={"version": 2}, background=what != "foreground")
fill(model, optimizer, 3)
if what == "exception":
    raise RuntimeError("in the training loop")
if what == "destroy":
    dist.destroy_process_group()
if what == "sys.exit":
    sys.exit(3)
if what == "signal":
    end_both()
if what == "_exit":
    os._exit(4)
"""
ENDS = {  # end of a rank: (its exit status, the checkpoint left)
    "exit": (0, 2),
    "destroy": (0, 2),
    "sys.exit": (3, 2),
    "exception": (1, 2),
    "_exit": (4, 1),
    "full": (0, 1),
    f"signal {signal.SIGTERM:d}": (-signal.SIGTERM, 1),
    f"signal {signal.SIGKILL:d}": (-signal.SIGKILL, 1),
    f"foreground {signal.SIGKILL:d}": (-signal.SIGKILL, 1),
}


def ended(folder: Path, how: str) -> list[tuple[int, str]]:
    """Return exit status and error output of both ranks."""
    environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> tuple[int, str]:
        done = run_python("-c", SCRIPT, str(rank), folder, *how.split(), timeout_s=200, **environment)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(run, range(2))]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("how", ENDS)
def test_an_end_waits_for_the_save_or_leaves_the_old_checkpoint(tmp_path: Path, how: str) -> None:
    status, version = ENDS[how]
    for code, said in ended(tmp_path, how):
        assert code == status, said
        assert "terminate called" not in said
        assert ("No space left on device" in said) == (how == "full"), said
        assert ("failed on rank 1: OSError" in said) == (how == "full"), said
    model = nn.Linear(640, 640)
    assert loaded_version(tmp_path / "ckpt", model) == version
    checkpoint.save(model, None, tmp_path / "ckpt")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".ckpt")]
    assert len(list((tmp_path / "ckpt").iterdir())) == 2


@pytest.mark.parametrize("form", ["ShardedTensor", "DTensor", "model_state"])
@on_ranks(2)
def test_dcp_saves_a_copy_asynchronously_or_says_what_to_pass(world_size, form):
    path = folder_of_ranks() / "ckpt"
    own = dist.new_group(backend="gloo")
    mesh = dist.init_device_mesh(device().type, (world_size,)) if form == "DTensor" else None
    model = fsdp_c.FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=device(), device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    expected = values(model, optimizer)
    if form == "model_state":
        parts = {"model": checkpoint.model_state(model), "optim": checkpoint.optim_state(model, optimizer)}
    else:
        with fsdp_c.FullyShardedDataParallel.state_dict_type(model, fsdp_c.StateDictType.SHARDED_STATE_DICT):
            parts = {"model": model.state_dict(), "optim": model.optim_state_dict(model, optimizer)}
    if form == "ShardedTensor":
        words = r"async_save cannot copy it: wrap the model with device_mesh=\.\.\., "
        with pytest.raises(RuntimeError, match=words):
            dcp.async_save(parts, checkpoint_id=path, process_group=own).result()
        return
    future = dcp.async_save(parts, checkpoint_id=path, process_group=own)
    step(model, optimizer, 1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)
    future.result()
    dist.barrier()
    checkpoint.load(model, optimizer, path)
    assert_same_tensors(values(model, optimizer), expected)
