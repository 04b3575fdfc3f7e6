"""Outputs of units: in containers of every kind, unused, pickled."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils import _pytree as pytree

from tests.distributed.test_backward import assert_same_gradients, batch, seeded, sharded, twice
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.training import wrap


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class OrderedOutput(collections.OrderedDict):
    """An output class as in model libraries."""


@dataclasses.dataclass
class DataOutput:
    value: Tensor
    other: Any = None


class CallableOutput:
    """An output with ``__call__``, as torch_geometric's ``Data`` and ``Batch``."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, name: str) -> Tensor:
        return getattr(self, name)


class Registered:
    """A container registered with pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def register_container() -> None:
    if Registered not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Registered, lambda one: ([one.value], None), lambda items, _: Registered(*items)
        )


def _written_through_a_row(x: Tensor) -> Tensor:
    x.mul_(2)[0].add_(1)
    return x


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"value": x, "number": 1}, lambda out: out["value"]),
    "unused": (lambda x: {"used": x, "unused": x * 3}, lambda out: out["used"]),
    "nested list": (lambda x: [[x], (x * 2, None)], lambda out: out[0][0] + out[1][0]),
    "tuple": (lambda x: (x, "text"), lambda out: out[0]),
    "view written to": (lambda x: (x * 2).view(x.shape), lambda out: out.add_(1)),
    "view written to by another": (lambda x: _written_through_a_row((x * 2).view(x.shape)), lambda out: out),
    "views written to": (
        lambda x: ((x * 2).view(x.shape), [(x * 3).unsqueeze(0)]),
        lambda out: out[1][0].mul_(2)[0].add_(out[0].relu_()),
    ),
    "named tuple": (lambda x: Pair(x, x * 2), lambda out: out.left + out.right),
    "dataclass": (lambda x: DataOutput(x), lambda out: out.value),
    "dataclass in dict": (
        lambda x: {"a": DataOutput(x, [x])},
        lambda out: out["a"].value + out["a"].other[0],
    ),
    "ordered dict": (lambda x: OrderedOutput(value=x), lambda out: out["value"]),
    "default dict": (lambda x: collections.defaultdict(list, value=x), lambda out: out["value"]),
    "registered pytree": (Registered, lambda out: out.value),
    "registered pytree in list": (lambda x: [Registered(x)], lambda out: out[0].value),
    "registered pytree in dataclass": (lambda x: DataOutput(Registered(x)), lambda out: out.value.value),
    "deque": (lambda x: collections.deque([x]), lambda out: out[0]),
    "iterator": (lambda x: iter([None, x]), lambda out: list(out)[1]),
    "iterator over another one": (
        lambda x: zip(map(lambda one: one * 2, {"value": x}.values())),
        lambda out: next(out)[0],
    ),
    "generator": (lambda x: (one for one in [x]), next),
    "method": (lambda x: x.sum, lambda out: out(0)),
    "partial": (lambda x: functools.partial(torch.add, x, other=x), lambda out: out()),
    "closure": (lambda x: lambda: x * 2, lambda out: out()),
    "object with __call__": (CallableOutput, lambda out: out("value")),
}


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.make = make
        self.returned: Any = None

    def forward(self, x: Tensor) -> Any:
        self.returned = self.make(torch.tanh(self.layer(x)))
        return self.returned


class Takes(nn.Module):
    """An inner unit between two layers. Its backward needs its weight unsharded."""

    def __init__(self, make: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Returns(make)
        self.take = take
        self.same = True

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(self.before(x))
        self.same = output is getattr(self.inner, "module", self.inner).returned
        return self.take(output)


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_outputs_in_containers_are_returned_themselves_and_can_be_trained(
    rank: int, world_size: int, strategy: str, kind: str
) -> None:
    register_container()
    model = wrap(
        seeded(lambda: Takes(*OUTPUTS[kind])), strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Returns})
    )
    assert_same_gradients(model, seeded(lambda: Takes(*OUTPUTS[kind])), twice, rank, world_size)
    assert model.module.same


class KeepsLoss(nn.Module):
    """Keeps a loss, as a router of experts does. Its backward may run before that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.loss = self.head(y).square().sum()
        return y


def output_and_kept_losses(model: nn.Module, rank: int) -> None:
    loss = model(batch(rank, 0)).square().sum()
    kept = [module.loss for module in model.modules() if isinstance(module, KeepsLoss)]
    (loss + sum(kept)).backward()


@pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="no event orders it on a GPU")
@on_ranks(2)
def test_losses_that_units_keep_are_trained_with_gathered_parameters(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), *(KeepsLoss() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        )

    model = wrap(seeded(make), auto_wrap_policy=ModuleWrapPolicy({KeepsLoss}))
    assert_same_gradients(model, seeded(make), output_and_kept_losses, rank, world_size)


@on_ranks(2)
def test_outputs_can_be_pickled_and_detached_ones_copied(rank: int) -> None:
    output = sharded()(batch(rank))
    assert torch.equal(pickle.loads(pickle.dumps(output)), output)
    assert torch.equal(copy.deepcopy(output.detach()), output)
