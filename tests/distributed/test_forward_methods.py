"""register_forward_method: methods other than forward compute with unsharded parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import register_forward_method
from tests.models import WIDTH, Net
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, all_strategies, both_views, on_ranks
from tests.training import PER_BLOCK, batch, full_state, wrap


class Generator(Net):
    """A model with methods besides forward; one of them calls forward."""

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Uses the root's own parameters and a unit inside."""
        return self.blocks[0](self.inp(x)) * scale

    @torch.no_grad()
    def generate(self, x: Tensor, *, steps: int = 3) -> list[Tensor]:
        outputs = []
        for _ in range(steps):
            x = torch.tanh(self(self.encode(x)))
            outputs.append(x)
        return outputs

    def through_forward(self, x: Tensor) -> Tensor:
        """Calls a unit."""
        return self.blocks[0](x)

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError("planted")


def plain() -> Generator:
    torch.manual_seed(5)
    return Generator()


def build(strategy: str = "FULL_SHARD", use_orig_params: bool = True, **arguments: Any) -> Any:
    options = {"use_orig_params": use_orig_params, "auto_wrap_policy": PER_BLOCK}
    return wrap(plain(), strategy=strategy, **options, **arguments)


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, registered=["unit", "inner"])
@on_ranks(2)
def test_registered_method_equals_the_plain_modules(
    rank: int, world_size: int, strategy: str, use_orig_params: bool, registered: str
) -> None:
    model, reference = build(strategy, use_orig_params), plain()
    register_forward_method(model if registered == "unit" else model.module, "encode")
    assert torch.equal(model.encode(batch(rank), scale=2.0), reference.encode(batch(rank), scale=2.0))
    output = model.module.encode(batch(rank))
    assert torch.equal(output, reference.encode(batch(rank)))
    output.square().mean().backward()
    for other in range(world_size):
        (reference.encode(batch(other)).square().mean() / world_size).backward()
    for one in (model, reference):
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    torch.testing.assert_close(full_state(model), dict(reference.state_dict()))


@both_views
@all_strategies
@on_ranks(2)
def test_method_that_calls_forward_and_another_method_gathers_once(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    model, reference = build(strategy, use_orig_params), plain()
    register_forward_method(model, "encode")
    register_forward_method(model, "generate")
    expected = reference.generate(batch(rank), steps=4)
    for _ in range(2):
        for ours, theirs in zip(model.generate(batch(rank), steps=4), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(model(batch(rank)), reference(batch(rank)))


@on_ranks(2)
def test_parameters_are_resharded_after_the_method_and_after_its_exception(rank: int) -> None:
    model = build()
    register_forward_method(model, "generate")
    register_forward_method(model, "fail")
    model.generate(batch(rank))
    assert all(handle.unsharded_nbytes == 0 for handle in model._all_handles)
    with pytest.raises(ValueError, match="planted"):
        model.fail(batch(rank))
    assert all(handle.unsharded_nbytes == 0 for handle in model._all_handles)
    assert torch.equal(model(batch(rank)), plain()(batch(rank)))


@both_views
@on_ranks(2)
def test_registered_method_runs_inside_summon_full_params(rank: int, use_orig_params: bool) -> None:
    model = FSDP(plain(), use_orig_params=use_orig_params)
    register_forward_method(model, "generate")
    with FSDP.summon_full_params(model):
        outputs = model.generate(batch(rank))
    assert all(torch.equal(*pair) for pair in zip(outputs, plain().generate(batch(rank)), strict=True))


@both_views
@on_ranks(2)
def test_error_of_an_unregistered_method_names_the_unit_and_the_remedy(
    rank: int, use_orig_params: bool
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as found:
        wrap(plain(), "torch", use_orig_params=use_orig_params).encode(batch(rank))
    assert "register_forward_method" not in str(found.value)
    model = build(use_orig_params=use_orig_params)
    with pytest.raises((RuntimeError, IndexError)) as found:
        model.encode(batch(rank))
    message = str(found.value)
    for part in (
        f"rank {rank}, unit Generator",
        "parameters of ['Generator'] are sharded now",
        "register_forward_method(module, 'encode')",
    ):
        assert part in message
    register_forward_method(model, "encode")
    assert torch.equal(model.encode(batch(rank)), plain().encode(batch(rank)))


@on_ranks(2)
def test_error_of_a_method_with_gathered_parameters_stays_as_it_is(rank: int) -> None:
    """The method's own errors, errors inside a forward, and errors inside summon_full_params are unchanged."""
    model = build()
    model(batch(rank))
    with pytest.raises(ValueError, match="^planted$"):
        model.fail(batch(rank))
    with pytest.raises(RuntimeError) as found:
        model.through_forward(batch(rank)[:, 1:])
    assert "register_forward_method" not in str(found.value)
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError) as found:
        model.encode(batch(rank)[:, 1:])
    assert "register_forward_method" not in str(found.value)


@on_ranks(1)
def test_method_of_the_wrapped_module_is_a_bound_method_that_is_registered_once() -> None:
    model = build()
    assert inspect.ismethod(model.generate) and model.generate.__self__ is model.module
    assert inspect.signature(model.generate) == inspect.signature(model.module.generate)
    assert (model.encode.__name__, model.encode.__doc__) == ("encode", model.module.encode.__doc__)
    register_forward_method(model, "encode")
    first = model.module.encode
    register_forward_method(model.module, "encode")
    assert model.module.encode is first


@on_ranks(1)
def test_register_forward_method_refuses_missing_methods_and_plain_modules() -> None:
    with pytest.raises(ValueError, match="wrap it first"):
        register_forward_method(nn.Linear(2, 2), "extra_repr")
    model = FSDP(plain())
    with pytest.raises(AttributeError, match="Generator has no method"):
        register_forward_method(model, "absent")
    with pytest.raises(ValueError, match="has a 'forward' of its own"):
        register_forward_method(model, "forward")


@pytest.mark.parametrize("layer", ["Linear", "Conv1d", "LayerNorm"])
@both_views
@on_ranks(2)
def test_error_of_a_layer_called_past_its_unit_names_unit_and_remedy(
    rank: int, use_orig_params: bool, layer: str
) -> None:
    made = {
        "Linear": nn.Linear(WIDTH, 3),
        "Conv1d": nn.Conv1d(WIDTH, 3, 1),
        "LayerNorm": nn.LayerNorm(WIDTH),
    }[layer]
    unit = wrap(nn.Sequential(made, nn.ReLU()), use_orig_params=use_orig_params)
    model = wrap(nn.ModuleDict({"unit": unit, "own": nn.Linear(2, 2)}), use_orig_params=use_orig_params)
    model.module.forward = unit[0].forward
    x = torch.ones(WIDTH, 4) if layer == "Conv1d" else torch.ones(3, WIDTH)
    with pytest.raises(RuntimeError) as found:
        model(x)
    message = str(found.value)
    for part in (
        f"rank {rank}, unit ModuleDict",
        """["Sequential at 'unit'"] are sharded now""",
        "Call the unit",
    ):
        assert part in message
    assert "register_forward_method" in message and message.count("sharded now") == 1
