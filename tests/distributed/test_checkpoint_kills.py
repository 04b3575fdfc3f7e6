"""kill -9 of ranks at random points of a save: the checkpoint is the old or the new one, and complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import loading
from tests.checkpoints import fill, loaded_version, model_of, plain, save_version
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.ranks import device, on_ranks

KILLS = 30


def save_on_and_on(rank: int, path: Path, first: int, report: int, background: bool) -> None:
    """Save version after version. Write each begin and end to the file descriptor ``report``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous-{first}", rank=rank, world_size=2)
    cpu = torch.device("cpu")  # a forked process has no GPU
    model = fsdp_c.FullyShardedDataParallel(plain(), use_orig_params=True, device_id=cpu)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    for version in range(first, first + 1000):
        fill(model, optimizer, version)
        os.write(report, f"begin {version}\n".encode())
        save_version(model, optimizer, path, version, background)
        os.write(report, f"done {version}\n".encode())


def started(rank: int, path: Path, first: int, background: bool) -> tuple[int, BinaryIO]:
    """Fork a rank and return its process id and the reading end of its pipe."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads warns; the threads are idle
        child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide gloo's messages about the dead peer
            save_on_and_on(rank, path, first, writing, background)
        finally:
            os._exit(1)
    os.close(writing)
    return child, os.fdopen(reading, "rb", buffering=0)


def killed(path: Path, first: int, rng: random.Random, background: bool) -> list[tuple[str, int]]:
    """Kill both ranks in one of the first saves, sometimes at slightly different times, and return rank 0's
    reports.
    """
    (one, told), (other, unread) = (started(rank, path, first, background) for rank in range(2))
    begun = told.read(1)  # the first save
    time.sleep(rng.uniform(0.0, 0.06))
    for process in rng.sample([one, other], 2):
        os.kill(process, signal.SIGKILL)
        time.sleep(rng.choice([0.0, 0.0, 0.005]))
    for process in (one, other):
        os.waitpid(process, 0)
    lines = (begun + told.read()).decode().splitlines()
    told.close(), unread.close()
    assert lines, "a rank failed before its first save"
    return [(line.split()[0], int(line.split()[1])) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("background", [False, True])
def test_ranks_killed_at_any_time_leave_the_old_checkpoint_or_the_new(
    tmp_path: Path, background: bool
) -> None:
    path = tmp_path / "ckpt"
    rng = random.Random(0)
    current, kept, partial = 0, 0, 0
    for trial in range(KILLS):
        if trial % 5 == 0:
            shutil.rmtree(path, ignore_errors=True)  # the next checkpoint is new, not a replacement
            current = 0
        told = killed(path, 1000 * trial + 1, rng, background)
        done = [version for what, version in told if what == "done"]
        begun = [version for what, version in told if what == "begin"]
        version = loaded_version(path) if (path / ".metadata").exists() else 0
        # the newest finished one, or the one in progress at the kill
        assert version in {max([current, *done]), max(begun)}
        kept += version < max(begun)
        partial += len(list(path.glob("fsdp_c-data-*"))) > (version > 0)
        current = version
    assert kept > KILLS // 10 and partial > KILLS // 10  # kills did hit saves
    for version in (current + 1, current + 2):
        save_version(*model_of(version), path, version, background=False)
        assert loaded_version(path) == version
    assert [entry.name for entry in tmp_path.iterdir() if "rendezvous" not in entry.name] == ["ckpt"]
    assert {entry.name.split("-")[0] for entry in path.iterdir()} <= {".metadata", "fsdp_c"}
    assert len(list(path.iterdir())) == 2


@on_ranks(2)
def test_ranks_that_found_different_checkpoints_begin_anew(rank: int) -> None:
    folder = folder_of_ranks()
    path, other = folder / "ckpt", folder / "other"
    original, reads = loading.read_checkpoint, []
    model = fsdp_c.FullyShardedDataParallel(plain(), use_orig_params=True, device_id=device())
    for version, target in ((1, path), (2, other)):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(version)
        checkpoint.save(model, None, target, extra={"version": version})

    def read(path: Path, **options: Any) -> Any:
        """Replace the checkpoint between the reads of the two ranks."""
        reads.append(path)
        if rank == 1 and len(reads) == 1:
            found = original(path, **options)
            (data,) = other.glob("fsdp_c-data-*")
            shutil.copytree(data, path / data.name)
            os.replace(other / ".metadata", path / ".metadata")
            return found
        while (other / ".metadata").exists():
            time.sleep(0.01)
        return original(path, **options)

    with mock.patch.object(loading, "read_checkpoint", read):
        found = checkpoint.load(model, None, path)
    assert found == {"version": 2} and len(reads) == 2
    assert all((param == 2).all() for param in model.parameters())
