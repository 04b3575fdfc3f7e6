"""Construction over real groups: broadcasts, ``apply``, and parameters with gaps in memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import ModuleWrapPolicy
from tests.ranks import both_views, device, on_ranks
from tests.training import assert_same, full_state, wrap


def own_model(rank: int) -> nn.Module:
    """A model whose values are those of its rank alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with torch.no_grad():
        for tensor in [*model.parameters(), model[1][1].running_mean]:
            tensor.fill_(rank + 1)
    return model


@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_sync_module_states_gives_all_ranks_the_values_of_rank_0(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    mesh = dist.device_mesh.init_device_mesh(device().type, (2, 2) if strategy == "HYBRID_SHARD" else (4,))
    policy = ModuleWrapPolicy({nn.Sequential})
    options = {"auto_wrap_policy": policy, "device_mesh": mesh, "sync_module_states": True}
    model = wrap(own_model(rank), strategy=strategy, use_orig_params=use_orig_params, **options)
    for unit in FSDP.fsdp_modules(model):
        flat_param = unit._flat_param
        held = flat_param.numel() - flat_param._shard_numel_padded
        assert flat_param.detach()[:held].eq(1).all()
    assert model.module[1].module[1].running_mean.tolist() == [1.0] * 4


@on_ranks(2)
def test_apply_sees_and_keeps_full_parameters(rank: int) -> None:
    seen = []

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            module.weight.fill_(7)

    model = wrap(own_model(rank), use_orig_params=False, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    assert model.apply(fill) is model
    assert seen == [(4, 3), (4, 4)]
    assert model._is_root is None
    with FSDP.summon_full_params(model):
        assert all(param.eq(7).all() for name, param in model.named_parameters() if param.dim() == 2)


class Sliced(nn.Module):
    """Parameters that are parts of larger tensors, with gaps between their rows or elements, or share
    memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole = torch.randn(2 * width, 3 * width, dtype=torch.float64)
        self.columns = nn.Parameter(whole[:width, width : 2 * width])
        self.transposed = nn.Parameter(whole[:width, :width].t())
        self.steps = nn.Parameter(whole[0, ::3])
        self.repeated = nn.Parameter(whole[:width, :1].expand(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.columns @ self.transposed) @ (self.repeated * self.steps[: len(self.repeated)])


@pytest.mark.parametrize("width", [5, 700])
@both_views
@on_ranks(2)
def test_parameters_with_gaps_in_memory_keep_their_values(use_orig_params: bool, width: int) -> None:
    """torch refuses them, with an error about the size of a storage."""
    plain = Sliced(width)
    model = wrap(Sliced(width), use_orig_params=use_orig_params)
    assert_same(full_state(model), dict(plain.state_dict()))
    x = torch.ones(2, width, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x))
