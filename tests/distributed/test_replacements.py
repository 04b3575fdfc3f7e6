"""Private functions that outside code puts its own in the place of: they are called, and training stays the
same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

import fsdp_c
from fsdp_c import _C, _runtime_utils
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.compat.upstream import HandleTrainingState
from fsdp_c.sharding.flat_param import FlatParamHandle
from tests.collectives import ALL_GATHER, REDUCE_SCATTER
from tests.models import WIDTH
from tests.pairwise import pairwise
from tests.processes import ROOT, output_of_python
from tests.ranks import STRATEGIES, VIEWS, all_strategies, both_views, device, on_ranks
from tests.storage import HELD_BACK
from tests.training import batch, sharded

STEPS = 2
UNITS = 4


def trained(rank: int, strategy: str, use_orig_params: bool, **options: Any) -> list[Tensor]:
    """Losses of a few steps and the parameters after them."""
    model = sharded("fsdp_c", strategy, use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = []
    for step in range(STEPS):
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.append(loss.detach())
    return record + [param.detach().clone() for param in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def assert_trains_the_same(
    calls: list[Any], place: Any, replacements: dict[str, Any], *arguments: Any, **options: Any
) -> None:
    """Train with replacements that note their calls, and then without them: nothing is noted any more."""
    expected = trained(*arguments, **options)
    with mock.patch.multiple(place, **replacements):
        assert_same(trained(*arguments, **options), expected)
    count = len(calls)
    assert_same(trained(*arguments, **options), expected)
    assert len(calls) == count


def around(calls: list[str]) -> Callable[[Any], None]:
    """Return a wrapper of the original."""
    original = FlatParamHandle.unshard

    def unshard(handle: Any) -> None:
        calls.extend([handle.name] if handle.needs_unshard() else [])
        original(handle)

    return unshard


def in_steps(calls: list[str]) -> Callable[[Any], None]:
    """Return composer's replacement of unshard: all ranks agree that the allocation succeeded before the all-gather."""

    def unshard(handle: Any) -> None:
        if not handle.needs_unshard():
            padded = handle._get_padded_unsharded_flat_param
            handle._use_unsharded_flat_param(padded() if handle.uses_sharded_strategy else handle.flat_param)
            return
        calls.append(handle.name)
        padded = handle._alloc_padded_unsharded_flat_param()
        failed = torch.zeros(1)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        padded = handle._all_gather_flat_param(padded)
        handle._use_unsharded_flat_param(padded)

    return unshard


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, replacement=[in_steps, around])
@on_ranks(2)
def test_replaced_unshard_is_called_for_every_gather(
    rank: int, strategy: str, use_orig_params: bool, replacement: Callable[..., Any]
) -> None:
    calls: list[str] = []
    replacements = {"unshard": replacement(calls)}
    assert_trains_the_same(calls, FlatParamHandle, replacements, rank, strategy, use_orig_params)
    # the root stays unsharded
    gathers = {"FULL_SHARD": 2 * UNITS - 1, "SHARD_GRAD_OP": UNITS, "NO_SHARD": 0}[strategy]
    assert len(calls) == STEPS * gathers


@on_ranks(2)
def test_unshard_that_does_nothing_or_raises_leaves_nothing_allocated(rank: int) -> None:
    model = FSDP(nn.Linear(WIDTH, WIDTH), device_id=device())
    x = torch.ones(2, WIDTH)
    with mock.patch.object(FlatParamHandle, "unshard", lambda handle: None):
        with pytest.raises(RuntimeError, match=f"rank {rank}, unit Linear: .* has not gathered"):
            model(x)

    def fails(handle: Any) -> None:
        handle._alloc_padded_unsharded_flat_param()
        raise MemoryError("planted")

    with mock.patch.object(FlatParamHandle, "unshard", fails), pytest.raises(MemoryError, match="planted"):
        model(x)
    assert model._handle.unsharded_nbytes == 0
    with pytest.raises(ValueError, match="_alloc_padded_unsharded_flat_param"):
        model._handle._all_gather_flat_param(torch.empty(1))
    model._handle.reshard(True)
    model(x)


@on_ranks(2)
def test_steps_of_a_handle_take_their_arguments_by_name() -> None:
    model = FSDP(nn.Linear(WIDTH, WIDTH), device_id=device())
    model(torch.ones(2, WIDTH))
    handle = model._handle
    handle.reshard(free_unsharded_flat_param=True)
    padded = handle._all_gather_flat_param(
        padded_unsharded_flat_param=handle._alloc_padded_unsharded_flat_param()
    )
    handle._use_unsharded_flat_param(padded_unsharded_flat_param=padded)
    whole = handle.unsharded_nbytes
    assert not handle.needs_unshard() and whole > 0
    handle.reshard(free_unsharded_flat_param=True)
    assert handle.needs_unshard() and handle.unsharded_nbytes == HELD_BACK * whole
    for wrong in ({}, {"free_storage": True}):
        with pytest.raises(TypeError):
            handle.reshard(**wrong)


@pairwise(strategy=STRATEGIES, use_orig_params=VIEWS, name=["_reshard", "_post_backward_reshard"])
@on_ranks(2)
def test_replaced_reshard_is_called(rank: int, strategy: str, use_orig_params: bool, name: str) -> None:
    original, calls = getattr(_runtime_utils, name), []

    def wrapper(state: Any, handle: Any, *rest: Any) -> None:
        assert state._handle is handle and (rest in ((True,), (False,)) if name == "_reshard" else not rest)
        calls.append(handle)
        original(state, handle, *rest)

    assert_trains_the_same(calls, _runtime_utils, {name: wrapper}, rank, strategy, use_orig_params)
    assert len(set(calls)) == UNITS
    assert len(calls) >= STEPS * UNITS * (2 if name == "_reshard" else 1)


def test_names_that_the_runtime_does_not_call_are_refused() -> None:
    with pytest.raises(ValueError, match="_wait_for_computation_stream"):
        _C.replace("_wait_for_computation_stream", print)


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", "forward"])
@on_ranks(2)
def test_replaced_get_handle_to_prefetch_chooses_the_prefetched_unit(rank: int, prefetch: str) -> None:
    """Choosing as the original does trains the same, gathers the same, and sees the states that upstream
    shows."""
    options: dict[str, Any] = {"forward_prefetch": True, "backward_prefetch": None}
    if prefetch != "forward":
        options = {"backward_prefetch": BackwardPrefetch[prefetch]}
    arguments = rank, "FULL_SHARD", True
    chosen: list[tuple[str, str]] = []
    states: list[HandleTrainingState] = []
    choose, training_state = _runtime_utils._get_handle_to_prefetch, _runtime_utils._get_training_state

    def noting(state: Any, handle: Any) -> Any:
        assert state._handle is handle
        found = choose(state, handle)
        if found is not None:
            chosen.append((handle._training_state.name, found.name))
        return found

    def noting_state(handle: Any) -> HandleTrainingState:
        states.append(training_state(handle))
        return states[-1]

    replacements = {"_get_handle_to_prefetch": noting}
    assert_trains_the_same(chosen, _runtime_utils, replacements, *arguments, **options)
    assert {state for state, _ in chosen} == {prefetch.upper()}
    assert len(chosen) >= UNITS - 2
    replacements = {"_get_training_state": noting_state}
    assert_trains_the_same(states, _runtime_utils, replacements, *arguments, **options)
    assert set(states) == {HandleTrainingState[name] for name in ("FORWARD", "BACKWARD_PRE", "BACKWARD_POST")}


@on_ranks(2)
def test_replaced_get_handle_to_prefetch_may_return_none_but_nothing_else(rank: int) -> None:
    expected = trained(rank, "FULL_SHARD", True)
    with mock.patch.object(_runtime_utils, "_get_handle_to_prefetch", lambda state, handle: None):
        assert_same(trained(rank, "FULL_SHARD", True), expected)
    match = f"rank {rank}, unit .*in place of _get_handle_to_prefetch returned 'nothing'"
    with (
        mock.patch.object(_runtime_utils, "_get_handle_to_prefetch", lambda state, handle: "nothing"),
        pytest.raises(TypeError, match=match),
    ):
        trained(rank, "FULL_SHARD", True)


@both_views
@all_strategies
@on_ranks(2)
def test_replaced_registration_of_backward_hooks_is_called(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    before, after = _runtime_utils._register_post_backward_hook, _runtime_utils._register_pre_backward_hooks
    calls: list[str] = []

    def post_backward(state: Any, handle: Any) -> None:
        assert state._handle is handle
        calls.append("post")
        before(state, handle)

    def pre_backward(state: Any, module: Any, outputs: Any, handle: Any) -> Any:
        assert state is module and state._handle is handle and isinstance(outputs, Tensor)
        calls.append("pre")
        return after(state, module, outputs, handle)

    replacements = {
        "_register_post_backward_hook": post_backward,
        "_register_pre_backward_hooks": pre_backward,
    }
    assert_trains_the_same(calls, _runtime_utils, replacements, rank, strategy, use_orig_params)
    assert sorted(calls) == ["post"] * STEPS * UNITS + ["pre"] * STEPS * UNITS


@on_ranks(2)
def test_outputs_are_those_of_a_replaced_register_pre_backward_hooks() -> None:
    model = FSDP(nn.Linear(WIDTH, WIDTH), device_id=device())
    with mock.patch.object(_runtime_utils, "_register_pre_backward_hooks") as registration:
        assert model(torch.ones(2, WIDTH)) is registration.return_value
    assert model._handle.unsharded_nbytes == 0


@on_ranks(2, label="installs")  # refused where other tests have units of torch's alive
def test_replacements_of_torchs_functions_are_called_after_install(rank: int) -> None:
    """As upstream's tests and libraries do it: on ``torch.distributed.fsdp._runtime_utils``."""
    from torch.distributed.fsdp import _runtime_utils as torchs

    expected = trained(rank, "FULL_SHARD", True)
    before = dict(vars(torchs))
    names = list(_runtime_utils.ORIGINALS)
    fsdp_c.install()
    try:
        for name in names:
            with mock.patch.object(torchs, name, side_effect=getattr(torchs, name)) as replacement:
                assert_same(trained(rank, "FULL_SHARD", True), expected)
            assert replacement.called, name
        with mock.patch.object(torchs, "_reshard") as left:
            fsdp_c.uninstall()
            assert_same(trained(rank, "FULL_SHARD", True), expected)
            assert not left.called
            fsdp_c.install()
    finally:
        fsdp_c.uninstall()
    assert [name for name in names if vars(torchs)[name] is not before[name]] == ["_reshard"]
    torchs._reshard = before["_reshard"]
    assert_same(trained(rank, "FULL_SHARD", True), expected)


REPLACED_BEFORE = """
import sys

import torch
import torch.distributed as dist

calls = []
names = sys.argv[1:]
for name in names:
    def replacement(*args, name=name, original=getattr(dist, name), **kwargs):
        calls.append(name)
        return original(*args, **kwargs)
    setattr(dist, name, replacement)

from fsdp_c import FullyShardedDataParallel
from tests.collectives import init_fake_group

init_fake_group(0, 8)
model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
model(torch.ones(2, 8)).sum().backward()
assert calls == names, calls
"""


def test_collectives_that_were_replaced_before_the_import_are_called() -> None:
    output_of_python("-c", REPLACED_BEFORE, ALL_GATHER, REDUCE_SCATTER, cwd=ROOT)
