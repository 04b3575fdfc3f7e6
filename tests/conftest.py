"""Makes the tests importable by name, chooses tests and their device, and ends the rank processes with the
session."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parent.parent)

if ROOT not in sys.path:  # rank processes import the test modules by name
    sys.path.insert(0, ROOT)

from tests import ranks  # noqa: E402  (needs the path above)
from tests.simulated_gpu import not_on_cuda  # noqa: E402


@pytest.fixture(scope="module")
def units_left_by_others_unseen() -> Iterator[None]:
    """``install()`` does not count the units of torch's FSDP1 that are there already.

    They keep themselves alive after a forward without a backward, through references that no collector sees.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp_c")
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the models of rank tests are"
    )
    group.addoption(
        "--part", type=int, default=1, metavar="N", help="of each file one test in N, always the same ones"
    )
    group.addoption("--rest", type=int, metavar="N", help="what --part N leaves out")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[ranks.DEVICE_SETTING] = config.getoption("device")
    if not is_worker(config):  # what tests, their ranks and commands leave lies in one folder
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fsdp_c-tests-")
        Path(tempfile.tempdir).chmod(0o755)  # some tests become another user


def is_worker(config: pytest.Config) -> bool:
    """Of pytest-xdist."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rest = config.getoption("rest")
    kept = set(items) - _part(items, rest) if rest else _part(items, config.getoption("part"))
    dropped = [item for item in items if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item in kept]
    if config.getoption("device") == "cuda":
        not_on_cuda.mark(items)


def _part(items: list[pytest.Item], part: int) -> set[pytest.Item]:
    """Of each file one test in ``part``, and at least one: those whose names have the least checksums."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kept: set[pytest.Item] = set()
    for of_file in files.values():
        of_file.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        kept.update(of_file[: -(-len(of_file) // part)])
    return kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The folder of what tests have left stays where one has failed."""
    ranks.close_pools()
    if not is_worker(session.config) and not session.testsfailed:
        # after multiprocessing has removed its own, at the interpreter's end
        Finalize(None, shutil.rmtree, args=[tempfile.gettempdir(), True], exitpriority=-200)
