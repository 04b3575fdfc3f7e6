"""CPU offload: where parameters, gradients and states are, and summoned parameters."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffload

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.distributed.test_use_orig_params import backward
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import batch, sharded


@both_views
@all_strategies
@on_ranks(2)
def test_parameters_gradients_and_optimizer_state_are_on_the_cpu(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    model = sharded("fsdp_c", strategy, use_orig_params=use_orig_params, cpu_offload=CPUOffload(True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, 0, rank)
    optimizer.step()
    tensors = [*model.parameters(), *(param.grad for param in model.parameters() if param.grad is not None)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert model._handle._offload_params and model.cpu_offload.offload_params


@pytest.mark.parametrize("writeback", [True, False])
@both_views
@on_ranks(2)
def test_units_that_are_not_sharded_are_summoned_to_where_they_compute(
    rank: int, use_orig_params: bool, writeback: bool
) -> None:
    model = sharded("fsdp_c", "NO_SHARD", use_orig_params=use_orig_params, cpu_offload=CPUOffload(True))
    backward(model, 0, rank)
    with torch.no_grad():
        expected = model(batch(rank, 10))
        with FSDP.summon_full_params(model, writeback=writeback):
            assert {param.device for param in model.parameters()} == {device()}
            assert torch.equal(model(batch(rank, 10)), expected)
            for param in model.parameters():
                param.zero_()
        assert {param.device for param in model.parameters()} == {torch.device("cpu")}
        written = writeback or device().type == "cpu"  # there nothing is copied
        assert torch.equal(model(batch(rank, 10)), torch.zeros_like(expected) if written else expected)
