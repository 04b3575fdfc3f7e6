"""What the device promises: late collectives show by values, calls go wrong where that is asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.ranks import on_ranks
from tests.real_cuda.programs import SLOW, disturb, run


@on_ranks(2, 180.0)
def test_what_does_not_wait_for_a_late_collective_reads_what_was_there(rank: int) -> None:
    torch.cuda.set_device(rank)
    group, values = nccl_group(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    disturb(SLOW, ms=500)
    work = dist.all_reduce(values, group=group, async_op=True)
    too_early = values.clone()
    work.wait()
    in_order = values.clone()
    assert too_early.tolist() == [1.0] * 4
    assert in_order.tolist() == [2.0] * 4


@on_ranks(2, 180.0)
def test_an_event_is_over_once_the_collective_before_it_is(rank: int) -> None:
    torch.cuda.set_device(rank)
    group, values, event = nccl_group(), torch.ones(4, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    disturb(SLOW, ms=500)
    dist.all_reduce(values, group=group, async_op=True).wait()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_nan_is_found_where_the_group_looks_for_it() -> None:
    for status, said in run("nan", TORCH_NCCL_NAN_CHECK="1"):
        assert status != 0
        assert "numbers pass" in said and "NaN passes" not in said
        assert "device-side assert triggered" in said
    assert all(status == 0 and "NaN passes" in said for status, said in run("nan", TORCH_NCCL_NAN_CHECK="0"))
