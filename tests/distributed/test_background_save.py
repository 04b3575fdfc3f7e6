"""Saves in the background: the bytes of the foreground, whatever training does meanwhile, and its
promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import writing
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.ranks import device, on_ranks

WIDTH = 640  # shards above 1 MiB
ROOT = Path(__file__).resolve().parents[2]


class Counting(nn.Module):
    """A buffer that a forward changes, and extra state that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(int(x.shape[0]))
        return x

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = list(state["seen"])


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
    generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    loss = model(torch.randn(4, WIDTH, generator=generator).to(device())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of everything."""
    state = checkpoint.optim_state(model, optimizer)["state"]
    found = checkpoint.model_state(model) | {
        f"{n}.{s}": v for n, own in state.items() for s, v in own.items()
    }
    return {
        name: getattr(value, "local", value).detach().clone().cpu()
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    may_write = threading.Event()
    write = writing.Writer.write

    def later(self: Any, plan: Any) -> Any:
        may_write.wait(60)
        return write(self, plan)

    with mock.patch.object(writing.Writer, "write", later):
        try:
            yield may_write
        finally:
            may_write.set()


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_what_is_saved_is_what_was_there_whatever_training_does_meanwhile(rank, world_size, use_orig_params):
    path = folder_of_ranks() / "ckpt"
    model, optimizer = made(1, use_orig_params)
    extra = {"losses": [step(model, optimizer, 0)]}
    expected = values(model, optimizer)
    with held_back() as may_write:
        handle = checkpoint.save(model, optimizer, path, extra=extra, background=True)
        for seed in (1, 2):
            extra["losses"].append(step(model, optimizer, seed))
        optimizer.param_groups[0]["lr"] = 7.0
        assert not handle.done() and not (path / ".metadata").exists()
        with pytest.raises(TimeoutError, match=f"saving {path} is not over after 0.01 s"):
            handle.wait(0.01)
        may_write.set()
        handle.wait(60)
    assert handle.done()
    assert any(not torch.equal(value, expected[name]) for name, value in values(model, optimizer).items())
    model, optimizer = made(2, use_orig_params)
    found = checkpoint.load(model, optimizer, path)
    assert len(found["losses"]) == 1 and optimizer.param_groups[0]["lr"] == 0.01
    assert_same(values(model, optimizer), expected)
    assert model.module[3].seen == [4]


@on_ranks(2)
def test_files_are_those_of_a_save_in_the_foreground(rank, world_size):
    folder = folder_of_ranks()
    model, optimizer = made()
    step(model, optimizer, 0)
    checkpoint.save(model, optimizer, folder / "foreground", extra={"a": torch.arange(5)})
    checkpoint.save(
        model, optimizer, folder / "background", extra={"a": torch.arange(5)}, background=True
    ).wait()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (folder / "background" / name).read_bytes() == (folder / "foreground" / name).read_bytes()


@on_ranks(2)
def test_losses_and_parameters_are_those_of_training_without_saves(rank, world_size):
    path = folder_of_ranks() / "ckpt"
    runs = []
    for saves in (False, True):
        model, optimizer = made()
        losses = []
        for seed in range(5):
            losses.append(step(model, optimizer, seed))
            if saves:
                checkpoint.save(model, optimizer, path, background=True)
        runs.append((losses, values(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    model, optimizer = made(2)
    checkpoint.load(model, optimizer, path)  # waits for the last save
    assert_same(values(model, optimizer), runs[1][1])


@on_ranks(2)
def test_the_memory_of_the_copies_is_used_again(rank, world_size):
    from fsdp_c.checkpoint.saving import _host_copies

    folder = folder_of_ranks()
    model, optimizer = made()
    step(model, optimizer, 0)
    places = []
    for version in range(3):
        checkpoint.save(model, optimizer, folder / str(version), background=True)
        places.append(_host_copies.memory.data_ptr())
    checkpoint.save(model, optimizer, folder / "last")
    own = {value.data_ptr(): value.nbytes for value in values(model, optimizer).values()}
    assert len({*places}) == 1
    assert sum(own.values()) // 2 < _host_copies.memory.nbytes <= 1.1 * sum(own.values())
