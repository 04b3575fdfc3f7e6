"""torch.ops.fsdp_c.segment_views: views of a flat tensor for the parameters of a handle, by the handle's id."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel

OPS = torch.ops.fsdp_c
WIDTH = 5
pytestmark = pytest.mark.usefixtures("one_rank")


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
    views, expected = OPS.segment_views(full, handle.op_id), sliced(handle, full)
    assert len(views) == len(expected) == 3
    for view, other in zip(views, expected, strict=True):
        assert (view.shape, view.stride(), view.data_ptr()) == (other.shape, other.stride(), other.data_ptr())
    assert not views[2].is_contiguous()


def test_views_of_a_meta_tensor_are_meta_tensors() -> None:
    handle = handle_of(sharded())
    views = OPS.segment_views(torch.empty(handle.layout.padded_numel, device="meta"), handle.op_id)
    assert [view.shape for view in views] == list(handle.flat_param._shapes)
    assert all(view.is_meta for view in views)


# ----------------------------------------------------------------- refusals


@pytest.mark.parametrize("op_id", [0, -1, 2**40])
def test_unknown_handle_is_refused(op_id: int) -> None:
    with pytest.raises(RuntimeError, match=f"segment_views: there is no handle {op_id}: pass the op_id"):
        OPS.segment_views(torch.zeros(4), op_id)


def test_dead_handle_is_refused() -> None:
    model = sharded()
    op_id, size = handle_of(model).op_id, model._handle.layout.padded_numel
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=f"segment_views: there is no handle {op_id}"):
        OPS.segment_views(torch.zeros(size), op_id)


def test_ids_are_not_used_again() -> None:
    seen = set()
    for _ in range(3):
        model = sharded()
        seen.add(model._handle.op_id)
        del model
        gc.collect()
    assert len(seen) == 3


@pytest.mark.parametrize("case", ["too small", "strided"])
def test_views_refuse_a_tensor_that_does_not_fit(case: str) -> None:
    handle = handle_of(sharded())
    size = handle.layout.numel
    tensor = torch.zeros(size // 2) if case == "too small" else torch.zeros(2 * size)[::2]
    with pytest.raises(RuntimeError, match="flat must be contiguous with the unit's elements"):
        OPS.segment_views(tensor, handle.op_id)
