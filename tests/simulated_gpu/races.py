"""Race and early-free detection of the simulated GPU, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulated_gpu import is_on


@contextmanager
def none_found() -> Iterator[None]:
    """Raise AssertionError if the race detector finds anything in the body. No effect without the device."""
    if not is_on():
        yield
        return
    import simulated_gpu

    simulated_gpu.reports()
    yield
    found = simulated_gpu.reports()
    assert not found, "on the simulated GPU:\n" + "\n".join(found)


def forget() -> None:
    """Drop the findings so far: torch's FSDP1 has races (NO_SHARD with CPU offload, all-gathers by hand).

    Synchronizing first also keeps later uses of torch's memory from being reported.
    """
    if is_on():
        import simulated_gpu
        import torch

        torch.cuda.synchronize()
        simulated_gpu.reports()
