"""Unsharded parameter storage never exceeds the limit of the sharding strategy, by the C runtime's count of
live bytes.

The model is a root and BLOCKS blocks of equal size, so that storage can be counted in units.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

from fsdp_c import _C
from tests.models import EqualBlocks
from tests.ranks import both_views, on_ranks
from tests.storage import HELD_BACK, live_nbytes, settled_nbytes
from tests.training import wrap

BLOCKS = 6
ALL = BLOCKS + 1
WIDTH = 16
NOT_SEARCHED: list[torch.Tensor] = []  # globals are not searched for outputs of modules
UNIT_NUMEL = WIDTH * WIDTH + WIDTH  # a multiple of the alignment and of two ranks, so there is no padding
FP32_NBYTES = 4
BF16_NBYTES = 2


class Meter:
    """Live and peak storage in units, without the storage of this process' other models."""

    def __init__(self, element_nbytes: int = FP32_NBYTES) -> None:
        self._base = settled_nbytes()
        self._unit = UNIT_NUMEL * element_nbytes
        self.reset()

    def reset(self) -> None:
        _C.peak_unsharded_nbytes(reset=True)

    def live(self) -> float:
        return (live_nbytes() - self._base) / self._unit

    def peak(self) -> float:
        return (_C.peak_unsharded_nbytes() - self._base) / self._unit


def build(strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    unit = functools.partial(wrap, strategy=strategy, **arguments)
    model = EqualBlocks(BLOCKS, WIDTH)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = unit(block)
    return unit(model)


BATCH = torch.ones(2, WIDTH)


@both_views
@on_ranks(2)
def test_construction_leaves_no_unsharded_storage(world_size: int, use_orig_params: bool) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params)
    assert meter.live() == 0
    assert sum(parameter.numel() for parameter in model.parameters()) == ALL * UNIT_NUMEL // world_size


LOW = MixedPrecision(param_dtype=torch.bfloat16)
# units of storage: (peak, live) after a forward, then after its backward
HELD: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "FULL_SHARD": ({}, (2 + HELD_BACK, 1 + HELD_BACK), (3, 0)),
    "FULL_SHARD-forward_prefetch": ({"forward_prefetch": True}, (3 + HELD_BACK, 1 + HELD_BACK), (3, 0)),
    # a prefetch after a unit unshards the next one while the unit's storage is still held
    "FULL_SHARD-backward_post": (
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        (2 + HELD_BACK, 1 + HELD_BACK),
        (2 + HELD_BACK, 0),
    ),
    "FULL_SHARD-no_prefetch": ({"backward_prefetch": None}, (2 + HELD_BACK, 1 + HELD_BACK), (2, 0)),
    "FULL_SHARD-bf16": ({"mixed_precision": LOW}, (2 + HELD_BACK, 1 + HELD_BACK), (3, 0)),
    "SHARD_GRAD_OP": ({}, (ALL, ALL), (ALL, 0)),
    "SHARD_GRAD_OP-bf16": ({"mixed_precision": LOW}, (ALL, ALL), (ALL, 0)),
    "NO_SHARD": ({}, (0, 0), (0, 0)),
    "NO_SHARD-bf16": ({"mixed_precision": LOW}, (2 + HELD_BACK, HELD_BACK), (3, 0)),
}


@both_views
@pytest.mark.parametrize("case", HELD)
@on_ranks(2)
def test_a_step_holds_no_more_units_than_its_strategy_allows(case: str, use_orig_params: bool) -> None:
    options, after_forward, after_backward = HELD[case]
    meter = Meter(BF16_NBYTES if "mixed_precision" in options else FP32_NBYTES)
    model = build(case.split("-")[0], use_orig_params=use_orig_params, **options)
    for step in range(3):
        meter.reset()
        loss = model(BATCH).sum()
        found = [(meter.peak(), meter.live())]
        meter.reset()
        loss.backward()
        found.append((meter.peak(), meter.live()))
        if step:  # the first step records the order, after the pool has reserved memory for some units
            assert found == [after_forward, after_backward]


@both_views
@on_ranks(2)
def test_a_dropped_model_that_knows_itself_gives_its_storage_back(use_orig_params: bool) -> None:
    """Registered forward methods, and libraries that keep the wrapped model in an inner module, create such
    cycles.
    """
    meter = Meter()
    model = build("SHARD_GRAD_OP", use_orig_params=use_orig_params)
    model.module.__dict__["wrapper"] = model
    output = model(BATCH)
    assert meter.live() == ALL
    del model, output
    gc.collect()
    assert meter.live() == 0


@both_views
@on_ranks(2)
def test_backward_of_a_freed_model_is_refused(use_orig_params: bool) -> None:
    model = wrap(nn.Linear(WIDTH, WIDTH), use_orig_params=use_orig_params)
    model.module.register_forward_hook(lambda module, args, output: NOT_SEARCHED.append(output))
    model.module.register_forward_hook(lambda module, args, output: lambda: NOT_SEARCHED.pop())
    output = model(BATCH)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="that was freed: keep the model until its backward has run"):
        output().sum().backward()


@both_views
@on_ranks(2)
def test_module_in_the_dtype_of_computation_has_no_low_precision_copy(use_orig_params: bool) -> None:
    """The module computes in the shard itself under NO_SHARD."""
    net = EqualBlocks(BLOCKS, WIDTH).bfloat16()
    model = wrap(net, strategy="NO_SHARD", use_orig_params=use_orig_params, mixed_precision=LOW)
    shard = model._flat_param.untyped_storage().data_ptr()
    inside: list[bool] = []
    layer = model.module.inp
    layer.register_forward_hook(lambda *_: inside.append(layer.weight.untyped_storage().data_ptr() == shard))
    model(BATCH).float().square().mean().backward()
    assert inside == [True] and model._flat_param.untyped_storage().data_ptr() == shard
