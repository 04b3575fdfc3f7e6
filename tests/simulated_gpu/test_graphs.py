"""What the simulated GPU promises of CUDA graphs: what is captured does not run, and runs at each replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

simulated_gpu = pytest.importorskip(
    "simulated_gpu", reason="this process has no simulated GPU: make test-simulated-gpu"
)


def captured(work: Callable[[torch.Tensor], object], values: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):  # torch leaves another one behind where a capture fails
        with torch.cuda.graph(graph):
            work(values)
    return graph


def test_captured_work_runs_at_replays_alone() -> None:
    values = torch.ones(10, device="cuda")
    graph = captured(lambda each: each.mul_(3), values)
    assert values.tolist() == [1.0] * 10
    graph.replay()
    graph.replay()
    assert values.tolist() == [9.0] * 10


def test_results_of_a_capture_are_there_after_a_replay() -> None:
    values, graph = torch.ones(10, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (values * 2).sum()
    assert bool(total.isnan())
    for number in (1.0, 5.0):
        values.fill_(number)
        graph.replay()
        assert total.item() == 20 * number


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
    for wait in (lambda each: each.sum().item(), lambda each: torch.cuda.synchronize(), lambda each: each.cpu()):
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            captured(wait, values)
    assert values.tolist() == [1.0] * 10


def test_a_stream_that_joined_must_be_waited_for() -> None:
    values, side = torch.ones(10, device="cuda"), torch.cuda.Stream()

    def fork(each: torch.Tensor, join: bool) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            each.add_(1)
        if join:
            torch.cuda.current_stream().wait_stream(side)

    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(lambda each: fork(each, join=False), values)
    graph = captured(lambda each: fork(each, join=True), values)
    graph.replay()
    assert values.tolist() == [2.0] * 10


def test_a_capture_waits_for_nothing_from_outside() -> None:
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(RuntimeError, match="uncaptured work"):
        captured(lambda each: event.wait(), torch.ones(1, device="cuda"))


def test_a_race_within_a_graph_is_found_at_its_capture() -> None:
    values, side = torch.ones(10, device="cuda"), torch.cuda.Stream()

    def race(each: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        each.add_(1)
        with torch.cuda.stream(side):
            each.mul_(2)
        torch.cuda.current_stream().wait_stream(side)

    captured(race, values)
    found = simulated_gpu.reports()
    assert any(report.startswith("race: aten::add writes") for report in found), found


def test_a_replay_that_nothing_waits_for_races_with_what_follows() -> None:
    values, side = torch.ones(10, device="cuda"), torch.cuda.Stream()
    graph = captured(lambda each: each.add_(1), values)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    assert simulated_gpu.reports() == []
    values.mul_(2)
    assert any("race" in report for report in simulated_gpu.reports())


def test_memory_of_a_graph_stays_its_own() -> None:
    values, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (values + 1).sum()
    torch.cuda.empty_cache()
    others = [torch.zeros(1000, device="cuda") for _ in range(20)]
    graph.replay()
    assert total.item() == 2000.0
    assert all(not bool(other.any()) for other in others)
