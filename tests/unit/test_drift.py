"""Whether the installed torch's FSDP1 is the one that was recorded, and fsdp_c's names take the arguments of
torch's.

After an upgrade of torch the first test says what has changed; ``tests/drift/tables.py`` says how to record
it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fsdp_c import FullyShardedDataParallel
from fsdp_c.compat import upstream
from tests.drift import ours, tables

VERSION = "{}.{}".format(*upstream.torch_version())

DELIBERATE = {  # what differs from torch's on purpose, by name, and why
    "_flat_param.FlatParamHandle.__init__": "takes the groups and the walk over the module that construction has made",
}


def drift(torch: Path, version: str) -> list[str]:
    """What sources are beside the table of their version, or beside the newest where that version has
    none."""
    known = version if version in tables.versions() else tables.versions()[-1]
    return [f"torch {version} drifted from the table of {known}"] * (known != version) + [
        f"torch {version}: {line}"
        for line in tables.differences(tables.recorded(known), tables.condensed(tables.read(torch)))
    ]


def unexpected() -> list[str]:
    found = ours.differences(tables.read(tables.installed_torch()))
    return [line for line in found if not line.startswith(tuple(DELIBERATE))]


def test_installed_torch_is_the_recorded_one() -> None:
    assert drift(tables.installed_torch(), VERSION) == []


def test_arguments_are_those_of_the_installed_torch() -> None:
    assert unexpected() == []


@pytest.mark.parametrize("version", tables.versions())
def test_every_recorded_version_has_the_public_arguments_of_the_installed_one(version: str) -> None:
    changed = set(tables.recorded(version)) - set(tables.recorded(VERSION))
    assert [line for line in changed if line.split()[0] not in ("export", "private")] == []


def test_every_deliberate_difference_is_one() -> None:
    found = ours.differences(tables.read(tables.installed_torch()))
    assert [name for name in DELIBERATE if not any(line.startswith(name) for line in found)] == []


def test_tables_hold_the_changes_that_are_known() -> None:
    assert tables.versions() == ["2.10", "2.11", "2.12", "2.13", "2.14", "2.15"]
    later = {
        version: set(tables.recorded(version)) - set(tables.recorded("2.10")) for version in tables.versions()
    }
    assert not later["2.11"] and "export DataParallelMeshDims" in later["2.12"] & later["2.13"]
    assert len(later["2.15"]) == 5 and len(tables.recorded("2.15")) > 150


# ----------------------------------------------------------------- planted drift


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The installed torch's sources, as far as they are read, to be changed."""
    target = tmp_path / "torch"
    shutil.copytree(tables.installed_torch() / "distributed", target / "distributed", ignore=_all_but_python)
    return target


def _all_but_python(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if "." in name and not name.endswith(".py")}


PLANTED = {
    "api.py": ("cast_root_forward_inputs: bool = True", "cast_root_forward_inputs: bool = False"),
    "wrap.py": ("min_num_params: int = int(1e8)", "min_numel: int = int(1e8)"),
    "_shard_utils.py": ("def _create_chunk_dtensor(", "def _make_chunk_dtensor("),
    "fully_sharded_data_parallel.py": ("def no_sync(self)", "def no_sync(self, *, all_units=True)"),
}


@pytest.mark.parametrize("file", PLANTED)
def test_planted_drift_is_found_and_said(copied: Path, file: str) -> None:
    path = copied / "distributed" / "fsdp" / file
    before, after = PLANTED[file]
    text = path.read_text()
    assert before in text and drift(copied, VERSION) == []
    path.write_text(text.replace(before, after))
    gone, came = drift(copied, VERSION)
    assert gone.startswith(f"torch {VERSION}: -") and name_in(file, before) in gone
    assert came.startswith(f"torch {VERSION}: +") and name_in(file, after) in came


def name_in(file: str, line: str) -> str:
    """What a change of this line of a file is said to be of: in a private module, of that."""
    return f"private {file[:-3]}" if file.startswith("_") else re.split("[(:]", line.removeprefix("def "))[0]


def test_version_without_a_table_is_compared_with_the_newest(copied: Path) -> None:
    newest = tables.versions()[-1]
    assert drift(copied, "2.99")[0] == f"torch 2.99 drifted from the table of {newest}"


def test_planted_difference_of_ours_is_found_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sync(self: FullyShardedDataParallel, recurse: bool = True) -> None: ...

    monkeypatch.setattr(FullyShardedDataParallel, "no_sync", no_sync)
    monkeypatch.delattr(FullyShardedDataParallel, "clip_grad_norm_")
    assert unexpected() == [
        "fully_sharded_data_parallel.FullyShardedDataParallel.clip_grad_norm_ is missing",
        "fully_sharded_data_parallel.FullyShardedDataParallel.no_sync(self, recurse=True), torch has (self)",
    ]
