"""Freezing, zeroing and inference between the backwards of a step: losses, gradients and parameters equal the
plain module's.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import Tensor, nn

from tests.models import WIDTH
from tests.parity.engine import Point
from tests.parity.plain_programs import run_program
from tests.parity.programs import BlockPlan, Operation, Program, operation
from tests.ranks import all_strategies, both_views, on_ranks
from tests.storage import live_nbytes, settled_nbytes
from tests.training import full_state, sharded, wrap

# Actions on a model of two units and a root, with a frozen LayerNorm: its backward reads the weight itself,
# no view of it.
ACTIONS: dict[str, tuple[Operation, ...]] = {
    "sync": (operation("train"),),
    "no_sync": (operation("train", sync=False),),
    "step": (operation("step"),),
    "to_none": (operation("zero_grad", to_none=True),),
    "to_zero": (operation("zero_grad", to_none=False),),
    "to_none_after_forward": (
        operation("forward"),
        operation("zero_grad", to_none=True),
        operation("backward"),
    ),
    "to_zero_after_forward": (
        operation("forward"),
        operation("zero_grad", to_none=False),
        operation("backward"),
    ),
    "weights_to_none": (operation("zero_weights", to_none=True),),
    "weights_to_zero": (operation("zero_weights", to_none=False),),
    "replace_gradients": (operation("edit_gradients", replace=True),),
    "replace_data": (operation("edit", how="data", held=True),),
    "hold": (operation("forward"),),
    "sync_with_held": (operation("forward"), operation("backward", graphs=(0, 1))),
    "infer": (operation("forward", mode="inference"),),
    "infer_with_gradients_on": (operation("forward", mode="inference with grad"),),
    "evaluate_with_gradients_on": (
        operation("forward", mode="no_grad with grad"),
        operation("backward"),
    ),
    "freeze": (operation("freeze", block=1, inner=False, frozen=True),),
    "thaw": (operation("freeze", block=1, inner=False, frozen=False),),
    "freeze_a_weight": (operation("freeze", block=2, inner=True, frozen=True),),
    "thaw_a_weight": (operation("freeze", block=2, inner=True, frozen=False),),
    "look_at_gradients": (operation("summon", writeback=False, recurse=True, with_grads=True),),
}


def assert_as_plain(rank: int, world_size: int, names: str, strategy: str, use_orig_params: bool) -> None:
    unit = BlockPlan("single", 1, "unit", strategy, "none", None)
    program = Program(
        seed=0,
        width=5,
        blocks=(unit, unit, BlockPlan("tied", 1, "none", strategy, "none", None)),
        point=Point("plain", strategy, use_orig_params, optimizer="sgd"),
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=False,
        limit_all_gathers=True,
        operations=tuple(one for name in names.split() for one in ACTIONS[name]),
    )
    failure = run_program(rank, world_size, program, is_legal=True)
    assert failure is None, f"{failure}\n{program}"


OF_UNITS = [
    # a unit frozen around an inference
    "sync step to_none freeze infer_with_gradients_on sync",
    "evaluate_with_gradients_on step to_none sync",
    "sync step to_zero freeze infer sync step sync",
    "sync freeze infer sync",
    "sync step to_none freeze infer sync thaw sync",
    "infer_with_gradients_on sync step sync",
    "sync step to_none hold freeze sync_with_held step sync",
    "sync step to_none freeze hold thaw sync_with_held step sync",
    # zeroed gradients left by no_sync
    "sync no_sync to_zero sync",
    "sync no_sync to_none sync",
    "sync no_sync to_zero_after_forward",
    "sync no_sync to_none_after_forward",
    "sync no_sync to_zero no_sync sync",
    "sync no_sync no_sync sync to_zero no_sync sync",
    "sync no_sync to_zero infer sync step to_zero sync",
    "sync no_sync infer sync",
    # gradients of a unit frozen later
    "sync freeze sync step sync",
    "sync freeze no_sync sync",
    "no_sync freeze sync",
    "sync no_sync freeze sync step to_none sync",
    "sync freeze sync thaw sync",
    "sync freeze sync to_zero sync",
    "sync freeze to_none sync thaw sync",
    "sync freeze to_none_after_forward",
    # gradients and data first seen in inference mode
    "sync replace_gradients infer to_zero sync",
    "sync step to_none replace_data infer sync step sync",
]
OF_PARAMETERS = [
    "sync step to_none freeze_a_weight infer_with_gradients_on sync",
    "sync step to_none hold freeze_a_weight sync_with_held step sync",
    "sync step to_none hold freeze_a_weight infer sync_with_held step sync",
    "sync step to_none hold freeze_a_weight infer_with_gradients_on sync_with_held step sync",
    "sync step to_none freeze_a_weight hold thaw_a_weight sync_with_held step sync",
    "sync no_sync weights_to_zero sync",
    "sync no_sync weights_to_none sync",
    "sync no_sync weights_to_zero no_sync sync",
    "sync weights_to_zero no_sync sync",
    "no_sync weights_to_none no_sync sync",
    "no_sync weights_to_none no_sync look_at_gradients sync",
    "sync freeze_a_weight no_sync sync",
    "no_sync freeze_a_weight sync step sync",
    "sync no_sync freeze_a_weight sync",
    "sync freeze_a_weight sync thaw_a_weight sync",
    "sync freeze_a_weight weights_to_none sync",
    "sync freeze_a_weight look_at_gradients sync look_at_gradients",
    "sync freeze look_at_gradients sync look_at_gradients",
    "freeze_a_weight sync look_at_gradients",
    "freeze_a_weight no_sync thaw_a_weight no_sync sync look_at_gradients",
]


@all_strategies
@both_views
@on_ranks(2, timeout_s=180.0)
def test_frozen_and_zeroed_units_train_as_the_plain_model(
    rank: int, world_size: int, use_orig_params: bool, strategy: str
) -> None:
    for names in OF_UNITS:
        assert_as_plain(rank, world_size, names, strategy, use_orig_params)


@all_strategies
@on_ranks(2, timeout_s=180.0)
def test_frozen_and_zeroed_parameters_train_as_the_plain_model(
    rank: int, world_size: int, strategy: str
) -> None:
    for names in OF_PARAMETERS:
        assert_as_plain(rank, world_size, names, strategy, use_orig_params=True)


@all_strategies
@both_views
@on_ranks(2)
def test_a_model_freed_in_inference_mode_leaves_no_storage(use_orig_params: bool, strategy: str) -> None:
    """The views release their history in inference mode too."""
    before = settled_nbytes()
    model = sharded(strategy=strategy, use_orig_params=use_orig_params)
    model(torch.ones(2, WIDTH)).sum().backward()
    with torch.inference_mode():
        del model
        gc.collect()
    gc.collect()
    assert live_nbytes() <= before


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.other(x) if other else self.one(x)


@both_views
@on_ranks(2)
def test_a_zero_gradient_is_not_taken_for_a_zeroed_one(use_orig_params: bool) -> None:
    x = torch.ones(2, WIDTH)
    model, plain = wrap(OneOfTwo(), use_orig_params=use_orig_params), OneOfTwo()
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(x, True).sum().backward()
        with each.no_sync() if each is model else contextlib.nullcontext():
            each(x, False).sum().backward()
        each(x, False).sum().backward()
        optimizer.step()
    torch.testing.assert_close(full_state(model), dict(plain.state_dict()))
