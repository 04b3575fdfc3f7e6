"""use_orig_params: parameters and gradients that users see, as with torch's FSDP1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import all_strategies, device, on_ranks
from tests.training import batch, sharded, wrap

SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(rank, step)).float().square().mean().backward()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names in the user's model."""
    return {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}


@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_parameters_are_flat_shards_and_empty_outside_of_it(rank: int, strategy: str) -> None:
    model = sharded("fsdp_c", strategy)
    backward(model, 0, rank)
    infos = zip(model._flat_param._params, model._flat_param._shard_param_infos, strict=True)
    seen = set()
    for param, info in infos:
        seen.add(info.in_shard)
        assert param.dim() == 1 and param.numel() == (info.numel_in_shard if info.in_shard else 0)
        assert isinstance(param, nn.Parameter) and (param.grad is None) == (not info.in_shard)
        if info.in_shard:
            assert param.grad.shape == param.shape
            start, end = info.offset_in_shard, info.offset_in_shard + info.numel_in_shard
            assert torch.equal(param.detach(), model._flat_param._local_shard[start:end])
            assert torch.equal(param.grad, model._flat_param.grad[start:end])
    assert True in seen


@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_the_flat_gradient_is_freed_with_the_last_parameters_gradient(rank: int, strategy: str) -> None:
    model = sharded("fsdp_c", strategy)
    flat_param = model._flat_param

    def shown() -> list[nn.Parameter]:
        return [param for param in flat_param._params if param.grad is not None]

    for order in (1, -1):
        backward(model, 0, rank)
        for param in shown()[::order]:
            assert flat_param.grad is not None
            param.grad = None
        assert flat_param.grad is None and model._handle.sharded_grad is None
    backward(model, 0, rank)
    for param in shown():  # the next backward adds to replaced gradients
        assert flat_param.grad is not None
        param.grad = param.grad.clone().fill_(3.0)
    assert flat_param.grad is None
    backward(model, 0, rank)
    twice = flat_param.grad.clone()
    for param in shown():
        param.grad = None
    backward(model, 0, rank)
    covered = flat_param.grad != 0
    assert torch.equal(twice[covered], flat_param.grad[covered] + 3.0)


@all_strategies
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@on_ranks(2)
def test_weights_after_forward_and_backward_have_torchs_types_and_shapes(
    rank: int, grad: bool, strategy: str
) -> None:
    shown = {}
    for name in ("torch", "fsdp_c"):
        model = sharded(name, strategy)
        with torch.set_grad_enabled(grad):
            output = model(batch(rank, 0))
        weights = [model.inp.weight, model.blocks[0]._fsdp_wrapped_module.up.weight]
        shown[name] = [(type(weight), weight.shape) for weight in weights]
        if grad:
            output.square().mean().backward()
        weights = [model.inp.weight, model.blocks[0]._fsdp_wrapped_module.up.weight]
        shown[name] += [(type(weight), weight.shape) for weight in weights]
    assert shown["torch"] == shown["fsdp_c"]


class Vectors(nn.Module):
    """Parameters of the given sizes, and a layer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(size)) for size in sizes)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.b + self.c) + self.a.sum()


@pytest.mark.parametrize("names", [("c",), ("a",), ("b", "a")])
@all_strategies
@on_ranks(2)
def test_parameters_beside_ignored_ones_have_torchs_order(strategy: str, names: tuple[str, ...]) -> None:
    """Saved optimizer state has parameters by these numbers."""
    orders = []
    for name in ("torch", "fsdp_c"):
        module = Vectors(4, 4, 4)
        ignored = [getattr(module, ignored_name) for ignored_name in names]
        model = wrap(module, name, strategy, ignored_states=ignored)
        before = list(named(model)), list(model.state_dict())
        model(torch.ones(2, 4, device=device())).sum().backward()
        orders.append((before, list(named(model)), list(model.state_dict())))
    assert orders[0] == orders[1]


@all_strategies
@on_ranks(2)
def test_an_empty_parameter_has_no_gradient_as_with_torch(strategy: str) -> None:
    found = []
    for name in ("torch", "fsdp_c"):
        model = wrap(Vectors(0, 4, 4), name, strategy)
        model(torch.ones(2, 4, device=device())).sum().backward()
        grads = {each: param.grad for each, param in named(model).items()}
        found.append({each: None if grad is None else grad.shape for each, grad in grads.items()})
    assert found[0] == found[1] and found[1]["a"] is None
