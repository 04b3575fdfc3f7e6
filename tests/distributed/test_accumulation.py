"""Accumulation under no_sync, where a later synchronised backward does not pass through every unit."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import device, on_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y) if both else y


def plain() -> Branches:
    torch.manual_seed(0)
    return Branches()


def backward(model: nn.Module, rank: int, seed: int, both: bool) -> None:
    x = torch.randn(4, 3, generator=torch.Generator(device()).manual_seed(10 * seed + rank))
    model(x, both).square().sum().backward()


def averaged_reference(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients of the plain model over the same two backwards, averaged over the ranks."""
    model = plain()
    backward(model, rank, 1, True)
    backward(model, rank, 2, False)
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_unit_skipped_by_the_synchronised_backward_is_reduced_all_the_same(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    from fsdp_c import FullyShardedDataParallel, ShardingStrategy
    from fsdp_c.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        plain(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        backward(model, rank, 1, True)
    backward(model, rank, 2, False)
    optimizer.step()
    expected = averaged_reference(rank, world_size)
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, param), before in zip(model.named_parameters(), plain().parameters(), strict=True):
            torch.testing.assert_close(before - param, expected[name])
