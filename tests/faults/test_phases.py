"""Progress of a rank (step, phase and unit) in errors of collectives, on SIGUSR1 and in torch's debug server."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import StateDictType

from fsdp_c import _C, checkpoint
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.tools import collective_errors, phases
from tests.collectives import ALL_GATHER, REDUCE_SCATTER
from tests.models import WIDTH
from tests.processes import run_python
from tests.ranks import on_ranks
from tests.training import sharded


def build() -> FSDP:
    return sharded(net={"blocks": 2})


def place() -> str:
    """Return phase and unit of this rank."""
    return _C.describe_progress().partition(": ")[2]


@on_ranks(2, label="faults")
def test_a_step_passes_through_the_phases_of_each_unit(rank: int) -> None:
    model, seen = build(), []

    def look(*_: object) -> None:
        seen.append(place())

    model.module.blocks[1].module.down.register_forward_pre_hook(look)
    model.module.head.register_forward_pre_hook(look)
    model.module.blocks[0].module.up.register_full_backward_hook(look)
    loss = model(torch.randn(3, WIDTH)).sum()
    look()
    steps = int(_C.describe_progress().split()[1].rstrip(":"))
    loss.backward()
    look()
    assert seen == [
        "is in the forward of blocks.1",
        "is in the forward of the root",
        "is between steps",
        "is in the backward of blocks.0",
        "is between steps",
    ]
    assert _C.describe_progress() == f"step {steps + 1}: is between steps"


WAITS = {ALL_GATHER: "all-gather", REDUCE_SCATTER: "reduction"}


@pytest.mark.parametrize("collective", WAITS)
@on_ranks(2, label="faults")
def test_a_wait_in_a_collective_is_a_phase_of_its_unit(rank: int, collective: str) -> None:
    model, seen, original = build(), [], getattr(dist, collective)

    class Done:
        """A finished work handle."""

        def wait(self) -> None:
            seen.append(place())

    def watched(*args: Any, **kwargs: Any) -> Done:
        original(*args, **kwargs)
        return Done()

    model(torch.randn(3, WIDTH)).sum().backward()
    with mock.patch.object(dist, collective, watched):
        model(torch.randn(3, WIDTH)).sum().backward()
    waits = rf"waits in the {WAITS[collective]}( for the backward)? of (blocks\.\d|the root)"
    assert len(seen) >= 3 and all(re.fullmatch(waits, one) for one in seen), seen


@on_ranks(2, label="faults")
def test_error_of_a_failed_collective_names_unit_and_phase(rank: int) -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("the peer is gone")

    model = build()
    model(torch.randn(3, WIDTH)).sum().backward()
    with mock.patch.object(dist, ALL_GATHER, lambda *_, **__: Lost()):
        with pytest.raises(RuntimeError, match="the peer is gone") as raised:
            model(torch.randn(3, WIDTH))
    with mock.patch.object(dist, REDUCE_SCATTER, side_effect=dist.DistBackendError("aborted")):
        with pytest.raises(
            dist.DistBackendError, match="aborted\\nrank .* waits in the reduction of Block at"
        ):
            model(torch.randn(3, WIDTH)).sum().backward()
    with mock.patch.object(dist, REDUCE_SCATTER, lambda *_, **__: Lost()):
        with pytest.raises(RuntimeError, match="waits in the reduction of Block at 'blocks.1'"):
            model(torch.randn(3, WIDTH)).sum().backward()
    model(torch.randn(3, WIDTH)).sum().backward()
    with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("reset by peer")):
        with pytest.raises(RuntimeError, match=f"reset by peer\\nrank {rank}: .* is clipping gradients"):
            model.clip_grad_norm_(1.0)
    text = f"rank {rank}, step 1: a collective failed or timed out while this rank waits in the all-gather of Net"
    assert text in str(raised.value)


def save(model: FSDP) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.state_dict()


def train(model: FSDP) -> None:
    model(torch.randn(3, WIDTH)).sum().backward()


OUT_OF_MEMORY = [  # name of the collective that runs out of memory, function, added text, remedy
    (ALL_GATHER, train, ", step 1: {}waits in the all-gather of Net", "fsdp_c.summary(model)"),
    (
        REDUCE_SCATTER,
        train,
        ", step 1: {}waits in the reduction of Block at 'blocks.1'",
        "fsdp_c.summary(model)",
    ),
    ("all_to_all_single", save, ": {}gathers Net and 2 units after it. ", "offload_to_cpu=True"),
]


@pytest.mark.parametrize(
    ("collective", "body", "added", "remedy"), OUT_OF_MEMORY, ids=["forward", "backward", "sharded"]
)
@on_ranks(2, label="faults")
def test_out_of_memory_names_rank_unit_and_remedy(
    rank: int, collective: str, body: Callable[[FSDP], None], added: str, remedy: str
) -> None:
    """The text is added once to torch's own error, which keeps its type and its beginning."""
    model = build()
    train(model)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with mock.patch.object(dist, collective, side_effect=full):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            body(model)
    first, second = str(raised.value).splitlines()
    assert raised.value is full and first == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert second.startswith(f"rank {rank}" + added.format("memory ran out while this rank ")), second
    assert remedy in second and "collective failed" not in second
    body(model)


ON_SIGNAL = """
import os, signal, sys
import fsdp_c
from torch import nn
import torch, torch.distributed as dist
from tests.collectives import init_fake_group
init_fake_group(3, 8)
if len(sys.argv) > 1:
    signal.signal(signal.SIGUSR1, lambda *_: print("the script's own handler"))
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = fsdp_c.FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    def forward(self, x):
        return self.inner(x)
model = fsdp_c.FullyShardedDataParallel(Named(), device_id=torch.device("cpu"))
model.module.inner.module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
model(torch.ones(2, 8)).sum().backward()
os.kill(os.getpid(), signal.SIGUSR1)
print("goes on")
"""


def test_sigusr1_prints_step_phase_and_unit_with_the_stack() -> None:
    done = run_python("-c", ON_SIGNAL)
    assert done.returncode == 0 and "goes on" in done.stdout, done.stderr
    assert "fsdp_c: rank 3, step 0: is in the forward of inner\n" in done.stderr
    assert "fsdp_c: rank 3, step 1: is between steps\n" in done.stderr
    assert "most recent call first" in done.stderr and 'File "<string>"' in done.stderr


def test_a_script_that_handles_sigusr1_keeps_its_handler() -> None:
    done = run_python("-c", ON_SIGNAL, "own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script's own handler"] * 2 + ["goes on"]
    assert "fsdp_c: rank" not in done.stderr


def test_torchs_debug_server_shows_progress() -> None:
    handlers = pytest.importorskip("torch._C._distributed_c10d")
    response = mock.Mock()
    with mock.patch.object(handlers, "_register_handler") as register:
        with mock.patch.object(dist, "get_rank", lambda: 0):
            phases.show.__wrapped__()
    ((name, handler), _) = register.call_args
    handler(None, response)
    assert name == "fsdp_c"
    response.set_content.assert_called_once_with(_C.describe_progress(), "text/plain")
    response.set_status.assert_called_once_with(200)


# ----------------------------------------------------------------- calls on one rank only


def open_full_params(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with FSDP.summon_full_params(model):
        pass


ALONE: dict[str, Callable[[FSDP, torch.optim.Optimizer, Path], object]] = {
    "is in state_dict()": lambda model, optimizer, folder: model.state_dict(),
    "is in optim_state_dict()": lambda model, optimizer, folder: FSDP.optim_state_dict(model, optimizer),
    "is in summon_full_params()": open_full_params,
    "is saving a checkpoint": lambda model, optimizer, folder: checkpoint.save(
        model, optimizer, folder / "saved"
    ),
}


@contextmanager
def warnings_into(path: Path) -> Iterator[None]:
    """Append warnings of waits longer than 0.1 s to a file that all ranks read."""
    handler = logging.FileHandler(path)
    phases.logger.addHandler(handler)
    try:
        with mock.patch.object(phases, "PATIENCE_S", 0.1):
            yield
    finally:
        phases.logger.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("what", ALONE)
@on_ranks(2, label="faults")
def test_a_rank_that_waits_alone_in_a_collective_call_is_warned_once(
    rank: int, tmp_path: Path, what: str
) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    dist.barrier()
    path = tmp_path / "warned"
    with warnings_into(path):
        if rank == 1:
            deadline = time.monotonic() + 60
            while not path.read_text() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.3)  # long enough for a second warning
        else:
            threads = threading.active_count()
            assert place() == "is between steps"
        ALONE[what](model, optimizer, tmp_path)
        lines = [line for line in path.read_text().splitlines() if line.startswith("rank 0")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"rank 0 {what} and has waited for other ranks for 0 s: all ranks")
    assert place() == "is between steps"
    if rank == 0:
        for _ in range(100):
            if threading.active_count() <= threads:
                break
            time.sleep(0.02)
        assert threading.active_count() <= threads


@on_ranks(2, label="faults")
def test_a_long_phase_without_a_wait_for_other_ranks_is_not_warned_of(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "warned"
    with warnings_into(path):
        with phases.enter(_C.PROGRESS_SAVE):
            time.sleep(0.5)
            with collective_errors.explained("waiting"):
                pass
            time.sleep(0.3)
        assert not path.read_text()


@on_ranks(2, label="faults")
def test_a_load_of_a_state_dict_is_a_phase() -> None:
    seen = []
    model = build()
    model(torch.ones(1, WIDTH))
    values = model.state_dict()
    model.module.register_load_state_dict_post_hook(lambda *_: seen.append(place()))
    model.load_state_dict(values)
    assert seen == ["is in load_state_dict()"]
