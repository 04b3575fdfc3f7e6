"""What tests/versions.py runs and what it makes of it: counts, failures that stay, pass alone or are mended,
skips."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests import versions
from tests.processes import as_nobody
from tests.versions import Result, Row, Version

SUITE = """
import pathlib, pytest

def test_passes(): pass
def test_fails(): assert pathlib.Path("mended").exists(), "until it is mended"
def test_fails_or_is_skipped():
    assert pathlib.Path("mended").exists()
    pytest.skip("no network")
def test_fails_once():
    flag = pathlib.Path(__file__).with_suffix(".flag")
    if not flag.exists():
        flag.touch()
        raise RuntimeError("once")
@pytest.mark.parametrize("size", ["a/b"])
def test_is_skipped(size): pytest.skip("no GPU")
"""
FAILS, FAILS_ONCE = "inner/test_suite.py::test_fails", "inner/test_suite.py::test_fails_once"
OR_IS_SKIPPED = "inner/test_suite.py::test_fails_or_is_skipped"
RESULT = Result("c0ffee1", "2026-01-01", 300.0, 10, {}, [], {})


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version:
    monkeypatch.setattr(versions, "PARTS", {"inner": ["inner/*.py"], "gone": ["gone/*.py"]})
    monkeypatch.setattr(Version, "python", Path(sys.executable))
    (tmp_path / "tree/inner").mkdir(parents=True)
    (tmp_path / "tree/inner/test_suite.py").write_text(SUITE)
    return Version("2.13.0@/some/python", tmp_path)


def run(version: Version, commit: str, again: bool = False) -> list[str]:
    """Run what is unfinished of the part "inner"; what that was."""
    parts = versions.unfinished(version, ["inner"], commit, again)
    versions.run_suite(version, parts, version.folder / "tree", commit, again)
    return parts


def kept(version: Version) -> Result:
    return Result(**version.read("inner"))


def test_every_test_is_counted_once(version: Version) -> None:
    run(version, "c0ffee1")
    result = kept(version)
    assert list(result.failed) == [FAILS, OR_IS_SKIPPED] and "until it is mended" in result.failed[FAILS]
    assert result.failed_once == [FAILS_ONCE]
    assert result.skipped == {"inner/test_suite.py::test_is_skipped[a/b]": "no GPU"}
    assert result.passed == 2
    assert not versions.passes(version, ["inner"])


def test_what_has_a_result_of_the_commit_is_not_run_again(version: Version) -> None:
    assert run(version, "c0ffee1") == ["inner"]
    assert run(version, "c0ffee1") == []
    assert run(version, "c0ffee2") == ["inner"]
    assert kept(version).commit == "c0ffee2"


def test_again_runs_what_failed_of_an_earlier_commit(version: Version) -> None:
    run(version, "c0ffee1")
    (version.folder / "tree/mended").touch()
    assert run(version, "c0ffee2", again=True) == ["inner"]
    assert kept(version).mended == [FAILS] and kept(version).failed == {}
    assert kept(version).skipped[OR_IS_SKIPPED] == "no network"
    assert kept(version).commit == "c0ffee1"  # of which all else is
    assert run(version, "c0ffee3", again=True) == []
    assert versions.passes(version, ["inner"]) and not versions.passes(version, ["inner", "gone"])


def test_a_pytest_that_dies_is_a_failure(version: Version) -> None:
    (version.folder / "tree/inner/test_suite.py").write_text("import os; os._exit(7)")
    run(version, "c0ffee1")
    assert kept(version).failed == {"inner": "pytest ended with status 7 and no report"}


@pytest.mark.parametrize(
    ("cuda", "reason"), [("'12.8'", "for CUDA 12.8"), ("None", "for CUDA none"), ("'13.0'", None)]
)
def test_a_build_for_another_cuda_does_not_run_what_needs_its_kernels(
    version: Version, monkeypatch: pytest.MonkeyPatch, cuda: str, reason: str | None
) -> None:
    monkeypatch.setattr(versions, "ON_CUDA_BUILD", ("inner",))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(Version, "python_for", lambda self, part: [sys.executable])
    torch = version.home / "lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    run(version, "c0ffee1")
    assert (reason is None) == bool(kept(version).passed)
    assert reason is None or reason in kept(version).skipped["inner"]


def test_a_pytest_that_is_killed_leaves_its_part_unfinished(version: Version) -> None:
    (version.folder / "tree/inner/test_suite.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(SystemExit, match="inner was killed"):
        run(version, "c0ffee1")
    assert versions.unfinished(version, ["inner"], "c0ffee1", again=False) == ["inner"]


def test_a_module_that_cannot_be_imported_is_named(version: Version) -> None:
    (version.folder / "tree/inner/test_suite.py").write_text("import nothing_of_the_kind")
    run(version, "c0ffee1")
    assert list(kept(version).failed) == ["inner/test_suite.py"]


def test_the_table_has_a_row_per_version_in_order_with_sums_and_each_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PARTS", {"unit": ["unit"], "ranks": ["ranks"]})
    for spec, names, parts in (
        ("2.10", ("2.10.0", "3.9.1"), {"unit": RESULT}),
        (
            "2.9@3.11",
            ("2.9.1+cu128", "3.11.7"),
            {"unit": RESULT, "ranks": replace(RESULT, failed={"test_one": "broke"})},
        ),
    ):
        version = Version(spec, tmp_path)
        version.write("names", dict(zip(("torch", "python"), names, strict=True)))
        for part, result in parts.items():
            version.write(part, vars(result))
    lines = versions.table(versions.rows(tmp_path)).splitlines()
    assert lines[2] == "| 2.9.1+cu128 | 3.11.7 | 2026-01-01 | nothing | 10 | 20 | 1 | 0 |"
    assert lines[3] == "| 2.10.0 | 3.9.1 | 2026-01-01 | ranks | 5 | 10 | 0 | 0 |"
    assert "- failed: `test_one`: broke" in lines


def test_notes_tell_what_was_mended_passed_alone_and_was_skipped() -> None:
    result = replace(RESULT, failed_once=["test_two"], skipped={"test_three": "no GPU"}, mended=["test_four"])
    row = Row("2.10.0", "3.9.1", {"unit": result})
    assert list(row.notes()) == [
        "mended: `test_four`",
        "passed alone: `test_two`",
        "skipped 1: no GPU",
    ]
    assert list(row.cells())[-3:] == [11, 0, 1]


def test_each_module_of_tests_is_in_one_part_or_left_out_with_a_reason() -> None:
    modules = {
        found.relative_to(versions.ROOT).as_posix() for found in (versions.ROOT / "tests").rglob("test_*.py")
    }
    left_out = {name for name in modules for folder in versions.LEFT_OUT if name.startswith(f"{folder}/")}
    parts = Counter(name for part in versions.PARTS for name in versions.files(part, versions.ROOT))
    assert set(parts.values()) == {1}
    assert parts.keys() | left_out == modules and not parts.keys() & left_out


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
def test_a_checkout_is_of_the_last_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.setattr(versions, "ROOT", source)
    (source / "setup.py").write_text("open('built', 'w').close()")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        versions.git(*command, folder=source)
    (source / "setup.py").write_text("raise SystemExit('not committed')")
    for _ in range(2):
        tree, commit = versions.checkout(tmp_path)
        assert commit == versions.git("rev-parse", "--short", "HEAD", folder=source)
        assert (tree / "built").exists()
        (tree / "setup.py").write_text("raise SystemExit('edited there')")


def test_versions_are_taken_with_each_python() -> None:
    assert versions.specs(["2.10.0", "2.15.0@3.12"], ["3.10", "3.13"]) == [
        "2.10.0@3.10",
        "2.10.0@3.13",
        "2.15.0@3.12",
    ]
    assert versions.specs(["2.10.0", "2.15.0@3.12"], []) == ["2.10.0", "2.15.0@3.12"]


def test_requirements_leave_torch_to_the_version() -> None:
    names = [line.partition("=")[0] for line in versions.requirements()]
    assert "torch" not in names and {"numpy", "pytest", "setuptools"} <= set(names)


@pytest.mark.parametrize("version", ["2.99", "/nowhere/python"])
def test_a_missing_python_is_named(version: str) -> None:
    with pytest.raises(SystemExit, match=f"no Python {version} found"):
        versions.interpreter(version)


def test_a_python_is_found_at_its_path_and_by_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.interpreter(sys.executable) == sys.executable
    made = tmp_path / "[a] b/versions/2.99.1/bin/python2.99"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "[a] b"))
    assert versions.interpreter("2.99") == str(made)


def test_a_folder_of_pyenv_that_may_not_be_read_has_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("PYENV_ROOT", str(closed / "pyenv"))

    def work() -> None:
        with pytest.raises(SystemExit, match="no Python 2.99 found"):
            versions.interpreter("2.99")

    as_nobody(work)
