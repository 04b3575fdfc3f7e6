"""fsdp_c.debug names the rank, unit and parameter where numbers went wrong, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.debug import checksum, detect_anomalies
from tests.models import WIDTH, Block, Net
from tests.ranks import device, on_ranks


def build(**arguments: Any) -> FSDP:
    torch.manual_seed(5)
    options = {"use_orig_params": True, "device_id": device()} | arguments
    return FSDP(Net(blocks=2), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def loss(model: FSDP, rank: int) -> Tensor:
    batch = torch.randn(1, WIDTH, generator=torch.Generator(device()).manual_seed(rank))
    return model(batch).float().square().mean()


class Spoil(torch.autograd.Function):
    """The identity, whose gradient becomes ``value``. Batches are of one row: with more, sums of inf are
    NaN."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, value: float) -> Tensor:
        context.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, context.value), None


def spoil(model: FSDP, value: float) -> Any:
    """What comes after ``down`` of blocks.1 gets gradients as they are; ``down`` and what is before,
    ``value``."""
    down = model.module.blocks[1].module.down
    return down.register_forward_hook(lambda module, args, output: Spoil.apply(output, value))


KINDS = {"nan": "NaN", "inf": "inf"}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["NaN", "inf"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, label="faults")
def test_a_gradient_that_is_not_finite_is_named_on_every_rank_before_it_spreads(
    rank: int, world_size: int, strategy: str, value: float
) -> None:
    model = build(sharding_strategy=ShardingStrategy[strategy])
    hook = spoil(model, value if rank == 1 else 1.0)
    with detect_anomalies(), pytest.raises(FloatingPointError) as raised:
        loss(model, rank).backward()
    assert f"rank 1, unit Block at 'blocks.1': the gradient of down.weight holds {KINDS[repr(value)]}" in str(
        raised.value
    )
    assert all(param.grad is None for param in model.parameters())
    hook.remove()
    with detect_anomalies():
        loss(model, rank).backward()  # the next step is clean
    assert all(param.grad is None or bool(param.grad.isfinite().all()) for param in model.parameters())


@on_ranks(2, label="faults")
def test_an_anomaly_under_no_sync_is_raised_at_the_reduction(rank: int, world_size: int) -> None:
    model = build(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    hook = spoil(model, float("nan") if rank == 0 else 1.0)
    with detect_anomalies():
        with model.no_sync():
            loss(model, rank).backward()
        hook.remove()
        with pytest.raises(FloatingPointError, match=r"rank 0, unit Block at 'blocks.1'"):
            loss(model, rank).backward()


@on_ranks(2, label="faults")
def test_nothing_is_looked_at_outside_and_it_is_not_nested(rank: int, world_size: int) -> None:
    model = build()
    spoil(model, float("nan"))
    with detect_anomalies(), pytest.raises(RuntimeError, match="on already"), detect_anomalies():
        pass
    loss(model, rank).backward()
    assert any(bool(param.grad.isnan().any()) for param in model.parameters() if param.grad is not None)


@on_ranks(2, label="faults")
def test_replicas_of_no_shard_that_drift_are_named(rank: int, world_size: int) -> None:
    model = build(sharding_strategy=ShardingStrategy.NO_SHARD)
    checksum(model)
    loss(model, rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    checksum(model)
    if rank == 1:
        with torch.no_grad():
            model.module.blocks[1].module.up.bias[3] += 1e-6
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.bias is one on rank 0 and another on rank 1"):
        checksum(model)


@on_ranks(2, label="faults")
def test_buffers_that_drift_are_named_unless_left_out(rank: int, world_size: int) -> None:
    model = build()
    checksum(model)
    model.module.blocks[0].module.calls.add_(rank)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.calls is one on rank 0 and another on rank 1"):
        checksum(model)
    checksum(model, buffers=False)


@on_ranks(4, label="faults")
def test_hybrid_replicas_that_drift_are_named_on_all_ranks(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    model = build(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    checksum(model)
    loss(model, rank).backward()
    checksum(model)
    if rank == 3:
        with torch.no_grad():
            for param in model.module.head.parameters():
                param.add_(1.0)
    with pytest.raises(RuntimeError, match=r"head\.(weight|bias) is one on rank 1 and another on rank 3"):
        checksum(model)
    dist.barrier()
