"""FSDP_USE_FULL_PREC_IN_EVAL=1: with mixed precision a unit in eval mode all-gathers and computes in full
precision.

Results must be bitwise torch's where torch is right, and the plain model's where torch computes with a copy
unsharded before the optimizer's step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import cycle, product
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from tests.models import WIDTH, Net
from tests.parity.engine import PRECISIONS, Point, Run, Scenario, compare
from tests.parity.scenarios import per_block, root_without_parameters, with_arguments
from tests.ranks import STRATEGIES, all_strategies, both_views, on_ranks
from tests.training import batch, sharded, wrap

BF16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


@contextlib.contextmanager
def full_precision_in_eval() -> Iterator[None]:
    with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        yield


def interleaved_step(run: Run) -> None:
    """Evaluate, run a backward in eval mode, and train on top of those gradients.

    The backward precedes the optimizer's step and frees the parameters that torch would otherwise keep
    unsharded beyond it.
    """
    run.model.eval()
    with torch.no_grad():
        run.record("evaluated", run.model(run.batch(3)))
    run.forward_backward(1)
    run.model.train()
    for name, buffer in run.model.named_buffers():
        run.record(f"in eval: buffer {name}", buffer)
    run.forward_backward(0)
    run.optimizer_step()


def one_block_in_eval_step(run: Run) -> None:
    """Put one block in eval mode, so that neighbouring units have different precisions. The root gets
    full-precision input.
    """
    run.model.train()
    run.model.blocks[1].eval()
    loss = run.loss(run.model(run.batch().float()))
    run.record("loss", loss)
    loss.backward()
    run.record_grads("after backward")
    run.optimizer_step()


def grid() -> Iterator[Point]:
    precisions = sorted(PRECISIONS.keys() - {"cast_inputs"})  # there the inputs are in low precision
    for (precision, strategy), orig in product(zip(precisions, cycle(STRATEGIES)), (True, False)):
        yield Point("interleaved", strategy, orig, precision, "sgd")
    cases = [*product(("root_without_parameters", "prefetch_forward"), ("bf16_reduce_fp32", "reduce_bf16"))]
    for (name, precision), orig in product([*cases, ("one_block_in_eval", "cast_inputs")], (True, False)):
        yield Point(name, "FULL_SHARD", orig, precision, "sgd")


SCENARIOS = {
    "interleaved": Scenario(per_block(), interleaved_step),
    "root_without_parameters": Scenario(root_without_parameters, interleaved_step),
    "prefetch_forward": Scenario(with_arguments(forward_prefetch=True), interleaved_step),
    "one_block_in_eval": Scenario(per_block(), one_block_in_eval_step),
}


@pytest.mark.parametrize("point", [pytest.param(point, id=point.id) for point in grid()])
@on_ranks(2)
def test_training_with_evaluation_between_equals_torch(rank: int, world_size: int, point: Point) -> None:
    with full_precision_in_eval():
        compare(point, SCENARIOS[point.scenario], rank, world_size)


@on_ranks(2)
def test_unit_without_parameters_does_not_cast_its_inputs() -> None:
    """A cast makes inputs match the parameters, so without parameters there is none, as in torch."""
    casting = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    seen = []
    for which in ("torch", "fsdp_c"):
        inner = wrap(nn.Identity(), which, mixed_precision=casting)
        inner.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        wrap(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), which)(torch.ones(2, WIDTH))
    assert seen == [torch.float32, torch.float32]


# ----------------------------------------------------------------- where torch is stale: the plain module


def full_copy(model: nn.Module) -> Net:
    plain = Net()
    plain.load_state_dict(model.state_dict())
    return plain


@all_strategies
@both_views
@on_ranks(2)
def test_evaluation_equals_the_plain_model_after_every_step(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    """Outputs are in fp32 and use the current parameters, and nothing stays unsharded."""
    with full_precision_in_eval():
        model = sharded("fsdp_c", strategy, use_orig_params=use_orig_params, mixed_precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(rank)
    for _ in range(3):
        model.train()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found, expected = model(x), full_copy(model)(x)
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
        assert all(handle.unsharded_nbytes == 0 for handle in model._all_handles)


@all_strategies
@both_views
@on_ranks(2)
def test_backward_is_in_the_precision_of_its_forward(rank: int, strategy: str, use_orig_params: bool) -> None:
    """An evaluation or a summon in eval mode between a forward and its backward changes nothing."""
    x = batch(rank)
    found = []
    for evaluate in (False, True):
        with full_precision_in_eval():
            model = sharded("fsdp_c", strategy, use_orig_params=use_orig_params, mixed_precision=BF16)
        loss = model(x).float().square().mean()
        if evaluate:
            model.eval()
            with torch.no_grad():
                assert model(x).dtype is torch.float32
            with type(model).summon_full_params(model):
                assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        loss.backward()
        found.append([None if parameter.grad is None else parameter.grad for parameter in model.parameters()])
    assert any(grad is not None and grad.count_nonzero() for grad in found[0])
    for expected, actual in zip(*found, strict=True):
        assert (expected is None) == (actual is None)
        assert expected is None or torch.equal(expected, actual)


@both_views
@on_ranks(2)
def test_gradients_of_both_precisions_accumulate_in_no_sync(rank: int, use_orig_params: bool) -> None:
    """Unsharded gradients of a training forward in bf16 accumulate with those of an evaluation in fp32, in
    either order.
    """
    x = batch(rank)
    for modes in ((True, False), (False, True)):
        found = []
        for accumulate in (False, True):
            with full_precision_in_eval():
                model = sharded("fsdp_c", "FULL_SHARD", use_orig_params=use_orig_params, mixed_precision=BF16)
            model.train(modes[0])
            with model.no_sync() if accumulate else contextlib.nullcontext():
                model(x).float().square().mean().backward()
            model.train(modes[1])
            model(x).float().square().mean().backward()
            found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        for expected, actual in zip(*found, strict=True):
            assert actual.count_nonzero()
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-3)


@both_views
@on_ranks(2)
def test_buffers_registered_after_wrapping_get_their_own_dtype_back(rank: int, use_orig_params: bool) -> None:
    """torch raises for buffers that were registered after wrapping."""
    with full_precision_in_eval():
        model = sharded("fsdp_c", use_orig_params=use_orig_params, mixed_precision=BF16)
    late = torch.tensor([1 / 3])
    model.blocks[0].module.register_buffer("late", late)
    dtypes = []
    for trains in (True, False, True, False):
        with torch.no_grad():
            model.train(trains)(batch(rank))
        dtypes.append(late.dtype)
        if trains:
            model.module.register_buffer("second", late)
    assert dtypes == [torch.bfloat16, torch.float32] * 2
