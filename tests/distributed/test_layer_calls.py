"""A layer that is called past its unit says so itself, wherever it is called and whoever catches the
error."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import ShardingStrategy
from tests.ranks import both_views, device, on_ranks

WIDTH = 8
CALL = "_compiled_call_impl"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def wrapped(use_orig_params: bool, **kwargs) -> tuple[Block, FSDP]:
    torch.manual_seed(0)
    plain = Block()
    return plain, FSDP(plain, use_orig_params=use_orig_params, device_id=device(), **kwargs)


def batch() -> Tensor:
    return torch.ones(3, WIDTH, device=device())


def assert_explained(layer: nn.Module, rank: int, name: str = "first") -> None:
    with pytest.raises(RuntimeError) as found:
        layer(batch())
    message = str(found.value)
    for part in (f"rank {rank}, unit Block", f"{name!r} are sharded now", "outside of that unit's forward"):
        assert part in message
    assert "Call the unit" in message and message.count("sharded now") == 1


@both_views
@on_ranks(2)
def test_layer_called_past_its_unit_names_unit_and_remedy(rank: int, use_orig_params: bool) -> None:
    plain, unit = wrapped(use_orig_params)
    model = FSDP(
        nn.Sequential(unit, nn.Linear(WIDTH, WIDTH)), use_orig_params=use_orig_params, device_id=device()
    )
    assert_explained(plain.first, rank)  # before the first forward
    with torch.no_grad():
        model(batch())
    assert_explained(plain.second, rank, "second")
    for _ in range(2):
        output = model(batch())
        assert_explained(plain.first, rank)  # between forward and backward, and after it
        output.sum().backward()
        assert_explained(plain.first, rank)
    with FSDP.summon_full_params(model):
        plain.first(batch())
    assert_explained(plain.first, rank)


@both_views
@on_ranks(2)
def test_steps_of_a_long_training_place_no_calls(rank: int, use_orig_params: bool) -> None:
    plain, model = wrapped(use_orig_params)
    for _ in range(5):
        model(batch()).sum().backward()
    assert vars(plain.first)[CALL] is None
    with torch.no_grad():
        model(batch())
    assert_explained(plain.first, rank)
    model(batch()).sum().backward()
    assert vars(plain.first)[CALL] is None
    with FSDP.summon_full_params(model):
        plain.first(batch())
    assert_explained(plain.first, rank)


@both_views
@on_ranks(2)
def test_layers_run_as_ever_where_their_parameters_are_whole(use_orig_params: bool) -> None:
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        plain, model = wrapped(use_orig_params, sharding_strategy=strategy)
        output = model(batch())
        plain.first(batch())
        assert vars(plain.first).get(CALL) is None
        output.sum().backward()
    plain, model = wrapped(use_orig_params)
    with pytest.raises(ValueError, match="mine"):
        plain.first.register_forward_pre_hook(_raise)
        plain.first(batch())


def _raise(*args: object) -> None:
    raise ValueError("mine")


@both_views
@on_ranks(2)
def test_nothing_stands_between_the_layers_in_a_forward(use_orig_params: bool) -> None:
    plain, model = wrapped(use_orig_params)
    seen = []
    plain.first.register_forward_hook(lambda layer, *_: seen.append(vars(layer)[CALL]))
    for _ in range(2):
        model(batch()).sum().backward()
        assert vars(plain.first)[CALL] is not None
    assert seen == [None, None]


@both_views
@on_ranks(2)
def test_recomputation_steps_past_the_calls(rank: int, use_orig_params: bool) -> None:
    plain, model = wrapped(use_orig_params)
    expected = model(batch()).sum()
    expected.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    plain.recomputes = True
    seen = []
    plain.first.register_forward_hook(lambda layer, *_: seen.append(vars(layer)[CALL]))
    model(batch()).sum().backward()
    assert seen == [
        None,
        None,
    ]  # in the forward, and in the recomputation: the first call of a layer takes all away
    for mine, grad in zip(model.parameters(), grads, strict=True):
        assert grad is None and mine.grad is None or torch.equal(mine.grad, grad)
    assert_explained(plain.second, rank, "second")


@both_views
@on_ranks(2)
def test_layer_that_is_compiled_keeps_its_call(rank: int, use_orig_params: bool) -> None:
    plain, model = wrapped(use_orig_params)
    calls = []

    def compiled(*args: Tensor) -> Tensor:
        calls.append(args)
        return plain.first._call_impl(*args)

    setattr(plain.first, CALL, compiled)  # as nn.Module.compile() does
    for step in range(1, 3):
        model(batch()).sum().backward()
        assert len(calls) == step and getattr(plain.first, CALL) is compiled
    assert_explained(plain.second, rank, "second")
    setattr(plain.first, CALL, None)
    model(batch()).sum().backward()
    assert_explained(plain.first, rank)


@both_views
@on_ranks(2)
def test_copies_and_pickles_leave_the_calls_behind(use_orig_params: bool) -> None:
    plain, model = wrapped(use_orig_params)
    assert vars(plain.second)[CALL] is not None
    with FSDP.summon_full_params(model):
        for twin in (copy.deepcopy(plain.second), pickle.loads(pickle.dumps(plain.second))):
            assert vars(twin).get(CALL) is None
            assert twin(batch()).shape == (3, WIDTH)
    assert pickle.loads(pickle.dumps(vars(plain.second)[CALL])) is None
    first = plain.first
    del plain, model
    with pytest.raises(RuntimeError) as found:
        first(batch())
    assert "sharded now" not in str(found.value)  # no unit is left that could be called


@both_views
@on_ranks(2)
def test_layer_of_a_shared_parameter_is_explained_too(rank: int, use_orig_params: bool) -> None:
    plain = Block()
    plain.second.weight = plain.first.weight
    model = FSDP(plain, use_orig_params=use_orig_params, device_id=device())
    assert_explained(plain.first, rank)
    assert_explained(plain.second, rank, "second")
    model(batch()).sum().backward()
    assert_explained(plain.second, rank, "second")
