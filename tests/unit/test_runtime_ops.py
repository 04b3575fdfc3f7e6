"""torch.ops.fsdp_c.unshard, reshard and unshard_views: operations of a unit as operators, by the id of its
handle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

from fsdp_c import _C, FullyShardedDataParallel, MixedPrecision
from tests.ranks import both_views, on_ranks
from tests.storage import settled_nbytes

OPS = torch.ops.fsdp_c
WIDTH = 5


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Conv2d(2, 3, 2, bias=False))
    model[1].weight = nn.Parameter(model[1].weight.detach().to(memory_format=torch.channels_last))
    return model


def sharded(**arguments: Any) -> Any:
    """Return a unit of three parameters, one of them channels_last. Its group has one rank, so nothing is
    split.
    """
    options = {"use_orig_params": True, "device_id": torch.device("cpu")} | arguments
    return FullyShardedDataParallel(layers(), **options)


def handle_of(model: Any) -> Any:
    model._lazy_init()
    return model._handle


def flat(handle: Any) -> Tensor:
    return torch.randn(handle.layout.padded_numel, dtype=handle.padded_unsharded_flat_param.dtype)


def sliced(handle: Any, full: Tensor) -> list[Tensor]:
    """Return the views by plain slicing, from the layout only."""
    metadata = handle.flat_param
    views = []
    for offset, numel, shape, stride in zip(
        handle.layout.param_offsets,
        handle.layout.param_numels,
        metadata._shapes,
        metadata._strides,
        strict=True,
    ):
        views.append(full[offset : offset + numel].as_strided(shape, stride, offset + full.storage_offset()))
    return views


def test_views_have_the_shapes_strides_and_places_of_the_parameters() -> None:
    handle = handle_of(sharded())
    full = flat(handle)
    views, expected = OPS.unshard_views(full, handle.op_id), sliced(handle, full)
    assert len(views) == len(expected) == 3
    for view, other in zip(views, expected, strict=True):
        assert (view.shape, view.stride(), view.data_ptr()) == (other.shape, other.stride(), other.data_ptr())
    assert not views[2].is_contiguous()


def test_gradient_of_views_equals_that_of_plain_slicing() -> None:
    handle = handle_of(sharded())
    leaves = [flat(handle).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    for leaf, views in zip(
        leaves, (OPS.unshard_views(leaves[0], handle.op_id), sliced(handle, leaves[1])), strict=True
    ):
        sum((view * (index + 1)).square().sum() for index, view in enumerate(views)).backward()
        assert leaf.grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad.count_nonzero() == sum(handle.layout.param_numels)


def test_second_derivative_through_views_is_right() -> None:
    handle = handle_of(sharded())

    def cubes(full: Tensor) -> Tensor:
        return sum(view.pow(3).sum() for view in OPS.unshard_views(full, handle.op_id))

    full = flat(handle).double().requires_grad_()
    assert torch.autograd.gradcheck(cubes, (full,))
    assert torch.autograd.gradgradcheck(cubes, (full,))


def test_views_pass_opcheck() -> None:
    handle = handle_of(sharded())
    results = opcheck(OPS.unshard_views.default, (flat(handle).requires_grad_(), handle.op_id))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["unshard", "reshard"])
def test_runtime_op_passes_opcheck(name: str) -> None:
    handle = handle_of(sharded(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)))
    results = opcheck(getattr(OPS, name).default, (flat(handle), handle.op_id))
    assert set(results.values()) == {"SUCCESS"}


def test_views_of_a_meta_tensor_are_meta_tensors() -> None:
    handle = handle_of(sharded())
    views = OPS.unshard_views(torch.empty(handle.layout.padded_numel, device="meta"), handle.op_id)
    assert [view.shape for view in views] == list(handle.flat_param._shapes)
    assert all(view.is_meta for view in views)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_views_compile_in_one_graph(backend: str) -> None:
    handle = handle_of(sharded())
    op_id = handle.op_id

    def loss(full: Tensor) -> Tensor:
        return sum(
            (view * (index + 1)).square().sum() for index, view in enumerate(OPS.unshard_views(full, op_id))
        )

    torch.compiler.reset()
    full = flat(handle).requires_grad_()
    other = full.detach().clone().requires_grad_()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    expected, actual = loss(full), compiled(other)
    assert torch.equal(expected, actual)
    expected.backward()
    actual.backward()
    assert torch.equal(full.grad, other.grad)


def test_unshard_into_another_tensor_copies_what_the_handle_gathers() -> None:
    model = sharded(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    handle = handle_of(model)
    full = torch.zeros(handle.layout.padded_numel, dtype=torch.bfloat16)
    OPS.unshard(full, handle.op_id)
    for view, parameter in zip(OPS.unshard_views(full, handle.op_id), layers().parameters(), strict=True):
        assert torch.equal(view, parameter.to(torch.bfloat16))
    OPS.reshard(full, handle.op_id)
    assert handle.param_state == _C.PARAM_SHARDED


# ----------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["unshard", "reshard", "unshard_views"])
@pytest.mark.parametrize("op_id", [0, -1, 2**40])
def test_unknown_handle_is_refused(name: str, op_id: int) -> None:
    with pytest.raises(RuntimeError, match=f"fsdp_c::{name}: there is no handle {op_id}: pass the op_id"):
        getattr(OPS, name)(torch.zeros(4), op_id)


@pytest.mark.parametrize("name", ["unshard", "reshard", "unshard_views"])
def test_dead_handle_is_refused(name: str) -> None:
    model = sharded()
    op_id, size = handle_of(model).op_id, model._handle.layout.padded_numel
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=f"fsdp_c::{name}: there is no handle {op_id}"):
        getattr(OPS, name)(torch.zeros(size), op_id)


def test_ids_are_not_used_again() -> None:
    seen = set()
    for _ in range(3):
        model = sharded()
        seen.add(model._handle.op_id)
        del model
        gc.collect()
    assert len(seen) == 3


@pytest.mark.parametrize("case", ["too small", "too large", "other dtype", "strided"])
def test_unshard_refuses_a_tensor_that_does_not_fit(case: str) -> None:
    handle = handle_of(sharded())
    size = handle.layout.padded_numel
    tensors = {
        "too small": torch.zeros(size - 1),
        "too large": torch.zeros(size + 1),
        "other dtype": torch.zeros(size, dtype=torch.float64),
        "strided": torch.zeros(2 * size)[::2],
    }
    with pytest.raises(
        RuntimeError, match=f"full must be a contiguous tensor of {size} elements in the compute dtype"
    ):
        OPS.unshard(tensors[case], handle.op_id)
    assert handle.param_state == _C.PARAM_SHARDED


def test_views_refuse_a_tensor_that_is_too_small() -> None:
    handle = handle_of(sharded())
    with pytest.raises(RuntimeError):
        OPS.unshard_views(torch.zeros(handle.layout.numel // 2), handle.op_id)


# ----------------------------------------------------------------- two ranks


@both_views
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_unshard_gathers_the_parameters_and_reshard_frees_them(
    dtype: torch.dtype | None, use_orig_params: bool
) -> None:
    before = settled_nbytes()
    model = sharded(use_orig_params=use_orig_params, mixed_precision=MixedPrecision(param_dtype=dtype))
    handle = handle_of(model)
    full = handle.padded_unsharded_flat_param
    OPS.unshard(full, handle.op_id)
    assert handle.param_state == _C.PARAM_UNSHARDED
    assert _C.live_unsharded_nbytes() - before == full.nbytes
    for view, parameter in zip(OPS.unshard_views(full, handle.op_id), layers().parameters(), strict=True):
        assert torch.equal(view, parameter.to(full.dtype))
    OPS.reshard(full, handle.op_id)
    assert handle.param_state == _C.PARAM_SHARDED
    assert full.untyped_storage().nbytes() == 0
    assert _C.live_unsharded_nbytes() == before


@on_ranks(2)
def test_unshard_error_of_the_runtime_reaches_the_caller_of_the_op(rank: int) -> None:
    model = sharded()
    handle = handle_of(model)
    with torch.no_grad():
        name, parameter = next((name, one) for name, one in model.named_parameters() if one.numel())
        parameter.data = torch.zeros(3, 3, 3)
    with pytest.raises(
        RuntimeError, match=rf"fsdp_c::unshard: Cannot writeback .* unit Sequential .* rank {rank}"
    ):
        OPS.unshard(handle.padded_unsharded_flat_param, handle.op_id)
    assert handle.param_state == _C.PARAM_SHARDED, name


@on_ranks(2)
def test_profiler_shows_the_ops() -> None:
    handle = handle_of(sharded())
    full = handle.padded_unsharded_flat_param
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        OPS.unshard(full, handle.op_id)
        OPS.unshard_views(full, handle.op_id)
        OPS.reshard(full, handle.op_id)
    names = [event.name for event in seen.events()]
    assert [name for name in names if name.startswith("fsdp_c::")] == [
        "fsdp_c::unshard",
        "fsdp_c::unshard_views",
        "fsdp_c::reshard",
    ]
