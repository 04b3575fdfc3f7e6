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

from tests.models import EqualBlocks
from tests.ranks import both_views, device, on_ranks
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
        from fsdp_c import _C

        self._native = _C
        self._base = settled_nbytes()
        self._unit = UNIT_NUMEL * element_nbytes
        self.reset()

    def reset(self) -> None:
        self._native.peak_unsharded_nbytes(reset=True)

    def live(self) -> float:
        return (live_nbytes() - self._base) / self._unit

    def peak(self) -> float:
        return (self._native.peak_unsharded_nbytes() - self._base) / self._unit


def build(strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    unit = functools.partial(wrap, strategy=strategy, **arguments)
    model = EqualBlocks(BLOCKS, WIDTH)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = unit(block)
    return unit(model)


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


@both_views
@on_ranks(2)
def test_construction_leaves_no_unsharded_storage(world_size: int, use_orig_params: bool) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params)
    assert meter.live() == 0
    assert sum(parameter.numel() for parameter in model.parameters()) == ALL * UNIT_NUMEL // world_size


@both_views
@on_ranks(2)
def test_full_shard_forward_holds_the_root_and_one_unit(
    use_orig_params: bool,
) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params)
    # before the first step the pool reserves memory for the units that are unsharded at a time
    model(batch())
    meter.reset()
    output = model(batch())
    assert output.requires_grad
    assert (meter.peak(), meter.live()) == (2 + HELD_BACK, 1 + HELD_BACK)


@both_views
@on_ranks(2)
def test_no_shard_frees_every_low_precision_copy_after_its_forward(use_orig_params: bool) -> None:
    meter = Meter(BF16_NBYTES)
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = build("NO_SHARD", use_orig_params=use_orig_params, mixed_precision=low)
    output = model(batch())
    assert output.requires_grad
    assert meter.live() == HELD_BACK


@both_views
@on_ranks(2)
def test_full_shard_forward_prefetch_holds_one_unit_more(use_orig_params: bool) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params, forward_prefetch=True)
    peaks = []
    for _ in range(3):
        meter.reset()
        loss = model(batch()).sum()
        peaks.append(meter.peak())
        loss.backward()
    assert peaks == [
        2 + 2 * HELD_BACK,
        3 + HELD_BACK,
        3 + HELD_BACK,
    ]  # the first forward records the order, after the pool's reserve


@both_views
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
@on_ranks(2)
def test_full_shard_backward_holds_the_root_the_unit_and_one_prefetched(
    prefetch: BackwardPrefetch | None, use_orig_params: bool
) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params, backward_prefetch=prefetch)
    for _ in range(3):
        loss = model(batch()).sum()
        meter.reset()
        loss.backward()
        # a prefetch after a unit unshards the next one while the unit's storage is still held
        units = {BackwardPrefetch.BACKWARD_PRE: 3, BackwardPrefetch.BACKWARD_POST: 2 + HELD_BACK, None: 2}
        assert (meter.peak(), meter.live()) == (units[prefetch], 0)


@both_views
@on_ranks(2)
def test_shard_grad_op_keeps_every_unit_until_its_backward(use_orig_params: bool) -> None:
    meter = Meter()
    model = build("SHARD_GRAD_OP", use_orig_params=use_orig_params)
    for _ in range(3):
        meter.reset()
        loss = model(batch()).sum()
        assert (meter.peak(), meter.live()) == (ALL, ALL)
        loss.backward()
        assert (meter.peak(), meter.live()) == (ALL, 0)


@both_views
@on_ranks(2)
def test_no_shard_gathers_nothing(use_orig_params: bool) -> None:
    meter = Meter()
    model = build("NO_SHARD", use_orig_params=use_orig_params)
    model(batch()).sum().backward()
    assert (meter.peak(), meter.live()) == (0, 0)


@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_mixed_precision_holds_units_of_half_the_bytes(strategy: str, use_orig_params: bool) -> None:
    meter = Meter(BF16_NBYTES)
    model = build(
        strategy, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    for _ in range(2):
        meter.reset()
        model(batch()).sum().backward()
        assert (meter.peak(), meter.live()) == (3 if strategy == "FULL_SHARD" else ALL, 0)


@both_views
@on_ranks(2)
def test_full_shard_frees_units_in_no_sync_and_shard_grad_op_keeps_them(
    use_orig_params: bool,
) -> None:
    for strategy, kept in (("FULL_SHARD", 0), ("SHARD_GRAD_OP", ALL)):
        meter = Meter()
        model = build(strategy, use_orig_params=use_orig_params)
        with model.no_sync():
            model(batch()).sum().backward()
        assert meter.live() == kept, strategy
        model(batch()).sum().backward()
        assert meter.live() == 0, strategy


@both_views
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_forward_without_gradients_leaves_nothing_gathered(strategy: str, use_orig_params: bool) -> None:
    meter = Meter()
    model = build(strategy, use_orig_params=use_orig_params)
    with torch.no_grad():
        model(batch())
    assert meter.live() == 0


@both_views
@on_ranks(2)
def test_summon_full_params_holds_everything_and_gives_it_back(use_orig_params: bool) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params)
    for _ in range(2):
        with type(model).summon_full_params(model):
            assert meter.live() == ALL
        assert meter.live() == 0
        model(batch()).sum().backward()


@both_views
@on_ranks(2)
def test_a_dropped_model_that_knows_itself_gives_its_storage_back(use_orig_params: bool) -> None:
    """Such cycles come from registered forward methods, and from libraries that keep the wrapped model in an
    inner module.
    """
    meter = Meter()
    model = build("SHARD_GRAD_OP", use_orig_params=use_orig_params)
    model.module.__dict__["wrapper"] = model
    output = model(batch())
    assert meter.live() == ALL
    del model, output
    gc.collect()
    assert meter.live() == 0


@both_views
@on_ranks(2)
def test_an_output_keeps_its_model_for_the_backward(use_orig_params: bool) -> None:
    meter = Meter()
    model = build(use_orig_params=use_orig_params)
    output, params = model(batch()), list(model.parameters())
    del model
    gc.collect()
    output.sum().backward()
    assert all(param.grad is not None for param in params if param.numel())
    del output
    gc.collect()
    assert meter.live() == 0


@on_ranks(2)
def test_backward_of_a_model_that_is_gone_is_refused() -> None:
    from fsdp_c import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=device())
    model.module.register_forward_hook(lambda module, args, output: NOT_SEARCHED.append(output))
    model.module.register_forward_hook(lambda module, args, output: lambda: NOT_SEARCHED.pop())
    output = model(batch())
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="that is gone: keep the model until its backward has run"):
        output().sum().backward()


@both_views
@on_ranks(2)
def test_module_in_the_dtype_of_computation_has_no_low_precision_copy(use_orig_params: bool) -> None:
    """Under NO_SHARD it computes in the shard itself."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    net = EqualBlocks(BLOCKS, WIDTH).bfloat16()
    model = wrap(net, strategy="NO_SHARD", use_orig_params=use_orig_params, mixed_precision=low)
    shard = model._flat_param.untyped_storage().data_ptr()
    inside: list[bool] = []
    layer = model.module.inp
    layer.register_forward_hook(lambda *_: inside.append(layer.weight.untyped_storage().data_ptr() == shard))
    model(batch()).float().square().mean().backward()
    assert inside == [True] and model._flat_param.untyped_storage().data_ptr() == shard
