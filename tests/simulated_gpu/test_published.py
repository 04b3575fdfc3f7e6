"""What benchmarks/published.py makes of measured steps and of the model's, by hand; and steps that were measured,
each told from a few of its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import (
    GPU_OF,
    ROWS,
    SPEEDS,
    Beside,
    Comparison,
    Measured,
    lateness,
    results_of,
    speed_for,
    speed_of,
)
from benchmarks.timeline_row import Result, Row, at_nodes, machine_of, us_by_nbytes, us_of_ring
from tests.simulated_gpu.test_timeline import run

ROW = Row("torch.fsdp1", "6.7B", "ib512", batch=2, ranks=8)


def result(ms: float, row: Row = ROW) -> Result:
    return Result(row, ms, ms, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1024.0, 0, 0)


def beside(ms: float, predicted: float, **others: object) -> Beside:
    row = replace(ROW, **others)  # type: ignore[arg-type]
    return Beside(Measured("", row, 1e3 * 2 * 4096 / ms, 2.0), predicted, result(predicted, row))


def test_a_speed_makes_a_step_as_long_as_it_was_measured() -> None:
    assert SPEEDS == (1.0, 0.8)
    # 100 ms that it does not shorten, and 400 that it does
    assert speed_of(900.0, [500.0, 600.0]) == pytest.approx(0.5)


def test_a_machine_has_the_speed_of_the_one_with_its_gpu() -> None:
    assert speed_for(Measured("", ROW, 1.0), {"ib512": 0.9}) == 0.9
    assert speed_for(Measured("", replace(ROW, machine="h100_800g"), 1.0), {"ib512": 0.9}) == 0.9
    assert GPU_OF
    for machine, other in GPU_OF.items():
        assert [machine_of(machine)[key] for key in ("gpu", "speed")] == [
            machine_of(other)[key] for key in ("gpu", "speed")
        ]


def test_a_row_has_the_attention_that_it_names_whatever_the_speed_is() -> None:
    told = run("""
        from benchmarks.timeline_row import Row, machine_of_row, set_machine

        for name, given in {"the machine's": 0.0, "its own": 1e6}.items():
            set_machine(machine_of_row(Row("alone", "6.7B", "nvlink8", speed=0.5, attention=given)))
            times[name] = timeline.native().cost("attention")
    """)
    assert told == {"the machine's": 140e6, "its own": 1e6}


def test_each_rank_adds_a_part_of_a_step() -> None:
    rows = [beside(1100.0, 1000.0, ranks=100), beside(1400.0, 1000.0, ranks=400)]
    assert lateness(rows) == pytest.approx(0.001)
    rows[1].late = lateness(rows)
    assert rows[1].predicted_ms == pytest.approx(1400.0)
    assert lateness([beside(900.0, 1000.0)]) == 0


def test_errors_are_of_rows_that_nothing_was_fitted_on() -> None:
    fitted = beside(1000.0, 1200.0)
    fitted.measured = replace(fitted.measured, calibrates=True)
    late, other = beside(1000.0, 1300.0, model="mpt-7b"), beside(1000.0, 1100.0)
    compared = Comparison([fitted, late, other], {}, 0.0)
    assert compared.tested == [other]
    assert other.error == pytest.approx(0.1)
    assert other.memory_error == pytest.approx(-0.5)


def test_signs_are_of_fsdp2_after_fsdp1_and_of_more_ranks_after_the_fewest() -> None:
    one, more = beside(1000.0, 1000.0), beside(1100.0, 990.0, ranks=64)
    newer = beside(980.0, 1010.0, implementation="torch.fsdp2", keep_last=True)
    found = Comparison([one, more, newer], {}, 0.0).signs()
    assert [(measured, predicted) for _, measured, predicted in found] == [
        (pytest.approx(-0.02), pytest.approx(0.01)),
        (pytest.approx(0.1), pytest.approx(-0.01)),
    ]
    assert [what.split(",")[0] for what, *_ in found] == ["FSDP2 after FSDP1", "64 after 8 GPUs"]


def test_bandwidth_is_straight_between_nodes_by_their_logarithm() -> None:
    known = {"4": 360.0, "16": 320.0}
    assert [at_nodes(known, nodes) for nodes in (2, 4, 8, 16, 64)] == pytest.approx([360, 360, 340, 320, 320])


def test_a_ring_takes_the_faster_protocol() -> None:
    # 16 ranks on 2 nodes: 14 hops within and 1 between
    assert us_of_ring(0.0, 16, 2) == pytest.approx(10 + 14 * 1.9 + 4.0)
    assert us_of_ring(10_000.0, 16, 2) == pytest.approx(8.4 + 14 * 3.4 + 9.6 + 10_000)


def test_a_ring_of_one_gpu_of_each_node_has_its_part_of_the_wires() -> None:
    wire = {"bus_GB_per_s": {"4": 320.0}}
    nbytes = float(1 << 40)
    whole, part = (dict(us_by_nbytes(wire, ranks, 4, 8))[nbytes] for ranks in (32, 4))
    assert whole == pytest.approx(nbytes * 31 / 32 / 320e3, rel=1e-4)
    assert part == pytest.approx(nbytes * 3 / 4 / 40e3, rel=1e-4)


MEASURED = {
    ("torch.fsdp2", "titan3-8b", 8),
    ("torch.fsdp2", "titan-13b", 64),
    ("torch.fsdp1", "mpt-7b", 128),
    ("torch.fsdp1", "mpt-13b", 64),
}


def test_steps_that_were_measured_are_told_from_a_few_blocks() -> None:
    rows = [each for each in ROWS if (each.row.implementation, each.row.model, each.row.ranks) in MEASURED]
    rows = [
        each for each in rows if each.row.recompute in ("", "operators") and each.row.machine != "a100_40"
    ]
    assert len(rows) == 5
    results = results_of([(each.row, False) for each in rows])
    for each, told in zip(rows, results, strict=True):
        assert told.step_ms == pytest.approx(each.ms, rel=0.12), each.row
        assert told.plain_ms < told.step_ms
