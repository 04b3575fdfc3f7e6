"""What the benchmark of host work reads in dumps of callgrind."""

from __future__ import annotations

from pathlib import Path

from benchmarks.host_overhead import dumped_totals, instructions_in

DUMP = """\
desc: Trigger: Client Request: step
ob=(1) /lib/libpython.so
fn=(1) eval
10 100
cob=(2) /tree/build/simulated_gpu/libcuda.so.1
cfn=(2) launch
calls=1 20
11 40
+1 7
ob=(2)
fn=(2)
20 30
+2 10
ob=(1)
fn=(3) end
* 3
totals: 150
"""


def test_instructions_of_a_folder_are_its_own_functions() -> None:
    assert instructions_in(DUMP, "/build/simulated_gpu/") == 40
    assert instructions_in(DUMP, "/lib/") == 110
    assert instructions_in(DUMP, "/elsewhere/") == 0


def test_totals_leave_out_a_simulated_gpu(tmp_path: Path) -> None:
    (tmp_path / "cg.10").write_text(DUMP.replace("totals: 150", "totals: 250"))
    (tmp_path / "cg.9").write_text(DUMP)
    (tmp_path / "cg.1").write_text("totals: 5\n")  # what no client asked for
    assert dumped_totals(tmp_path) == [110, 210]
