"""Out-of-memory errors in all-gathers and reductions outside of steps. torch's error names the unit and
remedies, no memory leaks, and the next operation works.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.cuda.test_parity import GPU
from tests.cuda.test_step import WIDTH, large, one_of_four, requested, step

__all__ = ["one_of_four"]

MORE_NBYTES = 2 * 2**20  # added per trial: the smallest request of torch's allocator to the driver


def add_up(model: Any) -> None:
    with model.no_sync():
        model(torch.randn(64, WIDTH, device=GPU)).square().mean().backward()


def summon(model: Any) -> None:
    with FSDP.summon_full_params(model, writeback=False):
        pass


def summon_gradients(model: Any) -> None:
    model(torch.randn(64, WIDTH, device=GPU)).square().mean().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        pass


BODIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no_sync": (add_up, r"is in the backward of Linear at '\d\.0'\. Smaller units"),
    "summon_full_params": (summon, r"gathers Linear at '\d\.0'\. offload_to_cpu=True"),
    "with gradients": (summon_gradients, r"gathers Linear at '\d\.0'\. offload_to_cpu=True"),
    "state_dict": (FSDP.state_dict, r"gathers Linear at '\d\.0' and 1 unit after it\. offload_to_cpu=True"),
    "iter_full_params": (
        lambda model: list(fsdp_c.iter_full_params(model)),
        r"gathers Linear at '\d\.0'\. off",
    ),
}


def settled(expected: int) -> int:
    """Wait until autograd's thread has freed a backward that raised, and return the requested bytes."""
    deadline = time.monotonic() + 10.0
    while requested() != expected and time.monotonic() < deadline:
        gc.collect()
    return requested()


def said_of(model: Any, body: Callable[[Any], None]) -> list[str]:
    """Run the body with a little more memory each time until it succeeds, and return the messages of its
    errors.
    """
    said: list[str] = []
    total = torch.cuda.get_device_properties(GPU).total_memory
    step(model)
    gc.collect()
    torch.cuda.empty_cache()
    base, reserved = requested(), torch.cuda.memory_reserved()
    for room in range(0, 2**28, MORE_NBYTES):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((reserved + room) / total)
        try:
            body(model)
            return said
        except torch.OutOfMemoryError as error:
            said.append(str(error))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            model.zero_grad()
            gc.collect()
        # gradients of a backward that raised stay until the next forward
        assert body is add_up or settled(base) == base
        step(model)
        assert settled(base) == base
    raise AssertionError("there is never room enough")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("one_of_four")
def test_out_of_memory_error_outside_of_steps_names_unit_rank_and_remedy(name: str) -> None:
    body, told = BODIES[name]
    said = said_of(large(), body)
    found = [
        re.search(rf"out of memory.*\nrank 0\b.*: memory ran out while this rank {told}", one) for one in said
    ]
    if name == "no_sync" and len(said) < 3:
        pytest.skip("the sums found room in what tests before had left of the allocator's segments")
    assert any(found), said
    assert all(found) or name in ("no_sync", "with gradients"), (
        said
    )  # these run the model, whose activations need more
