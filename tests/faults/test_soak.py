"""The soak test's ranks, for a minute's part of it: all faults but kills (make soak has those, and 2,000
steps)."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tests.faults import soak
from tests.ranks import on_ranks
from tests.storage import settled_nbytes

STEPS = 40
OFTEN = {"exception": 0.3, "evaluation": 0.1, "state dict": 0.05, "save": 0.1, "resume": 0.05}


@on_ranks(2, label="faults")
def test_a_run_with_random_faults_has_the_losses_of_one_without(rank: int, tmp_path: Path) -> None:
    settled_nbytes()
    before = soak.measured()
    outs = [tmp_path / "undisturbed", tmp_path / "disturbed"]
    for out in outs:
        out.mkdir(exist_ok=True)
        with mock.patch.dict(soak.EVENTS, OFTEN):
            soak.Run(out, STEPS, 0, [], 0, disturbed=out is outs[1]).train()
    if rank == 0:
        assert soak.differences(*outs, STEPS) == []
        assert set((outs[1] / "events").read_text().splitlines()) == set(OFTEN)
    assert soak.measured()[1:] == before[1:]
