"""Background saves on a GPU: the optimizer waits for the copy, not the host, nor the compute stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, saving
from fsdp_c.checkpoint.host_copies import HostCopies
from tests import simulated_gpu

WIDTH = 640


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(use_orig_params: bool = False) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    options = {"device_id": torch.device("cuda", 0), "use_orig_params": use_orig_params}
    layers = [FSDP(nn.Linear(WIDTH, WIDTH), **options) for _ in range(2)]
    model = FSDP(nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)


def backward(model: FSDP) -> None:
    model(torch.ones(4, WIDTH, device="cuda")).square().mean().backward()


@contextmanager
def thread_held_back() -> Iterator[threading.Event]:
    """Delay the writing thread's wait for the copy until the event is set: a wait on the host would also
    order the optimizer after the copy.
    """
    over = threading.Event()
    wait = HostCopies.wait

    def later(copies: HostCopies) -> None:
        assert over.wait(600)
        wait(copies)

    with mock.patch.object(HostCopies, "wait", later):
        yield over


def test_neither_the_host_nor_the_computation_waits_until_the_optimizer_steps(tmp_path: Path) -> None:
    model, optimizer = made()
    backward(model)
    optimizer.step()
    checkpoint.save(model, optimizer, tmp_path / "first", background=True).wait()  # pins the memory
    checkpoint.save(model, optimizer, tmp_path / "expected")
    begun: list[str] = []
    stream = torch.cuda.current_stream()
    waits = {"wait_event": torch.cuda.Stream.wait_event, "wait_stream": torch.cuda.Stream.wait_stream}

    def noted(name: str) -> Any:
        def wait(self: Any, other: Any) -> Any:
            if self == stream:
                begun.append(name)
            return waits[name](self, other)

        return wait

    host = mock.Mock(side_effect=AssertionError("the host waits"))
    copies = saving._host_copies
    with (
        mock.patch.multiple(torch.cuda.Stream, **{name: noted(name) for name in waits}),
        mock.patch.multiple(torch.cuda, synchronize=host),
        mock.patch.object(copies, "wait"),  # the wait of the writing thread
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            handle = checkpoint.save(model, optimizer, tmp_path / "second", background=True)
            assert begun == []
            backward(model)
            during = len(begun)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        handle.wait()
    assert len(begun) > during
    copies.wait()
    for name, is_capturable in (("second", True), ("expected", False)):
        other, _ = made()
        its = torch.optim.AdamW(other.parameters(), capturable=is_capturable)
        checkpoint.load(other, its, tmp_path / name)
        backward(other)
        its.step()  # as the saved optimizer's, which requires its step on the GPU
    (second,), (expected,) = ((tmp_path / name).rglob("*.distcp") for name in ("second", "expected"))
    assert second.read_bytes() == expected.read_bytes()


@pytest.mark.skipif(not simulated_gpu.is_on(), reason="only the simulated GPU finds races")
@pytest.mark.parametrize("is_left_out", [False, True])
def test_without_the_optimizers_wait_the_copy_is_a_race(tmp_path: Path, is_left_out: bool) -> None:
    import simulated_gpu as device

    model, optimizer = made()
    backward(model)
    optimizer.step()
    with thread_held_back() as over:
        handle = checkpoint.save(model, optimizer, tmp_path / "ckpt", background=True)
        backward(model)
        with mock.patch.object(torch.cuda.Stream, "wait_event") if is_left_out else nullcontext():
            optimizer.step()
        over.set()
        handle.wait()
    assert bool(device.reports()) == is_left_out


def test_extra_tensors_may_be_written_right_after_a_background_save(tmp_path: Path) -> None:
    model, optimizer = made()
    extra = {"state": torch.ones(WIDTH, device="cuda")}  # a key as in an optimizer's state dict
    model.register_buffer("state", torch.ones(WIDTH, device="cuda"))
    with thread_held_back() as over:
        handle = checkpoint.save(model, optimizer, tmp_path / "ckpt", extra=extra, background=True)
        extra["state"].zero_()
        model.get_buffer("state").zero_()
        over.set()
        handle.wait()
    found = checkpoint.load(model, optimizer, tmp_path / "ckpt")["state"], model.get_buffer("state")
    assert all(torch.equal(one.cpu(), torch.ones(WIDTH)) for one in found)


def written(model: FSDP, optimizer: torch.optim.Optimizer, how: str) -> None:
    param = next(iter(model.parameters()))
    with torch.no_grad():
        if how == "parameter":
            param.mul_(0.5)
        elif how == "view of a parameter":
            param.view(-1)[:3].zero_()
        elif how == "state":
            optimizer.state[param]["exp_avg"].zero_()


@pytest.mark.parametrize("before", ["the end of the copy", "a step"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("how", ["parameter", "view of a parameter", "state", "nothing else"])
def test_write_without_an_optimizer_during_the_copy_fails_the_save(
    tmp_path: Path, how: str, use_orig_params: bool, before: str
) -> None:
    model, optimizer = made(use_orig_params)
    backward(model)
    optimizer.step()
    checkpoint.save(model, optimizer, tmp_path / "ckpt")
    expected = next((tmp_path / "ckpt").rglob("*.distcp")).read_bytes()
    with thread_held_back() as over:
        handle = checkpoint.save(model, optimizer, tmp_path / "ckpt", background=True)
        backward(model)
        written(model, optimizer, how)
        if before == "a step":
            optimizer.step()
            written(model, optimizer, "parameter")  # after the step it is safe to write
        over.set()
        if how == "nothing else":
            handle.wait()
        else:
            name = r"\['.*(weight|exp_avg).*'\]"
            with pytest.raises(
                CheckpointError, match=f"{name} (was|were) written to, other than by an optimizer"
            ):
                handle.wait()
    if simulated_gpu.is_on():
        import simulated_gpu as device

        assert bool(device.reports()) == (how != "nothing else")  # every other case is a race
    (data,) = (tmp_path / "ckpt").rglob("__0_0.distcp")
    assert data.read_bytes() == expected  # the old checkpoint, or a new one with equal values
    checkpoint.save(model, optimizer, tmp_path / "ckpt", background=True).wait()
