"""Python processes started by tests."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0  # for a script on ranks
GRACE_S = 5.0  # time for the other ranks of a script once one has failed
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "pytest",
]


def forking() -> ForkServerContext:
    """Return the context of processes that are forked from one with torch imported, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_python(
    *arguments: str | Path, cwd: Path | None = None, timeout_s: float = 600.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python and return its exit status and output. ``variables`` are added to the environment."""
    command, environment = [sys.executable, *map(str, arguments)], os.environ | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def output_of_python(
    *arguments: str | Path, cwd: Path | None = None, timeout_s: float = 600.0, **variables: str
) -> str:
    """Run Python and return its standard output. Asserts that the exit status is 0."""
    done = run_python(*arguments, cwd=cwd, timeout_s=timeout_s, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def run_ranks(
    arguments: list[list[object]], timeout_s: float = 600.0, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python on all ranks at once, each with its arguments. Processes that they leave are killed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, own)],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for own in arguments
    ]
    try:
        texts = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    done = zip(ranks, texts, strict=True)
    return [subprocess.CompletedProcess(rank.args, rank.returncode, *text) for rank, text in done]


def run_script(
    script: Path, *arguments: str, ranks: int = 2, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on forked ranks as torchrun does: an error of one rank ends the others.

    Returns the first exit status other than 0, and the output of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        variables |= {"TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo"}
        free.close()
        command = [str(script), *arguments]
        running = [
            forking().Process(target=_run_script, args=(folder, rank, command, cwd, variables))
            for rank in range(ranks)
        ]
        for process in running:
            process.start()
        status = 0
        while running and wait([process.sentinel for process in running], GRACE_S if status else LIMIT_S):
            ended = [process for process in running if process.exitcode is not None]
            running = [process for process in running if process not in ended]
            status = next((process.exitcode for process in ended if process.exitcode), status)
        hangs = running and not status
        for process in running:
            process.kill()
            process.join()
        assert not hangs, f"ranks still run after {LIMIT_S:g} s"
        texts = [(Path(folder) / name).read_text() for name in ("1", "2")]
        return subprocess.CompletedProcess(command, status, *texts)


def output_of_script(script: Path, *arguments: str, **options: Any) -> str:
    """Run a script on forked ranks and return what they print. Asserts that none fails."""
    done = run_script(script, *arguments, **options)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def _run_script(folder: str, rank: int, command: list[str], cwd: Path, variables: dict[str, str]) -> None:
    import torch

    for descriptor in (1, 2):
        file = os.open(f"{folder}/{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.argv, sys.path[:0] = command, [str(Path(command[0]).parent)]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves it out


def as_nobody(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked process without root's rights."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
