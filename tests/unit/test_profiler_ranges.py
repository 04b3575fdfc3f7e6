"""A step's ranges in torch's profiler have upstream's names, and exist only while a profiler is on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as UpstreamFSDP

from fsdp_c import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp_c.wrap import ModuleWrapPolicy
from tests.collectives import fake_ranks

NAME = "FullyShardedDataParallel"


_group = fake_ranks(0, 2)


UNITS, CALLS = 3, 4  # units with parameters, and forwards of a step, the root's included


def ranges_of_a_step(fsdp: type = FullyShardedDataParallel, **arguments: object) -> dict[str, int]:
    model = fsdp(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        **arguments,
    )
    model(torch.randn(2, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(2, 4)).sum().backward()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith(NAME)}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_orig_params": True, "limit_all_gathers": False},
        {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"backward_prefetch": None, "sharding_strategy": ShardingStrategy.FULL_SHARD},
    ],
    ids=["default", "no limit", "prefetch", "no prefetch"],
)
def test_a_step_shows_upstreams_ranges_as_often_as_upstream(arguments: dict[str, Any]):
    """Two ranges differ: the root's pre-forward range appears for the root only, and the limiter's at every
    all-gather.
    """
    theirs, ours = ranges_of_a_step(UpstreamFSDP, **arguments), ranges_of_a_step(**arguments)
    assert theirs.pop(f"{NAME}._root_pre_forward") == CALLS and ours.pop(f"{NAME}._root_pre_forward") == 1
    assert bool(theirs.pop(f"{NAME}.rate_limiter", 0)) == bool(ours.pop(f"{NAME}.rate_limiter", 0))
    assert ours == theirs


def test_limiter_has_its_range_at_each_gather_once_units_have_been_freed():
    assert ranges_of_a_step()[f"{NAME}.rate_limiter"] == 2 * UNITS
    assert f"{NAME}.rate_limiter" not in ranges_of_a_step(limit_all_gathers=False)


def test_ranges_end_with_the_profiler():
    """A profiler that is switched on between two forwards records the second one only."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
        counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith(NAME)}
        assert counts[f"{NAME}._to_kwargs"] == counts[f"{NAME}._pre_forward"] == 1
