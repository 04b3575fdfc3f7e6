"""What tests/versions.py makes of a suite: counts, failures that stay or pass alone, skips and their reasons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import versions

SUITE = """
import pathlib, pytest

def test_passes(): pass
def test_fails(): assert False, "always"
def test_fails_once():
    flag = pathlib.Path(__file__).with_suffix(".flag")
    if not flag.exists():
        flag.touch()
        raise RuntimeError("once")
@pytest.mark.parametrize("size", ["a/b"])
def test_is_skipped(size): pytest.skip("no GPU")
"""


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> versions.Result:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/test_suite.py").write_text(SUITE)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "SUITE", ["inner"])
    monkeypatch.setattr(versions, "environment", lambda spec, folder: Path(sys.executable))
    return versions.run_suite("2.13.0@/some/python", tmp_path)


def test_every_test_is_counted_once(result: versions.Result) -> None:
    assert list(result.failed) == ["inner/test_suite.py::test_fails"]
    assert "always" in result.failed["inner/test_suite.py::test_fails"]
    assert result.failed_once == ["inner/test_suite.py::test_fails_once"]
    assert result.skipped == {"inner/test_suite.py::test_is_skipped[a/b]": "no GPU"}
    assert result.passed == 2


def test_the_table_has_a_row_per_version_in_order_and_each_failure() -> None:
    older = versions.Result("2.9.1+cu128", "3.11.7", "2026-01-01", 5, 10, {"test_one": "broke"}, ["test_two"], {})
    newer = versions.Result("2.10.0", "3.9.1", "2026-01-02", 6, 9, {}, [], {"test_three": "no GPU"})
    lines = versions.table([newer, older]).splitlines()
    assert lines[2] == "| 2.9.1+cu128 | 3.11.7 | 2026-01-01 | 5 | 10 | 1 | 0 |"
    assert lines[3] == "| 2.10.0 | 3.9.1 | 2026-01-02 | 6 | 9 | 0 | 1 |"
    assert "- failed: `test_one`: broke" in lines and "- passed alone: `test_two`" in lines
    assert "- skipped 1: no GPU" in lines


def test_requirements_leave_torch_to_the_version() -> None:
    names = [line.partition("=")[0] for line in versions.requirements()]
    assert "torch" not in names and {"numpy", "pytest", "setuptools"} <= set(names)


def test_a_missing_python_is_named() -> None:
    with pytest.raises(SystemExit, match="no Python 2.99 found"):
        versions.interpreter("2.99")
