"""torch's own machinery around units on two ranks: the same results as with torch's FSDP1, in the same
test."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c
from tests.models import Block, Net
from tests.parity.engine import different_paths, implementation, snapshot
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.training import PER_BLOCK, batch, sharded

WAYS = ("torch", "installed", "direct")
# install() is refused where other tests have units of torch's alive
own_ranks = on_ranks(2, label="installs")
Record = dict[str, Any]


@contextlib.contextmanager
def in_place(way: str) -> Iterator[Any]:
    """FSDP's class: torch's, ours in its place, or ours beside it."""
    gc.collect()
    if way == "installed":
        fsdp_c.install()
    try:
        yield implementation("torch" if way == "torch" else "fsdp_c")
    finally:
        fsdp_c.uninstall()
        gc.collect()


def wrapped(fsdp: Any, module: nn.Module | None = None) -> Any:
    torch.manual_seed(3)
    options = {"use_orig_params": True, "auto_wrap_policy": PER_BLOCK, "device_id": device()}
    return fsdp(module or Net(2), **options)


def train(model: Any, optimizer: Any, steps: range, rank: int) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def shards(model: nn.Module) -> Record:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def record_in_every_way(record: Callable[[Any], Record]) -> Record:
    """Assert that ``record`` returns the same for torch's class and for ours, and return it."""
    records = []
    for way in WAYS:
        with in_place(way) as fsdp:
            records.append(record(fsdp))
    for ours in records[1:]:
        assert not different_paths(records[0], ours)
        for named in ("end", "full"):  # callers rely on the order of names
            assert list(ours.get(named, ())) == list(records[0].get(named, ()))
    return records[0]


# ------------------------------------------------------------------ checkpoint_wrapper


def recompute(module: nn.Module) -> None:
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(module, wrapper, check_fn=lambda inner: isinstance(inner, Block))


def recomputed(fsdp: Any, when: str, rank: int) -> Record:
    torch.manual_seed(4)
    module = Net(2)
    if when == "before":
        recompute(module)
    model = wrapped(fsdp, module=module)
    if when == "after":
        recompute(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    record: Record = {"losses": train(model, optimizer, range(3), rank)}
    return record | {"end": shards(model), "full": snapshot(model.state_dict())}


@pytest.mark.parametrize("when", ["before", "after"])
@own_ranks
def test_activation_checkpointing_before_and_after_wrapping_equals_torchs(rank: int, when: str) -> None:
    record = record_in_every_way(lambda fsdp: recomputed(fsdp, when, rank))
    assert record["losses"][0] != record["losses"][1]


# ------------------------------------------------------------------ NamedOptimizer


def named(fsdp: Any, rank: int) -> tuple[Any, Any]:
    model = wrapped(fsdp)
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, module=model, lr=0.05)
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return model, optimizer


def record_of(model: Any, optimizer: Any) -> Record:
    return {"state": snapshot(optimizer.state_dict()["state"]), "end": shards(model)}


@own_ranks
def test_named_optimizer_trains_and_keeps_its_state_by_names(rank: int) -> None:
    """Its state equals torch's; saved whole, it loads again, where torch's FSDP1 raises KeyError for its own
    names."""
    record_in_every_way(lambda fsdp: record_of(*named(fsdp, rank)))
    fsdp = fsdp_c.FullyShardedDataParallel
    model, optimizer = named(fsdp, rank)
    config = FullOptimStateDictConfig(offload_to_cpu=False)
    with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        whole = fsdp.optim_state_dict(model, optimizer)
        expected = snapshot(optimizer.state_dict()["state"])
        loaded = fsdp.optim_state_dict_to_load(model, optimizer, whole, is_named_optimizer=True)
    for state in optimizer.state_dict()["state"].values():
        state["exp_avg"].zero_()
    optimizer.load_state_dict(loaded)
    assert not different_paths(expected, snapshot(optimizer.state_dict()["state"]))


class Reading(TorchDispatchMode):
    """A mode that reads all tensors, like a checker for NaN or a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.read += bool(value.isfinite().any()) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "precision", [None, MixedPrecision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"]
)
@all_strategies
@both_views
@on_ranks(2)
def test_a_dispatch_mode_may_read_every_tensor_that_it_sees(
    rank: int, use_orig_params: bool, strategy: str, precision: MixedPrecision | None
) -> None:
    gradients = []
    for mode in (contextlib.nullcontext(), Reading()):
        options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
        model = sharded("fsdp_c", strategy, net={"blocks": 2}, **options)
        with mode:
            for step in range(2):
                with model.no_sync() if step else contextlib.nullcontext():
                    model(batch(rank, step)).square().mean().backward()
            model(batch(rank, 2)).square().mean().backward()
        gradients.append([param.grad for param in model.parameters()])
    assert not different_paths(*gradients)


@both_views
@on_ranks(2)
def test_comm_debug_mode_counts_the_collectives_of_each_step(rank: int, use_orig_params: bool) -> None:
    model = sharded("fsdp_c", "FULL_SHARD", net={"blocks": 2}, use_orig_params=use_orig_params)
    counts = []
    for step in range(2):
        with CommDebugMode() as mode:
            model(batch(rank, step)).square().mean().backward()
        counts.append(mode.get_comm_counts())
    units = len(model.fsdp_modules(model))
    assert sorted(counts[0].values()) == [units, 2 * units - 1]  # reductions; all-gathers, the root's once
    assert counts[0] == counts[1]
