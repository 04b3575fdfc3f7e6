"""Where what is private, printed or counted is not torch's: both results, as docs/behaviour.md has them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.collectives import ALL_GATHER
from tests.models import WIDTH
from tests.ranks import device, on_ranks
from tests.training import wrap

BOTH = ("torch", "fsdp_c")
X = (2, WIDTH)


def two_units(which: str, **arguments: Any) -> Any:
    inner = wrap(nn.Linear(WIDTH, WIDTH), which, **arguments)
    return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which, **arguments)


@on_ranks(2)
def test_what_gathers_is_the_same_on_every_device() -> None:  # C-056
    """Whoever replaces a collective finds the calls of a GPU on a CPU as well."""
    called = {}
    for which in BOTH:
        model = wrap(nn.Linear(WIDTH, WIDTH), which)
        model(torch.ones(X)).sum().backward()
        with contextlib.ExitStack() as replaced:
            functions = {
                name: replaced.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in ("all_gather", ALL_GATHER)
            }
            model(torch.ones(X))
        called[which] = {name for name, function in functions.items() if function.called}
    assert called == {
        "torch": {"all_gather" if device().type == "cpu" else ALL_GATHER},
        "fsdp_c": {ALL_GATHER},
    }


@on_ranks(2)
def test_parameters_in_a_backward_hook_are_all_there_and_without_gradients(rank: int) -> None:
    """C-096: in a hook of the root's own layer, to which the backward comes when it has reduced the inner
    unit."""
    seen = {}
    for which in BOTH:
        model, shown = two_units(which), []

        def look(module: nn.Module, *grads: Any, model: Any = model, shown: list[Any] = shown) -> None:
            for name, parameter in model.named_parameters():
                has_gradient = parameter.is_leaf and parameter.grad is not None
                shown.append((name.rpartition(".")[2], parameter.is_leaf, has_gradient))

        model.module[0].register_full_backward_hook(look)
        model(torch.ones(X, requires_grad=True)).sum().backward()
        seen[which] = shown
    assert seen["torch"] == [("weight", True, True), ("bias", True, rank == 1)]
    assert seen["fsdp_c"] == [
        ("weight", False, False),
        ("bias", False, False),
        ("weight", True, False),
        ("bias", True, False),
    ]
