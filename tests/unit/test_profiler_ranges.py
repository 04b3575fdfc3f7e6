"""D-130: the ranges of a step in torch's profiler have upstream's names, and only while a profiler is on."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import BackwardPrefetch, FullyShardedDataParallel
from fsdp_c.wrap import ModuleWrapPolicy

NAME = "FullyShardedDataParallel"


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranges_of_a_step(**arguments: object) -> dict[str, int]:
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        **arguments,
    )
    model(torch.randn(2, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(2, 4)).sum().backward()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith(NAME)}


def test_a_step_shows_upstreams_ranges_once_per_unit():
    assert ranges_of_a_step() == {
        f"{NAME}.forward": 4,
        f"{NAME}._root_pre_forward": 1,
        f"{NAME}._pre_forward": 4,
        f"{NAME}._post_forward": 4,
        f"{NAME}._pre_backward_hook": 4,
        f"{NAME}._pre_backward_prefetch": 3,
        f"{NAME}._post_backward_hook": 3,
    }


def test_prefetch_modes_have_ranges_of_their_own():
    ranges = ranges_of_a_step(forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert ranges[f"{NAME}._pre_forward_prefetch"] == 3
    assert ranges[f"{NAME}._post_backward_prefetch"] == 3
    assert f"{NAME}._pre_backward_prefetch" not in ranges
