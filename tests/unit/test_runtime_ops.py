"""Views of a flat parameter for its parameters, which torch.ops.fsdp_c.segment_views makes inside fsdp_c."""

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
    model = sharded()
    handle = handle_of(model)
    with FullyShardedDataParallel.summon_full_params(model):
        views, expected = list(model.parameters()), sliced(handle, handle.padded_unsharded_flat_param)
        assert len(views) == len(expected) == 3
        for view, other in zip(views, expected, strict=True):
            assert (view.shape, view.stride(), view.data_ptr()) == (
                other.shape,
                other.stride(),
                other.data_ptr(),
            )
        assert not views[2].is_contiguous()


def test_the_op_is_refused_outside_of_fsdp_c() -> None:
    with pytest.raises(RuntimeError, match="segment_views is internal"):
        OPS.segment_views(torch.zeros(4))


def test_ids_of_handles_are_not_used_again() -> None:
    seen = set()
    for _ in range(3):
        model = sharded()
        seen.add(model._handle.registration_id)
        del model
        gc.collect()
    assert len(seen) == 3
