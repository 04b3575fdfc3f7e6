"""CUDA graphs, real or not: what is captured does not run, and runs at each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn


def captured(work: Callable[[torch.Tensor], object], values: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(
        torch.cuda.current_stream()
    ):  # torch leaves another one behind where a capture fails
        try:
            with torch.cuda.graph(graph, pool=pool):
                work(values)
        except RuntimeError:
            # and before 2.13 its allocator amid the capture, where the end of any MemPool ends the process
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(values.device.index, pool)
            raise
    return graph


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    """A RuntimeError says one of these, or the one that torch raises as it ends the capture, while it handles
    that."""
    with pytest.raises(RuntimeError) as raised:
        yield
    said: list[str] = []
    error: BaseException | None = raised.value
    while error is not None:
        said.append(str(error))
        error = error.__context__
    assert any(text in one for text in texts for one in said), said


def test_captured_work_runs_at_replays_alone() -> None:
    values = torch.ones(10, device="cuda")
    graph = captured(lambda each: each.mul_(3), values)
    assert values.tolist() == [1.0] * 10
    graph.replay()
    graph.replay()
    assert values.tolist() == [9.0] * 10


def test_a_graph_trains_as_steps_without_it_do() -> None:
    def trained(graphed: bool) -> list[float]:
        torch.manual_seed(0)
        model, inputs = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
        graph = torch.cuda.CUDAGraph()

        def step(inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(inputs)
        torch.cuda.current_stream().wait_stream(side)
        if graphed:
            graph = captured(step, inputs)
        for number in (2.0, 3.0):
            inputs.fill_(number)
            graph.replay() if graphed else step(inputs)
        return model.weight.flatten().tolist()

    assert trained(graphed=True) == trained(graphed=False)


def test_each_replay_draws_numbers_of_its_own() -> None:
    values = torch.zeros(100, device="cuda")
    graph = captured(lambda each: each.copy_(torch.rand(100, device="cuda")), values)
    torch.manual_seed(3)
    graph.replay()
    first = values.clone()
    graph.replay()
    torch.manual_seed(3)
    assert not torch.equal(first, values)
    assert torch.equal(first, torch.rand(100, device="cuda"))


def test_the_host_cannot_wait_amid_a_capture() -> None:
    values = torch.ones(10, device="cuda")
    for wait in (
        lambda each: each.sum().item(),
        lambda each: torch.cuda.synchronize(),
        lambda each: each.cpu(),
    ):

        def work(each: torch.Tensor, wait: Callable[[torch.Tensor], object] = wait) -> None:
            each.mul_(3)  # torch warns of an empty graph where it refuses a copy by itself
            wait(each)

        with refused("operation not permitted when stream is capturing", "during CUDA graph capture"):
            captured(work, values)
    assert values.tolist() == [1.0] * 10


def test_a_stream_that_joined_must_be_waited_for() -> None:
    values, side = torch.ones(10, device="cuda"), torch.cuda.Stream()

    def fork(each: torch.Tensor, join: bool) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            each.add_(1)
        if join:
            torch.cuda.current_stream().wait_stream(side)

    with refused("unjoined work"):
        captured(lambda each: fork(each, join=False), values)
    graph = captured(lambda each: fork(each, join=True), values)
    graph.replay()
    assert values.tolist() == [2.0] * 10


def test_a_capture_waits_for_nothing_from_outside() -> None:
    event = torch.cuda.Event()
    event.record()
    with refused("uncaptured work"):
        captured(lambda each: event.wait(), torch.ones(1, device="cuda"))


def test_memory_of_a_graph_stays_its_own() -> None:
    values, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (values + 1).sum()
    torch.cuda.empty_cache()
    others = [torch.zeros(1000, device="cuda") for _ in range(20)]
    graph.replay()
    assert total.item() == 2000.0
    assert all(not bool(other.any()) for other in others)
