"""The suite on other versions of torch and Python: ``python -m tests.versions 2.10.0 2.15.0@3.12``.

A version is one of torch, optionally with a version of Python after "@". The default is each of
``--pythons``, or else the running Python. Each gets its own environment by ``pip install torch==VERSION``: 5
to 7 GB if PyPI's build is for CUDA.

The last commit is tested, in its own checkout with one extension for all versions. Failed tests are run once
more, each alone. ``--out`` writes a table of all versions, with failures and the reasons of skipped tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ("requirements/dev.txt",)
SUITE = (
    "tests/unit",
    "tests/test_architecture.py",
    "tests/native",
    "tests/distributed",
    "tests/parity",
    "tests/faults",
)
ON_CUDA_BUILD = "tests/cuda"  # without a GPU (docs/testing.md); needs a torch of CUDA 13, and nvcc
HEADER = "| torch | Python | day | passed | failed | skipped |\n|---|---|---|---:|---:|---:|"


def checkout(folder: Path) -> Path:
    """Check out the last commit and build its extension."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
    return tree


def home_of(spec: str, folder: Path) -> Path:
    return folder / spec.replace("/", "_")


def install(python: Path, torch: str, names: Iterable[str] = REQUIREMENTS) -> None:
    """Install the requirements in these files, with this torch. "===" excludes builds with a local label such
    as 2.13.0+cpu.
    """
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    others = [line for line in lines if line and not line.startswith(("#", "-r", "torch=="))]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, f"torch==={torch}", *others], check=True)


def make_environment(spec: str, folder: Path, tree: Path) -> Path:
    """Create the environment: its Python, torch, the other requirements, and ``tree`` on its path. A file
    ``made`` marks it as complete.
    """
    home, (torch, _, version) = home_of(spec, folder), spec.partition("@")
    python = home / "bin/python"
    if not python.exists():
        maker = (shutil.which(version) or shutil.which(f"python{version}")) if version else sys.executable
        if maker is None:
            raise SystemExit(
                f"no Python {version} found: put python{version} on the path, or write its path after the @"
            )
        subprocess.run([maker, "-m", "venv", str(home)], check=True)
    install(python, torch)
    for packages in home.glob("lib/python*/site-packages"):
        (packages / "fsdp_c_checkout.pth").write_text(f"{tree}\n")
    (home / "made").touch()
    return python


def outcomes(report: Path, *tags: str) -> Iterator[tuple[str, str]]:
    """Yield (test, first line of the reason) of the tests with one of these outcomes."""
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.attrib["classname"], case.attrib["name"]
        for outcome in case:
            if outcome.tag in tags:
                test = f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"
                yield test, (outcome.get("message") or "").partition("\n")[0]


def run(
    python: list[str], tests: list[str], tree: Path, report: Path
) -> tuple[int, dict[str, str], dict[str, str]]:
    """Run the tests and return the number of passed ones, the failures that persist, and the skips, with
    reasons.
    """
    options = ["-q", "-p", "no:cacheprovider", "--timeout=1800"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ

    def pytest(*arguments: str) -> int:
        command = [*python, "-m", "pytest", *options, *arguments]
        return subprocess.run(command, cwd=tree, env=environment).returncode

    status = pytest(f"--junitxml={report}", *tests)
    if not report.exists():
        return 0, {" ".join(tests): f"pytest ended with status {status} and no report"}, {}
    failed = {name: why for name, why in outcomes(report, "failure", "error") if pytest(name) != 0}
    skipped = dict(outcomes(report, "skipped"))
    count = sum(1 for _ in ElementTree.parse(report).iter("testcase"))
    return count - len(failed) - len(skipped), failed, skipped


def test(spec: str, folder: Path, tree: Path) -> tuple[str, list[str], bool]:
    """Return the version's row of the table, its notes, and True if nothing failed."""
    home, python = home_of(spec, folder), make_environment(spec, folder, tree)
    ask = "import platform, torch; print(torch.__version__, platform.python_version(), torch.version.cuda)"
    torch, version, cuda = subprocess.check_output([python, "-c", ask], text=True).split()
    passed, failed, skipped = run([str(python)], list(SUITE), tree, home / "report.xml")
    if cuda.startswith("13.") and shutil.which("nvcc"):
        settings = ["FAKE_CUDA_LATE=1", f"FAKE_CUDA_TORCH={spec}", f"FAKE_CUDA_FOLDER={folder}"]
        on_cuda = ["env", *settings, sys.executable, "-m", "tests.real_cuda"]
        more = run(on_cuda, [ON_CUDA_BUILD], tree, home / "cuda.xml")
        passed, failed, skipped = passed + more[0], failed | more[1], skipped | more[2]
    notes = [f"failed: `{name}`: {why}" for name, why in failed.items()]
    notes += [f"skipped {count}: {why}" for why, count in Counter(skipped.values()).items()]
    cells = (torch, version, date.today().isoformat(), passed, len(failed), len(skipped))
    return (
        f"| {' | '.join(map(str, cells))} |",
        [f"- torch {torch}, Python {version}: {each}" for each in notes],
        not failed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "versions", nargs="*", metavar="TORCH[@PYTHON]", help="such as 2.10.0, 2.15.0@3.12, 2.15.0@/path"
    )
    parser.add_argument(
        "--pythons", nargs="*", default=[], help="versions of Python for each torch without an @"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/versions", help="folder for environments"
    )
    parser.add_argument("--discard", action="store_true", help="remove each environment after its tests")
    parser.add_argument("--out", type=Path, help="write the table here")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tree, passes = checkout(folder), True
    rows: list[str] = []
    notes: list[str] = []
    for version in asked.versions:
        for spec in [f"{version}@{one}" for one in asked.pythons if "@" not in version] or [version]:
            row, of_version, is_sound = test(spec, folder, tree)
            rows, notes, passes = [*rows, row], [*notes, *of_version], passes and is_sound
            text = "\n".join(
                ["# The suite on versions of torch and Python", "", HEADER, *rows, "", *notes, ""]
            )
            print(text)
            if asked.out:
                asked.out.write_text(text)
            if asked.discard:
                shutil.rmtree(home_of(spec, folder), ignore_errors=True)
    return int(not passes)


if __name__ == "__main__":
    sys.exit(main())
