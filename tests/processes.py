"""Python processes started by tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
