"""ShardedGradScaler: scales, parameters and skipped steps are bitwise torch's FSDP1's, also with inf on one
rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Upstream

from fsdp_c import ShardedGradScaler
from tests.ranks import both_views, device, on_ranks
from tests.training import assert_same, batch, sharded

STEPS = 8
SCALERS = {"torch": Upstream, "fsdp_c": ShardedGradScaler}
FP16 = MixedPrecision(param_dtype=torch.float16)


def overflowing(
    weight: Tensor, scaler: ShardedGradScaler, held: Tensor | None = None, inf: bool = True
) -> float:
    """Return the scale after a step of SGD on ``held``, by default the weight, whose gradient may be inf."""
    optimizer = torch.optim.SGD([weight if held is None else held], lr=1.0)
    scaler.scale(weight.sum() * (float("inf") if inf else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def trained(
    name: str, rank: int, overflow: dict[int, int], unscale: bool, **arguments: Any
) -> dict[str, Any]:
    """Return scales, losses and parameters of STEPS steps. In step s only rank ``overflow[s]`` has an inf."""
    model = sharded(name, mixed_precision=FP16, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = SCALERS[name](
        device().type, init_scale=2.0**10, growth_factor=1.7, backoff_factor=0.3, growth_interval=2
    )
    trace: dict[str, Any] = {}
    for step in range(STEPS):
        loss = model(batch(rank, step)).float().square().mean()
        if overflow.get(step) == rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace[f"step {step} scale"] = scaler.get_scale()
        trace[f"step {step} growth tracker"] = scaler._get_growth_tracker()
        trace[f"step {step} loss"] = loss.detach()
        for parameter_name, parameter in model.named_parameters():
            trace[f"step {step} {parameter_name}"] = parameter.detach().clone()
    return trace


# ----------------------------------------------------------------- as torch's


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale", "step"])
@both_views
@on_ranks(2)
def test_scales_and_parameters_are_those_of_torch(rank: int, use_orig_params: bool, unscale: bool) -> None:
    overflow = {1: 0, 4: 1, 5: 1}
    expected = trained("torch", rank, overflow, unscale, use_orig_params=use_orig_params)
    actual = trained("fsdp_c", rank, overflow, unscale, use_orig_params=use_orig_params)
    assert_same(expected, actual)
    scales = [expected[f"step {step} scale"] for step in range(STEPS)]
    assert scales[1] < scales[0] and scales[3] > scales[2]


@on_ranks(2)
def test_kept_fp16_gradients_are_unscaled_as_by_torch(rank: int) -> None:
    grads = {}
    for name in SCALERS:
        torch.manual_seed(5)
        precision = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
        model = sharded(name, use_orig_params=False, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = SCALERS[name](device().type, init_scale=256.0)
        scaler.scale(model(batch(0, rank)).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        grads[name] = {key: param.grad for key, param in model.named_parameters()}
    assert {grad.dtype for grad in grads["fsdp_c"].values()} == {torch.float16}
    assert_same(grads["torch"], grads["fsdp_c"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_that_are_part_of_a_graph_are_unscaled(dtype: torch.dtype) -> None:
    """In bfloat16 too, for which torch has no kernel on a GPU."""
    weight = nn.Parameter(torch.ones(3, dtype=dtype, device=device()))
    scaler = ShardedGradScaler(device().type, init_scale=4.0)
    loss = scaler.scale(weight.float().square().sum())
    (weight.grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


# ----------------------------------------------------------------- one finding for all ranks


@on_ranks(2)
def test_rank_without_gradients_takes_part(rank: int) -> None:
    weight, idle = (nn.Parameter(torch.ones(3)) for _ in range(2))
    scaler = ShardedGradScaler(device().type, init_scale=4.0)
    assert overflowing(weight, scaler, weight if rank == 0 else idle) == 2.0


@on_ranks(2)
def test_only_the_ranks_of_the_group_share_a_finding(rank: int, world_size: int) -> None:
    groups = [dist.new_group([other]) for other in range(world_size)]
    scaler = ShardedGradScaler(device().type, init_scale=4.0, growth_interval=1, process_group=groups[rank])
    assert overflowing(nn.Parameter(torch.ones(3)), scaler, inf=rank == 0) == (2.0 if rank == 0 else 8.0)


@on_ranks(2)
def test_duplicates_of_a_sparse_fp16_gradient_are_added_before_the_check(rank: int) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    values = torch.tensor([40000.0, 40000.0, 2.0], dtype=torch.float16)
    weight.grad = (
        torch.sparse_coo_tensor([[0, 0, 2]], values, (3,)) if rank == 0 else torch.zeros_like(weight)
    )
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler(device().type, init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [1.0]


@pytest.mark.parametrize("how", ["unscale_", "step", "fused"])
@on_ranks(2)
def test_found_inf_per_device_equals_torchs(rank: int, how: str) -> None:
    shapes = {}
    for name, scaler_class in SCALERS.items():
        model = sharded(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=how == "fused")
        scaler = scaler_class(device().type, init_scale=4.0)
        scaler.scale(model(batch(0, rank)).sum()).backward()
        if how == "unscale_":
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        shapes[name] = {where.type: (one.shape, one.dtype, one.item()) for where, one in found.items()}
    assert shapes["fsdp_c"] == shapes["torch"]
    assert len(shapes["torch"]) == 1


# ----------------------------------------------------------------- scale()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scaling_keeps_the_dtype(dtype: torch.dtype) -> None:
    scaled = ShardedGradScaler(device().type, init_scale=8.0).scale(torch.full((2,), 3.0, dtype=dtype))
    assert scaled.dtype is dtype and scaled.tolist() == [24.0, 24.0]


def test_scaling_keeps_containers_and_maps_iterables() -> None:
    one = torch.ones(1)
    scaler = ShardedGradScaler(device().type, init_scale=2.0)
    scaled = scaler.scale([one, (one, [one])])
    assert type(scaled) is list and type(scaled[1]) is tuple and type(scaled[1][1]) is list
    assert [scaled[0].item(), scaled[1][0].item(), scaled[1][1][0].item()] == [2.0, 2.0, 2.0]
    assert [tensor.item() for tensor in scaler.scale(each for each in (one, 0 * one))] == [2.0, 0.0]


# ----------------------------------------------------------------- misuse


@pytest.mark.parametrize("new_scale", [32.0, torch.tensor([32.0])], ids=["float", "tensor"])
def test_new_scale_is_taken(new_scale: Any) -> None:
    scaler = ShardedGradScaler(device().type)
    scaler.scale(torch.ones(1))
    scaler.update(new_scale if isinstance(new_scale, float) else new_scale.to(device()))
    assert scaler.get_scale() == 32.0


@on_ranks(1)
def test_scale_does_not_grow_to_infinity() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = ShardedGradScaler(device().type, init_scale=2.0**127, growth_interval=1)
    scaler.scale(weight.sum() * 2.0**-120).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_disabled_scaler_does_nothing_and_needs_no_group() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler(device().type, enabled=False)
    loss = weight.sum()
    assert scaler.scale(loss) is loss and not hasattr(scaler, "process_group")
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0 and scaler.get_scale() == 1.0
