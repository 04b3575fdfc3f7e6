"""Moves of tensors and inputs of units to devices, and dtypes that libraries set before the first forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_c.sharding import materialization
from fsdp_c.sharding.traversal import Subtree
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.training import plain, wrap


@on_ranks(2)
def test_only_own_tensors_that_are_on_the_cpu_are_moved() -> None:
    """Gradients are moved with them, but not nested units and ignored tensors. The test passes a dtype in
    place of the device, because ``Tensor.to`` accepts both.
    """
    with torch.device("cpu"):
        model = plain(blocks=2)
    model.blocks[0] = wrap(model.blocks[0])
    model.inp = nn.Linear(WIDTH, WIDTH, device="meta")
    model.register_buffer("own", torch.ones(1, device="cpu"))
    for param in model.head.parameters():
        param.grad = torch.zeros_like(param)
    tree = Subtree(model)
    params = [param for param in tree.params if param is not model.head.bias]
    materialization._move_to_device(tree, params, {model.blocks[1]}, torch.float64)
    moved = [name for name, param in model.named_parameters() if param.dtype == torch.float64]
    assert moved and not any("fsdp_wrapped" in name or name.startswith("inp") for name in moved)
    assert model.head.weight.grad.dtype == torch.float64
    assert (model.head.bias.dtype, model.head.bias.grad.dtype) == (torch.float32, torch.float32)
    assert {name for name, buffer in model.named_buffers() if buffer.dtype == torch.float64} == {"own"}


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "own"])
@on_ranks(2)
def test_meta_buffers_of_ignored_modules_are_not_initialised(ignored: bool) -> None:
    """With one of its own on the meta device a unit is initialised, and param_init_fn called."""
    model = plain(blocks=1)
    model.blocks[0].scale = model.blocks[0].scale.to("meta")
    called: list[nn.Module] = []

    def param_init_fn(module: nn.Module) -> None:
        called.append(module)
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")

    arguments = {"ignored_modules": [model.blocks[0]]} if ignored else {}
    wrap(model, param_init_fn=param_init_fn, **arguments)
    assert bool(called) != ignored


@pytest.mark.parametrize("own", [True, False], ids=["with parameters", "without"])
@on_ranks(1)
def test_a_root_moves_the_inputs_to_where_its_tree_computes(own: bool) -> None:
    """Also a root whose parameters all belong to inner units."""
    inner = wrap(nn.Linear(WIDTH, WIDTH))
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner) if own else nn.Sequential(inner))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(torch.ones(2, WIDTH, device="meta"))
