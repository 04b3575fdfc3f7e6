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
from fsdp_c.debug import Updates, checksum, detect_anomalies, updates
from tests.models import WIDTH, Block, Net
from tests.ranks import all_strategies, both_views, device, device_type, on_ranks
from tests.training import sharded

TWO_BLOCKS = {"blocks": 2}


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["NaN", "inf"])
@all_strategies
@on_ranks(2, label="faults")
def test_a_gradient_that_is_not_finite_is_named_on_every_rank_before_it_spreads(
    rank: int, strategy: str, value: float
) -> None:
    model = sharded(net=TWO_BLOCKS, sharding_strategy=ShardingStrategy[strategy])
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
def test_an_anomaly_under_no_sync_is_raised_at_the_reduction(rank: int) -> None:
    model = sharded(net=TWO_BLOCKS, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    hook = spoil(model, float("nan") if rank == 0 else 1.0)
    with detect_anomalies():
        with model.no_sync():
            loss(model, rank).backward()
        hook.remove()
        with pytest.raises(FloatingPointError, match=r"rank 0, unit Block at 'blocks.1'"):
            loss(model, rank).backward()


@on_ranks(2, label="faults")
def test_nothing_is_looked_at_outside_and_it_is_not_nested(rank: int) -> None:
    model = sharded(net=TWO_BLOCKS)
    spoil(model, float("nan"))
    with detect_anomalies(), pytest.raises(RuntimeError, match="on already"), detect_anomalies():
        pass
    loss(model, rank).backward()
    assert any(bool(param.grad.isnan().any()) for param in model.parameters() if param.grad is not None)


@on_ranks(2, label="faults")
def test_replicas_of_no_shard_that_drift_are_named(rank: int) -> None:
    model = sharded(net=TWO_BLOCKS, sharding_strategy=ShardingStrategy.NO_SHARD)
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
def test_buffers_that_drift_are_named_unless_left_out(rank: int) -> None:
    model = sharded(net=TWO_BLOCKS)
    checksum(model)
    model.module.blocks[0].module.calls.add_(rank)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.calls is one on rank 0 and another on rank 1"):
        checksum(model)
    checksum(model, buffers=False)


@on_ranks(4, label="faults")
def test_hybrid_replicas_that_drift_are_named_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    model = sharded(net=TWO_BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
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


# ----------------------------------------------------------------- updates


def stepped(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> Updates:
    loss(model, rank).backward()
    with updates(model) as found:
        optimizer.step()
    optimizer.zero_grad()
    return found


def expected_updates(lr: float, dtype: torch.dtype, world_size: int) -> dict[str, tuple[int, int]]:
    """What a plain model makes of the batches of all ranks."""
    torch.manual_seed(5)
    net = Net(blocks=2).to(device(), dtype)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for rank in range(world_size):
        batch = torch.randn(1, WIDTH, generator=torch.Generator(device()).manual_seed(rank)).to(dtype)
        (net(batch).float().square().mean() / world_size).backward()
    torch.optim.SGD(net.parameters(), lr).step()
    had = {name: param.grad != 0 for name, param in net.named_parameters()}
    return {
        name: (int((had[name] & (param != before[name])).sum()), int(had[name].sum()))
        for name, param in net.named_parameters()
    }


@both_views
@all_strategies
@on_ranks(2, label="faults")
def test_updates_that_bf16_loses_are_counted_once_and_those_of_float32_are_there(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    low, lr = torch.bfloat16, 1e-3

    def found(dtype: torch.dtype) -> Updates:
        torch.manual_seed(5)
        model = FSDP(
            Net(blocks=2).to(dtype),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(param_dtype=dtype),
            device_id=device(),
        )
        return stepped(model, torch.optim.SGD(model.parameters(), lr), rank)

    exact = found(torch.float32)
    assert exact.by_parameter == expected_updates(lr, torch.float32, world_size)
    assert exact.total - exact.changed <= exact.total // 20
    lost = found(low)
    assert set(lost.by_parameter) == set(exact.by_parameter)
    assert lost.changed < lost.total // 2  # sums of two ranks round otherwise than those of a plain model
    close = expected_updates(lr, low, world_size)
    assert abs(lost.changed - sum(changed for changed, _ in close.values())) <= lost.total // 20
    text = f"{lost.changed:,} of {lost.total:,} elements with a gradient changed; most of those that did not are in "
    assert str(lost).startswith(text)


@both_views
@on_ranks(4, label="faults")
def test_updates_of_replicas_count_once_and_frozen_parameters_not_at_all(use_orig_params: bool) -> None:
    torch.manual_seed(5)
    net = Net(blocks=2)
    net.blocks[0].requires_grad_(False)
    model = FSDP(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh(device_type(), (2, 2)),
        use_orig_params=use_orig_params,
        device_id=device(),
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    found = stepped(model, torch.optim.SGD(trained, lr=0.0), 0)
    named = Net(blocks=2).named_parameters()
    numels = {name: param.numel() for name, param in named if "blocks.0" not in name}
    assert set(found.by_parameter) == set(numels)
    assert all(0 < total <= numels[name] for name, (_, total) in found.by_parameter.items())
    assert found.changed == 0 and "0 of" in str(found)
