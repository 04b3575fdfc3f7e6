"""Programs on real ranks of the simulated GPU, whose harness looks for races and memory that is given back early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests import ranks, simulated_gpu
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not simulated_gpu.is_on(), reason="needs the simulated GPU: python -m tests.simulated_gpu"
)

PROGRAMS = ["refuse collectives", "refuse collectives, bf16", "raise in forward", "raise in backward"]


@contextmanager
def on_gpu() -> Iterator[Any]:
    """Models and tensors are on the GPU; yields the group of all ranks."""
    import torch

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(ranks.DEVICE_SETTING, "cuda")
        torch.set_default_device(ranks.device())
        try:
            yield nccl_group()
        finally:
            torch.set_default_device(None)


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2, label="races")
def test_steps_that_end_early_leave_the_next_in_order(rank: int, world_size: int, program: str) -> None:
    from tests.races.scenarios import SCENARIOS, Trainer

    body, arguments = SCENARIOS[program]
    with on_gpu() as group:
        body(Trainer(rank, process_group=group, **arguments))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2, label="races")
def test_offload_gives_the_same_numbers(rank: int, world_size: int, strategy: str) -> None:
    """By an optimizer that divides by nothing, which a CPU does otherwise than a GPU."""
    import torch
    from torch.distributed.fsdp import CPUOffload

    from tests.races.scenarios import BF16, Trainer, accumulate

    def train(group: Any, offload: bool) -> list[Any]:
        options = {"strategy": strategy, "cpu_offload": CPUOffload(offload), "mixed_precision": BF16}
        trainer = Trainer(rank, process_group=group, **options)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.125)
        accumulate(trainer)
        return [param.detach().cpu() for param in trainer.model.parameters()]

    with on_gpu() as group:
        assert all(torch.equal(one, other) for one, other in zip(train(group, True), train(group, False), strict=True))
