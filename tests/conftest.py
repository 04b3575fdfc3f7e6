"""Make the tests importable by name, choose tests and their settings, and end the rank processes with the
session."""

from __future__ import annotations

import argparse
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

if ROOT not in sys.path:  # rank processes import test modules by name
    sys.path.insert(0, ROOT)

from tests.simulated_gpu import not_on_cuda  # noqa: E402  (needs the path above)


@pytest.fixture(scope="module")
def units_left_by_others_unseen() -> Iterator[None]:
    """Hide existing units of torch's FSDP1 from ``install()``, which counts them.

    A unit with a forward but no backward keeps itself alive through references that the garbage collector
    does not see.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp_c")
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the models in rank tests"
    )
    group.addoption(
        "--exhaustive",
        action="store_const",
        const="1",
        help="test every fault and every wait, not only a part",
    )
    group.addoption(
        "--width", type=int, metavar="N", help="width of the tests' models: 5, or 640 for large ones"
    )
    group.addoption(
        "--part",
        type=int,
        metavar="N",
        help="run one test in N of each file: a fixed choice, without tests marked slow",
    )
    group.addoption("--rest", type=int, metavar="N", help="run the tests that --part N leaves out")
    group.addoption(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="run the Ith of N parts of the chosen tests",
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise argparse.ArgumentTypeError(f"a shard is I/N with I from 1 to N, not {text}")
    return int(index), int(count)


@pytest.hookimpl(tryfirst=True)  # before conftest.py files of folders, which import test modules
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "slow: excluded by --part N, because it starts torchrun, or takes over 10 s and similar tests exist",
    )
    assert "tests.settings" not in sys.modules  # it reads the environment at import
    for name in ("device", "exhaustive", "width"):
        if (value := config.getoption(name)) is not None:
            os.environ[f"FSDP_C_TEST_{name.upper()}"] = str(value)
    if not is_worker(config):  # one folder for all files of tests, ranks and commands
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fsdp_c-tests-")
        Path(tempfile.tempdir).chmod(0o755)  # some tests change to another user


def is_worker(config: pytest.Config) -> bool:
    """Return True in a worker process of pytest-xdist."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = set(items)
    if part := config.getoption("part"):
        kept = _part(items, part)
    elif rest := config.getoption("rest"):
        kept -= _part(items, rest)
    index, count = config.getoption("shard")
    kept = {item for item in kept if _checksum(item) % count == index - 1}
    dropped = [item for item in items if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item in kept]
    if config.getoption("device") == "cuda":
        not_on_cuda.mark(items)


def _part(items: list[pytest.Item], part: int) -> set[pytest.Item]:
    """Return one test in ``part`` of each file, at least one, without tests marked slow.

    The tests with the smallest checksums of their names are chosen, so the choice is stable.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            files.setdefault(item.path, []).append(item)
    kept: set[pytest.Item] = set()
    for of_file in files.values():
        of_file.sort(key=_checksum)
        kept.update(of_file[: -(-len(of_file) // part)])
    return kept


def _checksum(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the ranks, and remove the session's temporary folder unless a test has failed."""
    from tests import ranks  # it reads the settings at import

    ranks.close_pools()
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("shard") != (1, 1):
        session.exitstatus = pytest.ExitCode.OK  # the tests are in other shards
    if not is_worker(session.config) and not session.testsfailed:
        # runs after multiprocessing has removed its own folder at exit
        Finalize(None, shutil.rmtree, args=[tempfile.gettempdir(), True], exitpriority=-200)
