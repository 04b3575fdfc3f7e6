"""A test of FSDP code that needs no GPU: see ci_without_gpu.yml.

The tested code is the same as on GPUs. Without a GPU torch's FSDP1 raises when it wraps a model.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


@pytest.fixture(scope="module", autouse=True)
def ranks():
    dist.init_process_group()
    yield
    dist.destroy_process_group()


def trained(shard, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    if shard:
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_ranks_train_as_one_process_on_the_whole_batch():
    whole = torch.randn(4 * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(1))
    model = trained(True, whole.chunk(dist.get_world_size())[dist.get_rank()])
    with FSDP.summon_full_params(model):
        for param, expected in zip(model.parameters(), trained(False, whole).parameters(), strict=True):
            torch.testing.assert_close(param, expected)
