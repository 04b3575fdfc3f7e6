"""Flat parameters are leaves of the graph, where backward(inputs=...), autograd.grad and data parallelism
find them."""

from __future__ import annotations

import importlib
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_c import FullyShardedDataParallel
from tests.ranks import device, on_ranks

own_ranks = on_ranks(2, label="edges")  # the import lasts
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "reduce_bf16": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return layers.to(device())


def wrapped(alone: bool = False, units: bool = True, **options: Any) -> FullyShardedDataParallel:
    """Return a model with a unit per layer, whose flat parameters are in the graph.

    ``alone``: each rank has its own process group.
    """
    importlib.import_module("torch.distributed.pipelining")
    if alone:
        options["process_group"] = [dist.new_group([rank]) for rank in range(dist.get_world_size())][
            dist.get_rank()
        ]
    policy = ModuleWrapPolicy({nn.Linear}) if units else None
    return FullyShardedDataParallel(plain(), device_id=device(), auto_wrap_policy=policy, **options)


def inputs_of(rank: int, step: int = 0) -> Tensor:
    return torch.arange(24.0, device=device()).view(4, 6).add(7 * rank + 3 * step).sin()


def loss_of(model: nn.Module, rank: int, step: int = 0, forwards: int = 1) -> Tensor:
    losses = [model(inputs_of(rank, step + 10 * index)).float().square().mean() for index in range(forwards)]
    return torch.stack(losses).sum()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def flat(model: nn.Module) -> Tensor:
    """Return all gradients of a model in one tensor."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    assert ours
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
@pytest.mark.parametrize("name", OPTIONS)
@own_ranks
def test_backward_with_inputs_of_all_flat_parameters_equals_backward(rank: int, name: str) -> None:
    named, usual = wrapped(**OPTIONS[name]), wrapped(**OPTIONS[name])
    for step, (sync, forwards, retain) in enumerate([(True, 1, False), (False, 2, False), (True, 1, True)]):
        for model in (named, usual):
            with nullcontext() if sync else model.no_sync():
                loss = loss_of(model, rank, step, forwards)
                inputs = {"inputs": list(model.parameters())} if model is named else {}
                for _ in range(1 + retain):
                    loss.backward(retain_graph=retain, **inputs)
        assert_same(gradients(named), gradients(usual))
    assert all(grad is not None for grad in gradients(named))


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
@pytest.mark.parametrize("name", OPTIONS)
@own_ranks
def test_backward_with_inputs_leaves_other_flat_parameters_alone(rank: int, name: str) -> None:
    model, usual = wrapped(**OPTIONS[name]), wrapped(**OPTIONS[name])
    for each in (model, usual):
        loss_of(each, rank).backward()
    before = gradients(model)
    loss_of(model, rank, 1).backward(inputs=[list(model.parameters())[1]])
    loss_of(usual, rank, 1).backward()
    after = gradients(model)
    assert_same([after[0], after[2]], [before[0], before[2]])
    assert_same([after[1]], [gradients(usual)[1]])
    for each in (model, usual):  # and the next step is in order
        each.zero_grad()
        loss_of(each, rank, 2).backward()
    assert_same(gradients(model), gradients(usual))


@own_ranks
def test_backward_with_inputs_of_one_flat_parameter_of_a_unit(rank: int) -> None:
    def build() -> FullyShardedDataParallel:
        torch.manual_seed(0)
        halves = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64))
        halves[1].register_forward_pre_hook(lambda module, args: args[0].double())
        return FullyShardedDataParallel(halves.to(device()), device_id=device())

    model, usual = build(), build()
    assert len(list(model.parameters())) == 2
    loss_of(usual, rank).backward()
    for index in range(2):
        loss_of(model, rank).backward(inputs=[list(model.parameters())[index]])
        expected = [grad if place <= index else None for place, grad in enumerate(gradients(usual))]
        assert_same(gradients(model), expected)


@pytest.mark.parametrize("orig_hooks", [False, True])
@own_ranks
def test_autograd_grad_returns_gradients_of_unsharded_flat_parameters(rank: int, orig_hooks: bool) -> None:
    model, expected = wrapped(alone=True), plain()
    if orig_hooks:  # autograd calls hooks on original parameters
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 2)
    loss_of(expected, rank).backward()
    grads = torch.autograd.grad(loss_of(model, rank), list(model.parameters()))
    torch.testing.assert_close(torch.cat(grads), flat(expected) * (1 + orig_hooks), rtol=0.0, atol=0.0)
    assert gradients(model) == [None] * 3
    loss_of(model, rank).backward()
    torch.testing.assert_close(flat(model), flat(expected) * (1 + orig_hooks), rtol=0.0, atol=0.0)


@own_ranks
def test_autograd_grad_of_shards_is_refused(rank: int) -> None:
    model, usual = wrapped(), wrapped()
    with pytest.raises(
        RuntimeError, match=rf"rank {rank}, unit .*: torch.autograd.grad\(\) cannot .*backward\("
    ):
        torch.autograd.grad(loss_of(model, rank), list(model.parameters()))
    for each in (model, usual):
        loss_of(each, rank).backward()
    assert_same(gradients(model), gradients(usual))


@own_ranks
def test_backward_with_inputs_warns_of_original_parameters_left_out(rank: int) -> None:
    """Zero-bubble schedules call such backwards first. A plain backward is not warned of."""
    for use_orig_params, warned in ((True, {"0", "2", "4"}), (False, set())):
        model = wrapped(use_orig_params=use_orig_params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model, rank).backward()
            assert not any("named tensors" in str(one.message) for one in caught)
            model.zero_grad()
            x = inputs_of(rank).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        units = [
            re.search(r"rank (\d), unit Linear at '(\d)': a backward to named", str(one.message))
            for one in caught
        ]
        assert {found[2] for found in units if found and found[1] == str(rank)} == warned


@own_ranks
def test_separate_backwards_for_inputs_and_weights(rank: int) -> None:
    """As zero-bubble schedules of torch.distributed.pipelining have them, for two microbatches."""
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    model, expected = wrapped(alone=True, units=False), plain()
    for step in range(2):
        found = []
        for each in (model, expected):
            x = inputs_of(rank, step).requires_grad_()
            output = each(x)
            grad = output.detach().cos()
            of_inputs, groups = backward.stage_backward_input([output], [grad], [x], each.parameters())
            backward.stage_backward_weight(each.parameters(), groups)
            found.append(of_inputs[0])
        torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=0.0)
        torch.testing.assert_close(flat(model), flat(expected), rtol=1e-6, atol=1e-7)


@own_ranks
def test_a_pipeline_of_units_that_are_not_sharded_trains(rank: int, world_size: int) -> None:
    """The units have use_orig_params, with which torch's FSDP1 silently takes wrong steps."""
    if device().type != "cpu":
        pytest.skip("gloo's point-to-point calls are of the CPU")
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    groups = [dist.new_group([one]) for one in range(world_size)]

    def losses(implementation: Any) -> list[float]:
        torch.manual_seed(0)
        module = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(world_size)][rank]
        if implementation is not None:
            module = implementation(module, groups[rank], device_id=device(), use_orig_params=True)
        stage = pipelining.PipelineStage(module, rank, world_size, device())
        schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        parts: list[Tensor] = []
        for step in range(3):
            torch.manual_seed(step)
            x, target = torch.randn(8, 8), torch.randn(8, 8)
            schedule.step(x) if rank == 0 else schedule.step(target=target, losses=parts)
            optimizer.step()
            optimizer.zero_grad()
        return [part.item() for part in parts]

    expected = losses(None)
    assert losses(FullyShardedDataParallel) == pytest.approx(expected, rel=1e-5)
    # losses are the last stage's
    assert (losses(Upstream) == pytest.approx(expected, rel=1e-3)) == (rank == 0)


# ------------------------------------------------------------ DistributedDataParallel


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("kind", ["alone", "NO_SHARD"])
@own_ranks
def test_ddp_around_units_averages_as_around_the_plain_module(
    rank: int, kind: str, bucket_view: bool
) -> None:
    model = wrapped(alone=True) if kind == "alone" else wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    expected = plain()
    pair = [DistributedDataParallel(each, gradient_as_bucket_view=bucket_view) for each in (model, expected)]
    for step, (sync, clear) in enumerate([(True, False), (False, False), (True, True), (True, True)]):
        for each in pair:
            with nullcontext() if sync else each.no_sync():
                loss_of(each, rank, step).backward()
        if sync:
            torch.testing.assert_close(flat(model), flat(expected), rtol=1e-6, atol=1e-7)
        for each in pair if clear else []:
            each.zero_grad()


@own_ranks
def test_ddp_around_shards_is_refused(rank: int) -> None:
    model = DistributedDataParallel(wrapped())
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"rank {rank}, unit .*: DistributedDataParallel cannot .*HYBRID_SHARD"
        ):
            loss_of(model, rank)


@pytest.mark.parametrize(
    "options", [{"use_orig_params": True}, {"mixed_precision": MixedPrecision(torch.bfloat16)}]
)
@own_ranks
def test_ddp_that_never_averages_is_warned_of(rank: int, options: dict[str, Any]) -> None:
    """Torch is silent."""
    model = DistributedDataParallel(wrapped(alone=True, **options))
    with pytest.warns(
        UserWarning, match=r"rank 0, unit .*: DistributedDataParallel never averages .*HYBRID_SHARD"
    ):
        loss_of(model, rank).backward()


@own_ranks
def test_ddp_that_ignores_the_units_is_allowed(rank: int) -> None:
    """Its own parameters are averaged, those of the units sharded."""
    inner = wrapped(units=False)
    model = nn.Sequential(inner, nn.Linear(4, 2).to(device()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [f"0.{name}" for name, _ in inner.named_parameters()]
    )
    loss_of(DistributedDataParallel(model), rank).backward()
    usual = wrapped(units=False)
    (model[1](usual(inputs_of(rank))).float().square().mean()).backward()
    assert_same(gradients(inner), gradients(usual))
