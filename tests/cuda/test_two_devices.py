"""Two GPUs in one process. A model computes on its own device, whatever the current device and the device of
its inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.cuda.test_parity import TIMEOUT_S
from tests.cuda.test_step import assert_alike
from tests.models import WIDTH, Block, Net
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none is here")

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "flat": {"use_orig_params": False},
    "SHARD_GRAD_OP, bf16": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": BF16},
    "prefetch, bf16": {"forward_prefetch": True, "mixed_precision": BF16},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(True)},
}


def wrapped(device_id: Any, **options: Any) -> Any:
    torch.manual_seed(11)
    policy = ModuleWrapPolicy({Block})
    arguments = {"use_orig_params": True, "process_group": nccl_group()} | options
    return FSDP(Net(3), auto_wrap_policy=policy, device_id=device_id, **arguments)


def train(model: Any, rank: int, inputs_on: torch.device, steps: int = 3) -> list[Tensor]:
    """Train and return losses, norms, gradients, parameters and the state dict, on the CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(4, WIDTH, generator=generator).to(inputs_on)
        with model.no_sync():
            model(batch).float().square().mean().backward()
        loss = model(batch).float().square().mean()
        loss.backward()
        seen += [loss.detach(), model.clip_grad_norm_(0.5)]
        seen += [param.grad for param in model.parameters() if param.grad is not None]
        seen = [one.cpu().clone() for one in seen]
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().cpu().clone() for param in model.parameters()]
    return seen + [value.cpu() for _, value in sorted(model.state_dict().items())]


@pytest.mark.parametrize("inputs_on", [CPU, FIRST, SECOND], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_model_trains_alike_on_a_device_that_is_not_the_current_one(
    rank: int, name: str, inputs_on: torch.device
) -> None:
    torch.cuda.set_device(FIRST)
    expected = train(wrapped(FIRST, **OPTIONS[name]), rank, FIRST)
    model = wrapped(SECOND, **OPTIONS[name])
    assert torch.cuda.current_device() == 0
    actual = train(model, rank, inputs_on)
    assert torch.cuda.current_device() == 0
    assert_alike(expected, actual)


@pytest.mark.parametrize("current", [FIRST, SECOND], ids=str)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_device_without_an_index_is_the_current_one(current: torch.device) -> None:
    torch.cuda.set_device(current)
    try:
        for device_id in (torch.device("cuda"), "cuda", torch.cuda.current_device(), current):
            model = wrapped(device_id)
            assert {param.device for param in model.parameters()} == {current}, device_id
            assert model.compute_device == current
            assert model(torch.randn(2, WIDTH)).device == current
    finally:
        torch.cuda.set_device(FIRST)


@pytest.mark.parametrize("device_id", [1, "cuda:1", SECOND], ids=repr)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_device_is_named_by_its_index_too(device_id: Any) -> None:
    torch.cuda.set_device(FIRST)
    model = wrapped(device_id)
    assert {param.device for param in model.parameters()} == {SECOND}
    assert model(torch.randn(2, WIDTH)).device == SECOND


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_two_models_on_two_devices_train_in_turn(rank: int) -> None:
    torch.cuda.set_device(FIRST)
    expected = train(wrapped(FIRST), rank, CPU)
    models = [wrapped(FIRST), wrapped(SECOND)]
    for model in models:
        assert_alike(train(model, rank, CPU), expected)


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_module_on_another_device_than_device_id_is_refused() -> None:
    with pytest.raises(ValueError, match="Inconsistent compute device.*cuda:1 vs cuda:0"):
        FSDP(nn.Linear(3, 3).to(SECOND), device_id=FIRST, process_group=nccl_group())
