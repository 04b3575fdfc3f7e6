"""The suite on other versions of torch and Python: ``python -m tests.versions 2.10.0 2.15.0@3.12``.

A version is one of torch, with one of Python after "@" or else this one's. Each gets an environment of its own, made
with ``pip install torch==VERSION`` and kept for the next time: 5 to 7 GB, as PyPI's builds are for CUDA. What is tested
is the working tree, with the one extension that is built in it. Tests that fail are run once more, each alone.

At the end, and with ``--report`` alone, one table shows all that the folder of environments has results of.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ("requirements/base.txt", "requirements/dev.txt")
SUITE = ("tests", "--ignore", "tests/clients")


@dataclass
class Result:
    """What the suite came to under one version of torch and Python; failures and skips with the reason's first line."""

    torch: str
    python: str
    day: str
    minutes: int
    passed: int
    failed: dict[str, str]
    failed_once: list[str]  # and passed alone
    skipped: dict[str, str]


def interpreter(version: str) -> str:
    """A Python of ``version``, as "3.12", from the path or from pyenv, or the one at a path. SystemExit if none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [version, f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
    for candidate in candidates:
        found = shutil.which(candidate)  # perhaps a shim of pyenv, which may refuse to run
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise SystemExit(f"no Python {version} found: put python{version} on the path, or write its path after the @")


def place(spec: str, folder: Path, suffix: str = "") -> Path:
    """Where the environment for ``spec`` stands, and, with a suffix, a file about it."""
    return folder / (spec.replace("/", "_") + suffix)


def requirements() -> list[str]:
    """What the tests need beside torch."""
    lines = [line for name in REQUIREMENTS for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "-r", "torch=="))]


def environment(spec: str, folder: Path) -> Path:
    """The Python of the environment for ``spec``, which is made where it does not stand yet."""
    torch_version, _, python_version = spec.partition("@")
    home = place(spec, folder)
    python = home / "bin/python"
    if not python.exists():
        maker = interpreter(python_version) if python_version else sys.executable
        subprocess.run([maker, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", f"torch=={torch_version}"]
    subprocess.run([*install, *requirements()], check=True)
    for packages in home.glob("lib/python*/site-packages"):
        (packages / "fsdp_c_working_tree.pth").write_text(f"{ROOT}\n")
    return python


def pytest(python: Path, arguments: Iterable[str], report: Path) -> int:
    """Run pytest under ``python``, with its report in ``report``; its exit status."""
    variables = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    report.unlink(missing_ok=True)
    status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    if not report.exists():
        raise SystemExit(f"{python}: pytest ended without a report")
    return status


def test_name(case: ElementTree.Element) -> str:
    """The name by which pytest runs a test again: modules in folders, no classes."""
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def outcomes(report: Path, *tags: str) -> Iterator[tuple[str, str]]:
    """(test, first line of the reason) of the tests with one of these outcomes."""
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in case:
            if outcome.tag in tags:
                yield test_name(case), (outcome.get("message") or "").partition("\n")[0]


def run_suite(spec: str, folder: Path) -> Result:
    """Run the suite, and what fails of it once more, under the environment for ``spec``."""
    python = environment(spec, folder)
    ask = "import platform, torch; print(torch.__version__, platform.python_version())"
    versions = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    print(f"torch {versions[0]}, Python {versions[1]}", flush=True)
    began = time.monotonic()
    report, again = place(spec, folder, ".xml"), place(spec, folder, ".again.xml")
    pytest(python, SUITE, report)
    minutes = round((time.monotonic() - began) / 60)
    first = dict(outcomes(report, "failure", "error"))
    failed = {name: reason for name, reason in first.items() if pytest(python, [name], again) != 0}
    total = sum(1 for _ in ElementTree.parse(report).iter("testcase"))
    skipped = dict(outcomes(report, "skipped"))
    passed = total - len(failed) - len(skipped)
    failed_once = [name for name in first if name not in failed]
    return Result(*versions, date.today().isoformat(), minutes, passed, failed, failed_once, skipped)


def version_key(result: Result) -> list[list[int]]:
    """By torch, then by Python."""
    return [[int(part) for part in one.partition("+")[0].split(".")] for one in (result.torch, result.python)]


def table(results: Iterable[Result]) -> str:
    """The results in Markdown: the counts, then by version what failed, what passed alone, and why tests skip."""
    ordered = sorted(results, key=version_key)
    lines = ["| torch | Python | day | minutes | passed | failed | skipped |", "|---|---|---|---:|---:|---:|---:|"]
    for one in ordered:
        counts = (one.minutes, one.passed, len(one.failed), len(one.skipped))
        lines.append("| " + " | ".join(map(str, (one.torch, one.python, one.day, *counts))) + " |")
    for one in ordered:
        lines += ["", f"torch {one.torch}, Python {one.python}:", ""]
        lines += [f"- failed: `{name}`: {reason}" for name, reason in one.failed.items()]
        lines += [f"- passed alone: `{name}`" for name in one.failed_once]
        lines += [f"- skipped {count}: {reason}" for reason, count in Counter(one.skipped.values()).items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="TORCH[@PYTHON]", help="as 2.10.0, 2.15.0@3.12, or 2.15.0@/path")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions", help="of environments and results")
    parser.add_argument("--report", action="store_true", help="only show the results of earlier runs")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for spec in [] if arguments.report else arguments.versions:
        result = run_suite(spec, arguments.folder)
        place(spec, arguments.folder, ".json").write_text(json.dumps(asdict(result), indent=2))
        failed |= bool(result.failed)
    print(table(Result(**json.loads(file.read_text())) for file in arguments.folder.glob("*.json")))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
