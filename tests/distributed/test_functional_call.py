"""functional_call, averaged weights for an evaluation, and parametrizations: they work as in the plain module, or are
refused before any change. Compared with the plain module: both ranks have the same data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils as nn_utils
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import ModuleWrapPolicy
from tests import training
from tests.distributed.test_reshard import LARGE, WIDTH, batch, full
from tests.ranks import all_strategies, both_views, on_ranks


def plain(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(3)
    unit = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(nn.Linear(width, width), unit, nn.Linear(width, 2)).double()


def wrap(module: nn.Module, strategy: str = "FULL_SHARD", **arguments: Any) -> FSDP:
    policy = ModuleWrapPolicy({nn.Sequential})
    return training.wrap(module, strategy=strategy, auto_wrap_policy=policy, **arguments)


def evaluated(model: nn.Module, width: int = WIDTH) -> Tensor:
    with torch.no_grad():
        return model(batch(width=width)).double()


def train(model: nn.Module, steps: int = 1, width: int = WIDTH) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(steps):
        model(batch(width=width)).double().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def halved(model: nn.Module, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
    return {name: of(param.detach() * 0.5) for name, param in model.named_parameters()}


# ----------------------------------------------------------------- for the time of a call


def call(model: nn.Module, params: dict[str, Tensor]) -> None:
    functional_call(model, params, (batch(),))


def with_parameters_of_another(model: FSDP) -> None:
    other = wrap(plain(), model.sharding_strategy.name, use_orig_params=model._use_orig_params)
    evaluated(other)
    call(model, dict(other.named_parameters()))


def by_grad(model: FSDP) -> None:
    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (batch(),)).square().mean()

    with torch.no_grad():
        torch.func.grad(loss)(halved(model))


def after_a_kept_forward(model: FSDP) -> None:
    kept = model(batch())  # noqa: F841  # a backward can follow
    call(model, halved(model))


def after_no_sync(model: FSDP) -> None:
    with model.no_sync():
        model(batch()).sum().backward()
    call(model, halved(model))


SWAPS: list[Callable[[FSDP], None]] = [
    lambda model: call(model, halved(model)),
    lambda model: call(model, dict([halved(model).popitem()])),
    lambda model: call(model, halved(model, nn.Parameter)),
    lambda model: call(nn.Sequential(model), halved(nn.Sequential(model))),
    with_parameters_of_another,
    by_grad,
    after_a_kept_forward,
    after_no_sync,
]


def check_refused(swap: Callable[[FSDP], None], rank: int, steps: int, **arguments: Any) -> None:
    model = wrap(plain(), **arguments)
    train(model, steps)
    before, objects = full(model), list(model.parameters())
    with pytest.raises(Exception, match="another tensor than the unit's|was replaced") as found:
        swap(model)
    message = str(found.value)
    assert f"rank {rank}" in message and "unit " in message, message
    if "another tensor" in message:
        assert "summon_full_params(module)" in message and "submodule" in message
    del found
    torch.testing.assert_close(full(model), before, rtol=0, atol=0)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    for param in objects:
        param.grad = None
    expected = wrap(plain(), **arguments)
    train(expected, steps)
    for one in (model, expected):
        train(one)
    torch.testing.assert_close(full(model), full(expected), rtol=0, atol=0)


@all_strategies
@both_views
@on_ranks(2)
def test_functional_call_on_a_unit_is_refused_before_any_change(
    rank: int, use_orig_params: bool, strategy: str
) -> None:
    for swap in SWAPS:
        for steps in (0, 1):
            check_refused(swap, rank, steps, strategy=strategy, use_orig_params=use_orig_params)


@on_ranks(2)
def test_functional_call_is_refused_with_mixed_precision_offload_and_segments(rank: int) -> None:
    for arguments in (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"cpu_offload": CPUOffload(True)},
    ):
        check_refused(SWAPS[0], rank, 1, **arguments)
    mixed = plain()
    mixed[0].float()
    model = wrap(mixed)
    before = full(model)
    with pytest.raises(RuntimeError, match="another tensor than the unit's"):
        call(model, halved(model))
    torch.testing.assert_close(full(model), before, rtol=0, atol=0)


@all_strategies
@both_views
@on_ranks(2)
def test_functional_call_with_the_units_own_parameters_works(strategy: str, use_orig_params: bool) -> None:
    model, expected = wrap(plain(), strategy, use_orig_params=use_orig_params), plain()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, expected)]
    for _ in range(3):
        for one, optimizer in zip((model, expected), optimizers, strict=True):
            functional_call(one, dict(one.named_parameters()), (batch(),)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(full(model), full(expected))


@all_strategies
@both_views
@on_ranks(2)
def test_functional_call_inside_summon_full_params_works(strategy: str, use_orig_params: bool) -> None:
    model, expected = wrap(plain(), strategy, use_orig_params=use_orig_params), plain()
    before = full(model)
    halves = halved(expected)
    with FSDP.summon_full_params(model), torch.no_grad():
        out = functional_call(model, halves, (batch(),))
    torch.testing.assert_close(out, functional_call(expected, halves, (batch(),)).detach())
    torch.testing.assert_close(full(model), before, rtol=0, atol=0)


@all_strategies
@on_ranks(2)
def test_functional_call_without_use_orig_params_is_right_or_refused(strategy: str) -> None:
    """Parameters are always noticed. Plain tensors are, too, in one forward of eight, and are used in the others."""
    model, expected = wrap(plain(), strategy, use_orig_params=False), plain()
    before, right = full(model), 0
    for index in range(18):
        of = nn.Parameter if index >= 9 else Tensor.requires_grad_
        halves, twins = halved(expected, of), halved(expected, of)
        try:
            loss = functional_call(model, halves, (batch(),)).square().mean()
        except RuntimeError as error:
            assert "something else was assigned to" in str(error) and "summon_full_params" in str(error)
        else:
            loss.backward()
            functional_call(expected, twins, (batch(),)).square().mean().backward()
            for name, half in halves.items():
                torch.testing.assert_close(half.grad, twins[name].grad)
            right += 1
        torch.testing.assert_close(full(model), before, rtol=0, atol=0)
        assert all(param.is_leaf for param in model.parameters())
    assert 0 < right < 9
    train(model)
    train(expected)
    torch.testing.assert_close(full(model), full(expected))


@all_strategies
@on_ranks(2)
def test_a_parameter_that_is_assigned_is_no_swap(strategy: str) -> None:
    """Assignments before any forward and later, twice in a row, and after a deletion."""
    model, expected = wrap(plain(), strategy), plain()
    for _ in range(2):
        for one in (model, expected):
            last = one[2]
            for factor in (3, 2):
                last.weight = nn.Parameter(last.weight.detach() * factor)
            bias = last.bias
            del last.bias
            last.bias = nn.Parameter(bias.detach() + 1)
        torch.testing.assert_close(evaluated(model), evaluated(expected))
        train(model)
        train(expected)
        torch.testing.assert_close(full(model), full(expected))


# ----------------------------------------------------------------- averaged weights, for an evaluation


def assign_data(model: nn.Module) -> Callable[[], None]:
    """Like most scripts with an average of their own."""
    held = {param: param.data for param in model.parameters()}
    for param in held:
        param.data = param.detach() * 0.5

    def restore() -> None:
        for param, data in held.items():
            param.data = data

    return restore


def assign_parameters(model: nn.Module) -> Callable[[], None]:
    held = [
        (module, name, param)
        for module in model.modules()
        for name, param in list(module._parameters.items())
        if param is not None
    ]
    for module, name, param in held:
        setattr(module, name, nn.Parameter(param.detach() * 0.5))

    def restore() -> None:
        for module, name, param in held:
            setattr(module, name, param)

    return restore


def swap_tensors(model: nn.Module) -> Callable[[], None]:
    pairs = [(param, nn.Parameter(param.detach() * 0.5)) for param in model.parameters()]

    def swap() -> None:
        for pair in pairs:
            torch.utils.swap_tensors(*pair)

    swap()
    return swap


AVERAGES: list[Callable[[nn.Module], Callable[[], None]]] = [
    assign_data,
    assign_parameters,
    swap_tensors,
]


def compare_average(
    put_in: Callable[[nn.Module], Callable[[], None]], width: int = WIDTH, **arguments: Any
) -> None:
    """An evaluation with halved weights between training steps, twice."""
    model, expected = wrap(plain(width), **arguments), plain(width)
    rtol = 1e-2 if arguments.get("mixed_precision") else 1e-9
    for _ in range(2):
        results = []
        for one in (model, expected):
            train(one, width=width)
            before = full(one)
            restore = put_in(one)
            results.append(evaluated(one, width))
            restore()
            torch.testing.assert_close(full(one), before, rtol=0, atol=0)
            results.append(evaluated(one, width))
        torch.testing.assert_close(results[0], results[2], rtol=rtol, atol=rtol)
        torch.testing.assert_close(results[1], results[3], rtol=rtol, atol=rtol)
    torch.testing.assert_close(full(model), full(expected), rtol=rtol, atol=rtol)


@all_strategies
@on_ranks(2)
def test_an_evaluation_of_averaged_weights_leaves_the_weights(strategy: str) -> None:
    for put_in in AVERAGES:
        compare_average(put_in, strategy=strategy)
    compare_average(assign_data, strategy=strategy, use_orig_params=False)


@on_ranks(2)
def test_averaged_weights_in_low_precision_with_offload_and_in_large_units() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for put_in in AVERAGES:
        compare_average(put_in, mixed_precision=low)
        compare_average(put_in, cpu_offload=CPUOffload(True))
    compare_average(assign_data, width=LARGE)


@both_views
@on_ranks(2)
def test_an_evaluation_inside_an_accumulation_uses_averaged_weights(use_orig_params: bool) -> None:
    """Under SHARD_GRAD_OP parameters stay unsharded after no_sync."""
    model, expected = wrap(plain(), "SHARD_GRAD_OP", use_orig_params=use_orig_params), plain()
    for one in (model, expected):
        with getattr(one, "no_sync", contextlib.nullcontext)():
            one(batch()).square().mean().backward()
        assign_data(one)
    torch.testing.assert_close(evaluated(model), evaluated(expected))


# ----------------------------------------------------------------- parameters that are computed


COMPUTED: list[Callable[[nn.Module], Any]] = [
    lambda layer: nn_utils.weight_norm(layer, "weight"),
    lambda layer: nn_utils.spectral_norm(layer, "weight"),
    lambda layer: parametrizations.weight_norm(layer, "weight"),
    lambda layer: prune.l1_unstructured(layer, "weight", amount=3),
]


@all_strategies
@on_ranks(2)
def test_parametrizations_work_before_wrapping_and_are_refused_after_it(rank: int, strategy: str) -> None:
    for compute in COMPUTED:
        for use_orig_params in (True, False):
            models = []
            for wrapped in (True, False):
                net = plain()
                torch.manual_seed(7)  # spectral_norm draws its first vectors
                compute(net[0])
                compute(net[1][0])
                models.append(wrap(net, strategy, use_orig_params=use_orig_params) if wrapped else net)
                train(models[-1], steps=2)
            torch.testing.assert_close(evaluated(models[0]), evaluated(models[1]))
            torch.testing.assert_close(full(models[0]), full(models[1]))
        for steps in (0, 1):
            model = wrap(plain(), strategy)
            train(model, steps)
            compute(model[1][0])
            where = f"rank {rank}, unit Sequential at '1'"
            with pytest.raises(RuntimeError, match=f"{where}: 0.weight was taken .*before wrapping"):
                model(batch())
