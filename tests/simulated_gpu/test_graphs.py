"""CUDA graphs on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

simulated_gpu = pytest.importorskip("simulated_gpu")


def captured(work: Callable[[torch.Tensor], object], values: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(values)
    return graph


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


def test_replay_without_a_wait_races_with_later_work() -> None:
    values, side = torch.ones(10, device="cuda"), torch.cuda.Stream()
    graph = captured(lambda each: each.add_(1), values)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    assert simulated_gpu.reports() == []
    values.mul_(2)
    assert any("race" in report for report in simulated_gpu.reports())
