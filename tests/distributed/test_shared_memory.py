"""Arrays of numpy and other processes may share the memory of parameters and gradients. They keep that memory, and
training is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from tests.models import Block
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, both_views, on_ranks
from tests.training import assert_same, batch, full_state, plain, sharded

# an array of a GPU tensor is always a copy
pytestmark = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="numpy shares CPU memory")

Export = Callable[[Tensor], Any]
EXPORTS: dict[str, Export] = {
    "numpy": lambda tensor: np.asarray(tensor.detach()),
    "share_memory": lambda tensor: tensor.detach().share_memory_().numpy(),
}


@contextmanager
def looking(model: Any, when: str, export: Export) -> Iterator[list[tuple[Any, Tensor]]]:
    """Each array that ``export`` makes during steps, with a copy of its values at that time."""
    seen: list[tuple[Any, Tensor]] = []

    def look(module: nn.Module, *_: Any) -> None:
        for param in (getattr(module, name, None) for name in ("weight", "bias")):
            if isinstance(param, Tensor):
                seen.append((export(param), param.detach().clone()))

    layers = [module for block in model.modules() if isinstance(block, Block) for module in block.modules()]
    register = "register_forward_hook" if when == "forward" else "register_full_backward_pre_hook"
    hooks = [getattr(layer, register)(look) for layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


def steps(rank: int, use_orig_params: bool, strategy: str, **options: Any) -> Iterator[Any]:
    """Yield a model before each of its steps, and after the last."""
    model = sharded(strategy=strategy, use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for index in range(3):
        yield model
        model(batch(rank, index)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model


def assert_kept(seen: list[tuple[Any, Tensor]]) -> None:
    """Assert that arrays keep their values while later steps all-gather other ones."""
    assert seen
    for array, values in seen:
        assert torch.equal(torch.from_numpy(array), values)


def unsharded_nbytes(model: Any) -> int:
    return sum(handle.unsharded_nbytes for handle in model._all_handles)


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, export=tuple(EXPORTS), rank0_only=[False, True])
@on_ranks(2)
def test_arrays_from_summon_full_params_keep_their_memory(
    rank: int, strategy: str, use_orig_params: bool, export: str, rank0_only: bool
) -> None:
    *_, expected = steps(rank, use_orig_params, strategy)
    seen = []
    for model in steps(rank, use_orig_params, strategy):
        with type(model).summon_full_params(model, writeback=False, rank0_only=rank0_only):
            params = [param for param in model.parameters() if rank == 0 or not rank0_only]
            seen += [(EXPORTS[export](param), param.detach().clone()) for param in params]
        if strategy != "NO_SHARD":
            assert unsharded_nbytes(model) == 0
            assert_kept(seen) if seen else None
    assert_same(full_state(expected), full_state(model))


@both_views
@on_ranks(2)
def test_writes_to_an_array_within_summon_full_params_are_written_back(use_orig_params: bool) -> None:
    model = sharded(use_orig_params=use_orig_params)
    with type(model).summon_full_params(model):
        for param in model.parameters():
            array = param.detach().numpy()
            array *= 2
    array[...] = 7  # a write after summon_full_params has no effect
    assert_same({name: 2 * value for name, value in floats(plain())}, dict(floats(model, full_state(model))))


def floats(model: nn.Module, state: dict[str, Tensor] | None = None) -> list[tuple[str, Tensor]]:
    names = {name for name, _ in plain().named_parameters()}
    return [(n, value) for n, value in (state or model.state_dict()).items() if n in names]


@pairwise(
    use_orig_params=VIEWS,
    exported=["forward numpy", "forward share_memory", "backward numpy"],
    mixed=[pytest.param(None, id="fp32"), pytest.param(MixedPrecision(torch.float16), id="fp16")],
    checkpoint_mode=[None, "reentrant", "nonreentrant"],
)
@on_ranks(2)
def test_arrays_from_hooks_keep_their_memory(
    rank: int,
    use_orig_params: bool,
    exported: str,
    mixed: MixedPrecision | None,
    checkpoint_mode: str | None,
) -> None:
    when, export = exported.split()
    strategy = "SHARD_GRAD_OP" if when == "backward" else "FULL_SHARD"
    options = {"mixed_precision": mixed, "net": {"checkpoint_mode": checkpoint_mode}}
    *_, expected = steps(rank, use_orig_params, strategy, **options)
    run = steps(rank, use_orig_params, strategy, **options)
    with looking(next(run), when, EXPORTS[export]) as seen:
        for model in run:
            assert unsharded_nbytes(model) == 0
            assert_kept(seen)
    assert_same(full_state(expected), full_state(model))
