"""Ranks for tests: processes that stay alive between tests, with one gloo group per world size.

``@on_ranks(2)`` turns a module-level ``def test_x(rank, world_size, ...)`` into a pytest test. Both arguments
are optional. The body is sent by import path with its pickled arguments and runs on every rank. An exception
on a rank fails the test with that rank's traceback. If a rank dies or exceeds the timeout, the failure names
it and shows its stack. After any failure the processes are replaced: pending collectives may be left in their
group.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import settings
from tests.processes import forking
from tests.settings import PATIENCE
from tests.simulated_gpu import races

DEFAULT_TIMEOUT_S = 120.0  # on a busy machine a first test that imports or compiles much takes 20
START_TIMEOUT_S = 120.0 * PATIENCE
GRACE_S = 3.0  # time for the other ranks to finish once one has failed
STACK_WAIT_S = 2.0
EXIT_WAIT_S = 20.0  # limit for a process that has closed its pipe
LOG_TAIL_CHARS = 4000
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)
VIEWS = (pytest.param(True, id="orig"), pytest.param(False, id="flat"))
both_views = pytest.mark.parametrize("use_orig_params", VIEWS)


def device_type() -> str:
    """Return the device type of the rank tests: "cpu", or "cuda" with ``pytest --device cuda``."""
    return os.environ.get(settings.DEVICE, "cpu")


def device() -> Any:
    """Return the torch.device of this rank, also the default device. Ranks are assigned to the host's GPUs
    round-robin.
    """
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")
    )


class RankFailure(AssertionError):
    """An exception in a body on some rank. The message contains each rank's traceback."""


class RankHang(RankFailure):
    """A rank that exceeded the timeout or died. The message names it and shows its stack."""


@dataclass
class Outcome:
    """The outcome of a body on one rank: exactly one of a value, a skip reason and an error text."""

    value: Any = None
    skipped: str | None = None
    error: str | None = None
    headline: str = ""  # the error, in one line


@dataclass
class Rank:
    """A rank's process and the parent's end of its pipe."""

    index: int
    process: BaseProcess
    connection: Connection
    log: Path

    def describe_exit(self) -> str:
        code = self.process.exitcode
        return (
            f"died with {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:] if self.log.exists() else ""


# ----------------------------------------------------------------- the rank's side


def _body(module: str, name: str) -> Callable[..., Any]:
    found = getattr(importlib.import_module(module), name)
    return getattr(found, "rank_body", found)


@contextlib.contextmanager
def _nothing_unraisable() -> Iterator[None]:
    """Raise AssertionError if an exception in the body was only printed, as an exception in a finalizer is."""
    raised: list[str] = []

    def record(one: Any) -> None:
        if not inspect.isgenerator(
            one.object
        ):  # a range of torch's profiler in its FSDP1 raises when closed late
            raised.append(f"{one.err_msg or 'Exception ignored in'} {one.object!r}: {one.exc_value!r}")

    before, sys.unraisablehook = sys.unraisablehook, record
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert not raised, "\n".join(raised)


def _run_body(module: str, name: str, rank: int, world_size: int, kwargs: dict[str, Any]) -> Outcome:
    import torch

    torch.manual_seed(0)
    # reset state that the last body may have changed
    torch.set_default_device(device() if device_type() == "cuda" else None)
    try:
        with races.none_found(), _nothing_unraisable():
            body, own = _body(module, name), {"rank": rank, "world_size": world_size}
            asked = inspect.signature(body).parameters
            return Outcome(value=body(**kwargs, **{one: own[one] for one in own if one in asked}))
    except pytest.skip.Exception as skip:
        return Outcome(skipped=str(skip.msg))
    except BaseException as error:
        headline = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        return Outcome(error=traceback.format_exc(), headline=headline)


def _serve(index: int, world_size: int, port: int, log: str, path: list[str], connection: Connection) -> None:
    """Run a rank: join the group, then run bodies until the pipe closes."""
    import faulthandler
    import warnings
    from datetime import timedelta

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=False)
    sys.path[:] = path
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR", RANK=str(index), WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist
    from _pytest.config import _prepareconfig

    os.environ.pop("PYTEST_ADDOPTS", None)  # may hold options of tests/conftest.py
    _prepareconfig(["--noconftest", "-c", os.devnull])  # pytest's import hook: failing asserts show values
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, world_size, is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S)
    )
    backend = "gloo"
    if device_type() == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(index % torch.cuda.device_count())
        if torch.cuda.device_count() < world_size:
            from tests.cuda.nccl_on_one_gpu import share_one_gpu

            share_one_gpu(index)
    dist.init_process_group(
        backend, store=store, rank=index, world_size=world_size, timeout=timedelta(minutes=30)
    )
    gc.collect()
    gc.freeze()  # objects of imported modules: collections, and install(), which looks for units, pass over them
    connection.send(Outcome())
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        outcome = _run_body(module, name, index, world_size, kwargs)
        try:
            connection.send(outcome)
        except Exception:
            connection.send(
                Outcome(error=traceback.format_exc(), headline="the body's result cannot be pickled")
            )


# ----------------------------------------------------------------- pytest's side


@dataclass
class RankPool:
    """``world_size`` live processes in one gloo group. Started on first use, replaced after a failure."""

    world_size: int
    ranks: list[Rank] = field(default_factory=list)
    starts: int = 0
    _store: Any = None

    def start(self) -> None:
        import torch.distributed as dist

        context = forking()
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.starts += 1
        for index in range(self.world_size):
            here, there = context.Pipe()
            log = folder / f"rank{index}.log"
            arguments = (index, self.world_size, self._store.port, str(log), list(sys.path), there)
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank{index}of{self.world_size}"
            )
            process.start()
            there.close()
            self.ranks.append(Rank(index, process, here, log))
        self._collect("start of the ranks", START_TIMEOUT_S)

    def close(self) -> None:
        """Kill the processes: a rank inside a collective cannot react to a request."""
        for rank in self.ranks:
            rank.connection.close()
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.log.unlink(missing_ok=True)
        if self.ranks:
            self.ranks[0].log.parent.rmdir()
        self.ranks = []
        self._store = None

    def run(
        self,
        module: str,
        name: str,
        kwargs: dict[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S * PATIENCE,
    ) -> list[Any]:
        """Run ``module.name(rank, world_size, **kwargs)`` on all ranks and return the values by rank.

        Raises RankFailure if a rank raised, RankHang if one died or did not finish in ``timeout_s`` seconds.
        """
        try:
            if not self.ranks:
                self.start()
            for rank in self.ranks:
                rank.connection.send((module, name, kwargs or {}))
            outcomes = self._collect(f"{module}.{name}", timeout_s)
        except (
            BaseException
        ):  # also on an interrupt: pending answers must not be taken for those of the next body
            self.close()
            raise
        reasons = {outcome.skipped for outcome in outcomes}
        if None not in reasons:
            pytest.skip(" / ".join(sorted(str(reason) for reason in reasons)))
        if len(reasons) > 1:
            raise RankFailure(f"{module}.{name}: some ranks skipped and others did not: {reasons}")
        return [outcome.value for outcome in outcomes]

    def _collect(self, what: str, timeout_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(outcomes) < self.world_size:
            waiting = [rank for rank in self.ranks if rank.index not in outcomes]
            ready = wait([rank.connection for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if rank.connection in ready:
                    outcomes[rank.index] = self._receive(rank)
            if not failed and any(outcome.error for outcome in outcomes.values()):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        missing = [rank for rank in self.ranks if rank.index not in outcomes]
        if failed:
            raise RankFailure(self._failure_text(what, outcomes, missing))
        if missing:
            raise RankHang(self._hang_text(what, timeout_s, missing))
        return [outcomes[index] for index in range(self.world_size)]

    def _receive(self, rank: Rank) -> Outcome:
        try:
            return rank.connection.recv()
        except (EOFError, ConnectionResetError):
            rank.process.join(EXIT_WAIT_S)
            return Outcome(
                error=rank.log_tail() or "nothing logged", headline=f"the process {rank.describe_exit()}"
            )

    def _failure_text(self, what: str, outcomes: dict[int, Outcome], missing: list[Rank]) -> str:
        failed = {index: outcome for index, outcome in sorted(outcomes.items()) if outcome.error}
        parts = [
            f"{what} failed on rank {index} of {self.world_size}: {one.headline}"
            for index, one in failed.items()
        ]
        parts += [f"--- rank {index}\n{one.error}" for index, one in failed.items()]
        if missing:
            parts.append(self._hang_text(what, GRACE_S, missing))
        return "\n".join(parts)

    def _hang_text(self, what: str, seconds: float, missing: list[Rank]) -> str:
        for rank in missing:
            os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(STACK_WAIT_S)
        names = ", ".join(str(rank.index) for rank in missing)
        parts = [f"{what}: rank {names} of {self.world_size} still running after {seconds:g} s"]
        parts += [f"--- rank {rank.index}: log and stack\n{rank.log_tail()}" for rank in missing]
        return "\n".join(parts)


_pools: dict[tuple[int, str], RankPool] = {}


def pool(world_size: int, label: str = "") -> RankPool:
    """Return this session's pool for a world size. Tests that change process-wide state pass a label."""
    return _pools.setdefault((world_size, label), RankPool(world_size))


def close_pools(label: str | None = None) -> None:
    """End this session's rank processes: all of them, or those with a label."""
    for (_, name), one in _pools.items():
        if label is None or name == label:
            one.close()


def on_ranks(
    world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S, label: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn ``body`` into a test that runs on ranks. pytest supplies its arguments other than ``rank`` and
    ``world_size``, which are pickled. Bodies with the same label share processes.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        asked = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            pool(world_size, label).run(body.__module__, body.__name__, arguments, timeout_s * PATIENCE)

        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one for one in asked if one.name not in ("rank", "world_size")]
        )
        test.rank_body = body  # type: ignore[attr-defined]
        return pytest.mark.timeout(timeout_s * PATIENCE + START_TIMEOUT_S)(test)

    return decorate
