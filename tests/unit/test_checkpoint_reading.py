"""Threads of a load: the reported error, tensors that share memory, and the bytes in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, storage
from fsdp_c.checkpoint.contents import TensorEntry
from fsdp_c.checkpoint.storage import read_checkpoint

LAYERS, SIDE = 8, 64


@pytest.fixture(autouse=True)
def jobs_of_one_tensor() -> Iterator[None]:
    with mock.patch.multiple(storage, reading_threads=lambda: 3, _JOB_NBYTES=1):
        yield


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, value + number)
    return model


def saved(path: Path, model: nn.Module | None = None) -> Path:
    checkpoint.save(model or model_of(1), None, path)
    return path


def slow(where: set[int]) -> Any:
    """Delay the reads of these numbers, so that later ones finish first."""
    read, numbers, lock = storage._read_into, iter(range(10**6)), threading.Lock()

    def later(*args: Any) -> None:
        with lock:
            number = next(numbers)
        if number in where:
            time.sleep(0.2)
        read(*args)

    return mock.patch.object(storage, "_read_into", later)


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    together = threading.Barrier(3)
    read = storage._read_into

    def meet(*args: Any) -> None:
        if read_so_far.acquire(blocking=False):
            together.wait(300)
        read(*args)

    read_so_far = threading.Semaphore(3)
    model = model_of(0)
    with mock.patch.object(storage, "_read_into", meet):
        checkpoint.load(model, None, path)
    assert [float(param.detach().mean()) for param in model.parameters()] == [1.0 + n for n in range(LAYERS)]


def test_of_two_damaged_tensors_the_first_in_the_file_is_told_whoever_finds_it_first(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    places = {
        key: entry.chunks[0].start
        for key, entry in read_checkpoint(path).entries.items()
        if isinstance(entry, TensorEntry)
    }
    keys = sorted(places, key=lambda key: places[key])
    (data,) = path.rglob("*.distcp")
    with data.open("r+b") as file:
        for key in (keys[2], keys[3]):
            file.seek(places[key])
            file.write(b"\xff")
    with (
        slow({2}),
        pytest.raises(CheckpointError, match=f"__0_0.distcp: the data of {keys[2]} are damaged"),
    ):
        checkpoint.load(model_of(0), None, path)


def test_nothing_is_written_once_a_load_has_failed(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    model = model_of(0)
    with (
        slow({1, 2}),
        mock.patch.object(storage, "_finish", side_effect=OSError("stop")),
        pytest.raises(OSError, match="stop"),
    ):
        checkpoint.load(model, None, path)
    before = [param.detach().clone() for param in model.parameters()]
    time.sleep(0.5)
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


def test_tensors_that_share_memory_have_the_values_of_the_last_in_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    model = model_of(0)
    for layer in list(model)[1:]:  # type: ignore[call-overload]  # iterates
        layer.weight = model[0].weight  # type: ignore[index]  # a Sequential
    with slow({0, LAYERS - 2}):
        checkpoint.load(model, None, path)
    assert float(model[0].weight.detach().mean()) == LAYERS  # type: ignore[index]


def test_no_more_is_under_way_than_the_bound(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    made, given_back = [0], [0]
    most = 0
    empty, finish = storage._empty, storage._finish

    def counted(*args: Any) -> torch.Tensor:
        nonlocal most
        made[0] += 1
        most = max(most, made[0] - given_back[0])
        return empty(*args)

    def noted(*args: Any) -> None:
        finish(*args)
        given_back[0] += 1

    model = model_of(0).double()  # another dtype, so that nothing is read into place
    with (
        mock.patch.object(storage, "_empty", counted),
        mock.patch.object(storage, "_finish", noted),
        mock.patch.object(storage, "_UNDERWAY_NBYTES", 2 * SIDE * SIDE * 4 + 2000),
    ):
        checkpoint.load(model, None, path)
    assert made == [LAYERS] and most == 3
    assert [float(param.detach().mean()) for param in model.parameters()] == [1.0 + n for n in range(LAYERS)]
