"""Two jobs that save into one folder, as when rank 0 of an old job outlives its restart, and a reader."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from tests.checkpoints import loaded_version, save


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads warns; the threads are idle
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield child
        assert os.waitpid(child, 0)[1] == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise


@pytest.mark.parametrize("exists", [False, True])
def test_a_stopped_writer_is_named_and_its_save_continues(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    if exists:
        save(path, 0)

    def stop_inside_a_save() -> None:
        write = checkpoint.writing.write_file

        def stopping(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return write(*arguments)

        checkpoint.writing.write_file = stopping
        save(path, 1)

    with forked(stop_inside_a_save) as child:
        os.waitpid(child, os.WUNTRACED)
        with pytest.raises(CheckpointError, match=f"process {child} on .* is saving there"):
            save(path, 2)
        assert not exists or loaded_version(path) == 0
        os.kill(child, signal.SIGCONT)
        while os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED:
            os.kill(child, signal.SIGCONT)  # before each file of rank 0's
    assert loaded_version(path) == 1
    save(path, 2)
    assert loaded_version(path) == 2 and os.listdir(tmp_path) == ["ckpt"]
