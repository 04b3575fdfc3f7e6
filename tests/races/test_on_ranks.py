"""Programs on real ranks of the simulated GPU, checked for races and for memory that is freed early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload

from fsdp_c.optim import WholeParameters
from fsdp_c.optim.whole_parameters import _SideStream
from tests import ranks, settings
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.races.programs import HYBRID, IN_PART, PROGRAMS, set_up
from tests.races.scenarios import Trainer, plain
from tests.ranks import on_ranks
from tests.simulated_gpu import races

OF_FOUR = [*HYBRID, *IN_PART]  # programs with replicas of shards need four ranks
OF_TWO = [program for program in PROGRAMS if program not in OF_FOUR]


@contextmanager
def on_gpu() -> Iterator[Any]:
    """Put models and tensors on the GPU, and yield the group of all ranks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(settings.DEVICE, "cuda")
        torch.set_default_device(ranks.device())
        try:
            yield nccl_group()
        finally:
            torch.set_default_device(None)


def run(program: str, rank: int) -> None:
    with on_gpu() as group, set_up(program) as (body, arguments):
        groups = {} if program in OF_FOUR else {"process_group": group}
        body(Trainer(rank, **(groups | arguments)))


@pytest.mark.parametrize("program", OF_TWO)
@on_ranks(2, label="races")
def test_programs_are_in_order(rank: int, program: str) -> None:
    run(program, rank)


@pytest.mark.parametrize("program", OF_FOUR)
@on_ranks(4, label="races")
def test_hybrid_programs_are_in_order(rank: int, program: str) -> None:
    run(program, rank)


def step_whole_parameters(rank: int, group: Any, offload: bool) -> None:
    """Step with one bucket per parameter, so that each transfer overlaps with the computation of another
    bucket.
    """
    trainer: Any = Trainer(rank, process_group=group, cpu_offload=CPUOffload(offload))
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "bucket_nbytes": 1}
    trainer.optimizer = WholeParameters(trainer.model, torch.optim.SGD, **options)
    plain(trainer)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2, label="races")
def test_whole_parameters_move_in_order(rank: int, offload: bool) -> None:
    with on_gpu() as group, races.none_found():
        step_whole_parameters(rank, group, offload)


@pytest.mark.parametrize("missing", ["of the computation", "of the movement", "of a gather"])
@on_ranks(2, label="races")
def test_a_wait_of_whole_parameters_that_is_left_out_is_found(rank: int, missing: str) -> None:
    moving = _SideStream.moving
    with on_gpu() as group, pytest.MonkeyPatch.context() as patched:
        if missing == "of the computation":
            patched.setattr(_SideStream, "wait", lambda self, event=None: None)
        elif missing == "of the movement":
            patched.setattr(_SideStream, "moving", lambda self, after_computation=False: moving(self))
        else:
            patched.setattr(_SideStream, "event", lambda self: torch.cuda.Event())
        with pytest.raises(AssertionError, match="race"), races.none_found():
            step_whole_parameters(rank, group, offload=False)
    races.forget()
