"""Measurements on gloo ranks of this machine, one process per rank."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def status(name: str, process: int | str = "self") -> float:
    """Return a field of /proc/PID/status, in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def shown(values: list[float], digits: int = 0) -> str:
    """Return the least value, and the median in brackets."""
    return f"{min(values):.{digits}f} ({statistics.median(values):.{digits}f})" if values else ""


def told_by_ranks(body: Callable[..., None], ranks: int, *arguments: Any) -> tuple[str, ...]:
    """Run ``body(rank, told, *arguments)`` on ranks and return the values that rank 0 sends into the pipe
    ``told``. Empty if a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    processes = [
        context.Process(target=_join, args=(body, rank, ranks, port, there, arguments))
        for rank in range(ranks)
    ]
    for one in processes:
        one.start()
    there.close()
    try:
        told: tuple[str, ...] = here.recv()
    except EOFError:
        told = ()
    for one in processes:
        one.join()
    return told


def _join(
    body: Callable[..., None], rank: int, ranks: int, port: int, told: Any, arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    body(rank, told, *arguments)
