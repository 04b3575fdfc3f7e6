"""A torch without FSDP1 gives the same bits, and exchanges objects and checkpoints in both directions. Each
way runs in fresh processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hidden_fsdp1 import WAYS
from tests.processes import run_ranks

pytestmark = pytest.mark.slow

RANKS = 2


def run(way: str, folder: Path) -> list[dict[str, Any]]:
    """Return the output of ``tests.without_fsdp1`` on each rank. Fails with the output of a failed rank."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = [["-m", "tests.without_fsdp1", way, rank, RANKS, folder] for rank in range(RANKS)]
    for done in run_ranks(arguments, **variables):
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads((folder / way / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without_fsdp1")


@pytest.fixture(scope="module")
def present(folder: Path) -> list[dict[str, Any]]:
    return run("present", folder)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("way", WAYS)
def test_a_torch_without_fsdp1_trains_saves_and_loads_the_same_bits(
    way: str, folder: Path, present: list[dict[str, Any]]
) -> None:
    assert run(way, folder) == present


@pytest.mark.timeout(700)
def test_a_torch_with_fsdp1_loads_checkpoints_of_a_torch_without(
    folder: Path, present: list[dict[str, Any]]
) -> None:
    for way in WAYS:
        if not (folder / way).exists():  # the other way's test runs in a different process
            run(way, folder)
    again = folder / "again"
    again.mkdir()
    for way in WAYS:
        (folder / way).rename(again / way)
    assert run("present", again) == present
