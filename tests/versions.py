"""The suite on other versions of torch and Python: ``python -m tests.versions 2.10.0 2.15.0@3.12``.

A version is one of torch, with one of Python after "@", or each of ``--pythons``, or else this one. Each gets
an environment of its own, made with ``pip install torch==VERSION``: 5 to 7 GB where PyPI's build is for CUDA.

What is tested is the last commit, in a checkout of its own with one extension for all versions, so that one
may go on editing meanwhile. The suite runs in parts, and what a part came to is kept. A call that is
interrupted or repeated goes on with the parts that have no result of this commit; with ``--again`` those that
have one of an earlier commit run only what failed then. Tests that fail are run once more, each alone.

At the end, and with ``--report`` alone, one table shows all that the folder has results of.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ("requirements/base.txt", "requirements/dev.txt")
PARTS = {  # an interruption costs one
    "unit": ("tests/unit/*.py", "tests/*.py"),
    "native": ("tests/native/*.py",),
    "ranks a-c": ("tests/distributed/test_[a-c]*.py",),
    "ranks d-h": ("tests/distributed/test_[d-h]*.py",),
    "ranks i-r": ("tests/distributed/test_[i-r]*.py",),
    "ranks s": ("tests/distributed/test_s*.py",),
    "ranks t": ("tests/distributed/test_t*.py",),
    "ranks u-z": ("tests/distributed/test_[u-z]*.py",),
    "parity": ("tests/parity/*.py",),
    "faults": ("tests/faults/*.py",),
    "cuda": ("tests/cuda/*.py",),
}
ON_CUDA_BUILD = ("cuda",)  # parts that run on a GPU that is not there: docs/testing.md
LEFT_OUT = {
    "tests/clients": "the libraries of requirements/clients.txt want versions of torch of their own",
    "tests/races": "needs the simulated GPU",
    "tests/real_cuda": "is about the GPU that is not there under a CUDA build of torch: `make test-cuda-build`",
    "tests/simulated_gpu": "is about the simulated GPU",
}
TEST_TIMEOUT_S = 1800


@dataclass
class Result:
    """What a part of the suite came to under one version; failures and skips with the reason's first line."""

    commit: str
    day: str
    seconds: float
    passed: int
    failed: dict[str, str]
    failed_once: list[str]  # and passed alone
    skipped: dict[str, str]
    mended: list[str] = field(default_factory=list)  # failed at ``commit``, and passed at a later one


@dataclass
class Version:
    """One version of torch and Python: where its environment and its results are, and what it is called in
    full."""

    spec: str
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / self.spec.replace("/", "_")

    @property
    def python(self) -> Path:
        return self.home / "bin/python"

    @property
    def results(self) -> Path:
        return self.folder / (self.home.name + ".results")

    @property
    def cuda(self) -> str:
        """The CUDA of the torch that is installed there; "" for none."""
        texts = [path.read_text() for path in self.home.glob("lib/python*/site-packages/torch/version.py")]
        found = [re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE) for text in texts]
        return found[0][1] if found and found[0] else ""

    def why_not(self, part: str) -> str | None:
        """The reason not to run a part of the suite, if there is one."""
        if part not in ON_CUDA_BUILD:
            return None
        if not self.cuda.startswith("13."):
            return f"torch's build is for CUDA {self.cuda or 'none'}, and the kernels' for CUDA 13"
        return None if shutil.which("nvcc") else "nvcc is not here"

    def python_for(self, part: str) -> list[str]:
        """The command that runs Python for a part of the suite."""
        if part not in ON_CUDA_BUILD:
            return [str(self.python)]
        settings = ["FAKE_CUDA_LATE=1", f"FAKE_CUDA_TORCH={self.spec}", f"FAKE_CUDA_FOLDER={self.folder}"]
        return ["env", *settings, sys.executable, "-m", "tests.real_cuda"]

    def read(self, name: str) -> dict[str, Any]:
        """The result of that part, or its "names"; empty where none is kept."""
        file = self.results / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Keep it, whole or not at all."""
        self.results.mkdir(parents=True, exist_ok=True)
        unfinished = self.results / f"{name}.unfinished"
        unfinished.write_text(json.dumps(content, indent=2))
        unfinished.replace(self.results / f"{name}.json")


# ---- what is tested


def git(*arguments: str, folder: Path | None = None) -> str:
    """What git prints, of this repository or of that in ``folder``. CalledProcessError where there is
    none."""
    command = ["git", "-C", str(folder or ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def checkout(folder: Path) -> tuple[Path, str]:
    """A checkout of the last commit with its extension built, and the commit. Later calls compile what has
    changed."""
    tree, commit = folder / "tree", git("rev-parse", "HEAD")
    if not tree.exists():
        git("clone", "-q", "--shared", "--no-checkout", str(ROOT), str(tree))
    git("checkout", "-q", "--force", "--detach", commit, folder=tree)
    git("clean", "-fdq", folder=tree)
    if git("status", "--porcelain"):
        print("what is not committed is not tested", file=sys.stderr)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
    return tree, git("rev-parse", "--short", commit)


# ---- the environment


def interpreter(version: str) -> str:
    """A Python of ``version``, as "3.12", from the path or from pyenv, or the one at a path. SystemExit if
    none."""
    pyenv = glob.escape(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
    # Path.glob() raises where a folder may not be read
    candidates = [
        version,
        f"python{version}",
        *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python{version}")),
    ]
    for candidate in candidates:
        found = shutil.which(candidate)  # perhaps a shim of pyenv, which may refuse to run
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise SystemExit(
        f"no Python {version} found: put python{version} on the path, or write its path after the @"
    )


def requirements(names: Iterable[str] = REQUIREMENTS) -> list[str]:
    """What these files name beside torch."""
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "-r", "torch=="))]


def install(python: Path, torch_version: str, names: Iterable[str] = REQUIREMENTS) -> None:
    """What these files name, beside that torch: no build with a label, as 2.13.0+cpu, in its place."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, f"torch==={torch_version}", *requirements(names)], check=True)


def make_environment(version: Version, tree: Path) -> None:
    """Make what does not stand yet, with ``tree`` on its path. CalledProcessError if there is no such
    torch."""
    torch_version, _, python_version = version.spec.partition("@")
    if not version.python.exists():
        maker = interpreter(python_version) if python_version else sys.executable
        subprocess.run([maker, "-m", "venv", str(version.home)], check=True)
    install(version.python, torch_version)
    for packages in version.home.glob("lib/python*/site-packages"):
        (packages / "fsdp_c_checkout.pth").write_text(f"{tree}\n")
    ask = "import platform, torch; print(torch.__version__, platform.python_version())"
    answer = subprocess.run(
        [version.python, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.split()
    version.write("names", dict(zip(("torch", "python"), answer, strict=True)))


# ---- the tests


def pytest(python: list[str], arguments: Iterable[str], tree: Path, report: Path) -> int:
    """Run pytest by the command ``python``, with its report in ``report`` unless it dies; its exit status."""
    variables = {"OMP_NUM_THREADS": "1"} | os.environ
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    return subprocess.run([*python, "-m", "pytest", *options, *arguments], cwd=tree, env=variables).returncode


def test_name(case: ElementTree.Element) -> str:
    """The name by which pytest runs a test again: modules in folders, no classes. Modules that fail are named
    alone."""
    module, name = case.attrib["classname"], case.attrib["name"]
    return f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"


def outcomes(report: Path, *tags: str) -> Iterator[tuple[str, str]]:
    """(test, first line of the reason) of the tests with one of these outcomes."""
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in case:
            if outcome.tag in tags:
                yield test_name(case), (outcome.get("message") or "").partition("\n")[0]


def files(part: str, tree: Path) -> list[str]:
    """The modules of tests of a part."""
    found = [path for pattern in PARTS[part] for path in tree.glob(pattern) if path.name.startswith("test_")]
    return sorted(path.relative_to(tree).as_posix() for path in found)


def run_part(version: Version, part: str, tree: Path, commit: str) -> Result:
    """Run a part of the suite, and what fails of it once more. SystemExit if it was killed."""
    began, day = time.monotonic(), date.today().isoformat()
    if reason := version.why_not(part):
        return Result(commit, day, 0, 0, {}, [], {part: reason})
    version.results.mkdir(parents=True, exist_ok=True)
    python = version.python_for(part)
    report, alone = version.results / f"{part}.xml", version.results / f"{part}.alone.xml"
    status = pytest(python, files(part, tree), tree, report)
    seconds = round(time.monotonic() - began)
    if -status in (signal.SIGTERM, signal.SIGKILL):
        raise SystemExit(f"torch {version.spec}: {part} was killed")
    if not report.exists():
        died = {part: f"pytest ended with status {status} and no report"}
        return Result(commit, day, seconds, 0, died, [], {})
    first = dict(outcomes(report, "failure", "error"))
    failed = {name: why for name, why in first.items() if pytest(python, [name], tree, alone) != 0}
    skipped = dict(outcomes(report, "skipped"))
    tests = {test_name(case) for case in ElementTree.parse(report).iter("testcase")}
    failed_once = [name for name in first if name not in failed]
    passed = len(tests) - len(failed) - len(skipped)
    return Result(commit, day, seconds, passed, failed, failed_once, skipped)


def run_failures(version: Version, part: str, result: Result, tree: Path) -> Result:
    """Run what failed of an earlier commit, all together; what passes now is mended."""
    again = version.results / "again.xml"
    pytest(version.python_for(part), result.failed, tree, again)
    if not again.exists():
        return result
    ran = {test_name(case) for case in ElementTree.parse(again).iter("testcase")}
    skipped, stays = dict(outcomes(again, "skipped")), dict(outcomes(again, "failure", "error"))
    failed = {
        name: stays.get(name, why) for name, why in result.failed.items() if name not in ran or name in stays
    }
    mended = [name for name in result.failed if name not in failed and name not in skipped]
    return replace(result, failed=failed, skipped=result.skipped | skipped, mended=result.mended + mended)


def unfinished(version: Version, parts: Iterable[str], commit: str, again: bool) -> list[str]:
    """The parts without a result of this commit; with ``again``, without any, or with failures of an earlier
    one."""
    kept = {part: version.read(part) for part in parts}
    return [
        part
        for part, one in kept.items()
        if not one or one["commit"] != commit and (one["failed"] or not again)
    ]


def run_suite(version: Version, parts: Iterable[str], tree: Path, commit: str, again: bool) -> None:
    """Run these parts and keep what they come to."""
    for part in parts:
        print(f"torch {version.spec}: {part}", flush=True)
        kept = version.read(part)
        if again and kept:
            result = run_failures(version, part, Result(**kept), tree)
        else:
            result = run_part(version, part, tree, commit)
        version.write(part, asdict(result))


def passes(version: Version, parts: Iterable[str]) -> bool:
    """Whether all parts have results without a failure."""
    kept = [version.read(part) for part in parts]
    return all(one and not one["failed"] for one in kept)


# ---- the table


@dataclass
class Row:
    """A version with the results of its parts."""

    torch: str
    python: str
    parts: dict[str, Result]

    def key(self) -> list[list[int]]:
        return [[int(part) for part in one.partition("+")[0].split(".")] for one in (self.torch, self.python)]

    def cells(self) -> Iterator[object]:
        results = self.parts.values()
        yield self.torch
        yield self.python
        yield ", ".join(sorted({result.day for result in results}))
        yield ", ".join(part for part in PARTS if part not in self.parts) or "nothing"
        yield round(sum(result.seconds for result in results) / 60)
        yield sum(result.passed + len(result.mended) for result in results)
        yield sum(len(result.failed) for result in results)
        yield sum(len(result.skipped) for result in results)

    def notes(self) -> Iterator[str]:
        for result in self.parts.values():
            yield from (f"failed: `{name}`: {reason}" for name, reason in result.failed.items())
            yield from (f"mended: `{name}`" for name in result.mended)
            yield from (f"passed alone: `{name}`" for name in result.failed_once)
        reasons = Counter(reason for result in self.parts.values() for reason in result.skipped.values())
        yield from (f"skipped {count}: {reason}" for reason, count in reasons.items())


HEADER = """\
| torch | Python | day | not run | minutes | passed | failed | skipped |
|---|---|---|---|---:|---:|---:|---:|"""


def rows(folder: Path) -> list[Row]:
    """All that ``folder`` has results of, by torch, then by Python."""
    found = []
    for results in folder.glob("*.results"):
        version = Version(results.name.removesuffix(".results"), folder)
        parts = {part: Result(**version.read(part)) for part in PARTS if version.read(part)}
        if parts:
            found.append(Row(**version.read("names"), parts=parts))
    return sorted(found, key=Row.key)


def table(found: Iterable[Row]) -> str:
    """The results in Markdown: the counts, then by version what failed, what passed alone, and why tests
    skip."""
    lines = [HEADER]
    lines += ["| " + " | ".join(map(str, row.cells())) + " |" for row in found]
    for row in found:
        notes = list(row.notes()) or ["nothing failed"]
        lines += ["", f"## torch {row.torch}, Python {row.python}", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def page(found: Iterable[Row]) -> str:
    """The table with what it shows."""
    left_out = "\n".join(f"- `{folder}` {reason}." for folder, reason in LEFT_OUT.items())
    return f"""\
# The suite on versions of torch and Python, {date.today().isoformat()}

One extension under each version; torch is PyPI's build for Linux, on {platform.machine()} without a GPU.
`make test-versions` repeats it. What failed was run once more by itself: "failed" is what failed again, "passed alone"
what did not, and "mended" what passed after a change. Not part of it:

{left_out}

{table(found)}
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "versions", nargs="*", metavar="TORCH[@PYTHON]", help="as 2.10.0, 2.15.0@3.12, 2.15.0@/path"
    )
    parser.add_argument(
        "--pythons", nargs="*", default=[], help="of versions without an @: all of these, as 3.10 3.12"
    )
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="of the suite")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/versions", help="of environments and results"
    )
    parser.add_argument(
        "--again", action="store_true", help="of parts with an earlier commit's result, only failures"
    )
    parser.add_argument("--discard", action="store_true", help="remove each environment after its tests")
    parser.add_argument("--report", action="store_true", help="only show the results of earlier runs")
    parser.add_argument("--out", type=Path, help="a file for the table")
    return parser.parse_args()


def specs(versions: Iterable[str], pythons: list[str]) -> list[str]:
    """Every version with its own Python, or else with each of ``pythons``, or else without one."""
    found: list[str] = []
    for version in versions:
        found += [f"{version}@{python}" for python in pythons if "@" not in version] or [version]
    return found


def test(version: Version, parts: Iterable[str], tree: Path, commit: str, asked: argparse.Namespace) -> None:
    """Install one version and run these parts; where it cannot be installed, say so."""
    try:
        make_environment(version, tree)
        run_suite(version, parts, tree, commit, asked.again)
    except subprocess.CalledProcessError as error:
        print(f"torch {version.spec} cannot be installed: {error}", file=sys.stderr)
    if asked.discard:
        shutil.rmtree(version.home, ignore_errors=True)


def main() -> int:
    asked = arguments()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    versions = [Version(spec, folder) for spec in specs(asked.versions, asked.pythons)]
    if not asked.report:
        tree, commit = checkout(folder)
        for version in versions:
            if parts := unfinished(version, asked.parts, commit, asked.again):
                test(version, parts, tree, commit, asked)
    text = page(rows(folder))
    print(text)
    if asked.out:
        asked.out.write_text(text)
    return int(not all(passes(version, asked.parts) for version in versions))


if __name__ == "__main__":
    sys.exit(main())
