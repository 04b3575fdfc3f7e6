"""Fails what leaves a race, or memory that was given back early, behind on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulated_gpu import is_on


@contextmanager
def none_found() -> Iterator[None]:
    """Raises AssertionError if the race detector finds anything meanwhile; nothing without the device."""
    if not is_on():
        yield
        return
    import simulated_gpu

    simulated_gpu.reports()
    yield
    found = simulated_gpu.reports()
    assert not found, "on the simulated GPU:\n" + "\n".join(found)


def forget() -> None:
    """What was found so far is not ours: torch's FSDP1 has races (NO_SHARD with CPU offload, gathers by
    hand).

    Nor is what others will do with the memory that it leaves.
    """
    if is_on():
        import simulated_gpu
        import torch

        torch.cuda.synchronize()
        simulated_gpu.reports()
