"""Every kind of state dict is read and loaded at every point of a script: with torch's values, or refused by
an error.

Where torch's own values are wrong (LOCAL with use_orig_params, offloading on a CPU device, ranks without
summoned parameters), the expected values are those that torch returns outside of that point.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

from tests.models import Net
from tests.parity.engine import different_paths, same_bits, snapshot
from tests.ranks import both_views, on_ranks
from tests.training import FULL, LOCAL, PER_BLOCK, SHARDED, batch, wrap

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = {"full": FULL, "sharded": SHARDED, "local": LOCAL}
WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
Work = Callable[[], Any]
Place = Callable[[Any, int, Work], Any]  # does the work for a model on a rank, and returns its result


def built(which: str, use_orig_params: bool, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return wrap(Net(2), which, use_orig_params=use_orig_params, auto_wrap_policy=PER_BLOCK)


# ----------------------------------------------------------------- places


def in_no_sync(model: Any, rank: int, work: Work) -> Any:
    with model.no_sync():
        model(batch(rank)).sum().backward()
        return work()


def between_forward_and_backward(model: Any, rank: int, work: Work) -> Any:
    output = model(batch(rank))
    result = work()
    with contextlib.suppress(RuntimeError):  # the parameters were loaded in between
        output.sum().backward()
    return result


def after_backward(model: Any, rank: int, work: Work) -> Any:
    model(batch(rank)).sum().backward()
    return work()


def after_evaluation(model: Any, rank: int, work: Work) -> Any:
    with torch.no_grad():
        model(batch(rank))
    return work()


def under(mode: Callable[[], Any]) -> Place:
    def place(model: Any, rank: int, work: Work) -> Any:
        with mode():
            return work()

    return place


def in_hook(register: Callable[[Any], Callable[..., Any]]) -> Place:
    """Return a place inside a hook. ``register`` returns a model's function that registers it."""

    def place(model: Any, rank: int, work: Work) -> Any:
        results: list[Any] = []
        handle = register(model)(lambda *_: results.append(work()))
        model(batch(rank))
        handle.remove()
        return results[0]

    return place


def in_backward(model: Any, rank: int, work: Work) -> Any:
    results: list[Any] = []
    output = model(batch(rank))
    output.register_hook(lambda _: results.append(work()))
    output.sum().backward()
    return results[0]


IDLE: dict[str, Place] = {
    "no_sync": in_no_sync,
    "between forward and backward": between_forward_and_backward,
    "after a backward": after_backward,
    "after an evaluation": after_evaluation,
    "no_grad": under(torch.no_grad),
    "inference_mode": under(torch.inference_mode),
    "pre-hook of the root": in_hook(lambda model: model.register_forward_pre_hook),
    "hook of the root": in_hook(lambda model: model.register_forward_hook),
}
BUSY: dict[str, Place] = {
    "hook of an inner unit": in_hook(lambda model: model.module.blocks[0].register_forward_hook),
    "hook of a module": in_hook(lambda model: model.module.head.register_forward_hook),
    "backward": in_backward,
}


def summons(use_orig_params: bool) -> list[dict[str, bool]]:
    """Return all legal arguments of ``summon_full_params``."""
    names = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
    every = [dict(zip(names, values, strict=True)) for values in itertools.product((True, False), repeat=5)]
    return [
        each
        for each in every
        if not (each["writeback"] and each["rank0_only"])
        and not (each["with_grads"] and (each["offload_to_cpu"] or not use_orig_params))
    ]


# ----------------------------------------------------------------- actions


def got(model: Any, kind: StateDictType) -> dict[str, Any]:
    with type(model).state_dict_type(model, kind):
        return model.state_dict()


def loaded(model: Any, kind: StateDictType, state: dict[str, Any]) -> Any:
    with type(model).state_dict_type(model, kind):
        return model.load_state_dict(dict(state))


def attempt(work: Work) -> Any:
    """Return the result or the exception."""
    try:
        return work()
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        return error


def values_elsewhere(kind: StateDictType, use_orig_params: bool) -> dict[str, Any]:
    """Return torch's values outside of all these points."""
    return snapshot(got(built("torch", use_orig_params), kind))


@both_views
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout_s=180)
def test_state_dict_and_load_wherever_units_are_idle(rank, kind, use_orig_params):
    source = built("fsdp_c", use_orig_params, seed=1)
    state, whole = got(source, KINDS[kind]), snapshot(got(source, FULL))
    for name, place in IDLE.items():
        results = []
        for which in ("torch", "fsdp_c"):
            model = built(which, use_orig_params)
            results.append(place(model, rank, lambda model=model: snapshot(got(model, KINDS[kind]))))
        # torch's parameters are unsharded between forward and backward
        if kind != "local" or place is not between_forward_and_backward:
            assert not different_paths(*results), name
        assert not different_paths(values_elsewhere(KINDS[kind], use_orig_params), results[1]), name
        model = built("fsdp_c", use_orig_params)
        keys = place(model, rank, lambda model=model: loaded(model, KINDS[kind], state))
        assert keys.missing_keys == keys.unexpected_keys == [], name
        assert not different_paths(whole, snapshot(got(model, FULL))), name
        model(batch(rank)).sum().backward()  # training continues


@both_views
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout_s=180)
def test_state_is_refused_inside_forward_and_backward(rank, kind, use_orig_params):
    source = built("fsdp_c", use_orig_params, seed=1)
    state = got(source, KINDS[kind])
    for name, place in BUSY.items():
        model = built("torch", use_orig_params)
        assert isinstance(place(model, rank, lambda m=model: attempt(lambda: got(m, KINDS[kind]))), Exception)
        model = built("fsdp_c", use_orig_params)
        before = snapshot(got(model, FULL))
        for work in (lambda m=model: got(m, KINDS[kind]), lambda m=model: loaded(m, KINDS[kind], state)):
            error = place(model, rank, lambda work=work: attempt(work))
            assert isinstance(error, AssertionError), name
            assert "Expects the handle training to be IDLE" in str(error), name
        assert not different_paths(before, snapshot(got(model, FULL))), name


@both_views
@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2, timeout_s=180)
def test_state_dict_inside_every_summon(rank, kind, use_orig_params):
    expected = values_elsewhere(KINDS[kind], use_orig_params)
    for arguments in summons(use_orig_params):
        hidden = arguments["rank0_only"] and rank != 0
        for which in ("torch", "fsdp_c"):
            if which == "torch" and arguments["offload_to_cpu"]:
                continue  # torch frees the summoned tensors
            model = built(which, use_orig_params)
            with type(model).summon_full_params(model, **arguments):
                found = attempt(lambda model=model: got(model, KINDS[kind]))
                if which == "fsdp_c" and kind == "full" and arguments["rank0_only"]:
                    with type(model).state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
                        of_rank_0 = snapshot(model.state_dict())
                    assert not different_paths({} if hidden else expected, of_rank_0), arguments
            if hidden and which == "torch":
                continue  # torch returns the remains of a shard
            if hidden:
                assert isinstance(found, AssertionError) and "only rank 0 can save" in str(found), arguments
            else:
                assert not different_paths(expected, snapshot(found)), (which, arguments)


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=lambda kind: kind.name)
@both_views
@on_ranks(2)
def test_state_inside_summon_has_the_edits(use_orig_params, kind):
    whole = []
    for which in ("torch", "fsdp_c"):
        model = built(which, use_orig_params)
        with type(model).summon_full_params(model):
            with torch.no_grad():
                model.module.head.weight.add_(1)
                model.module.blocks[1].up.bias.fill_(3)
            whole.append(snapshot(got(model, kind)))
        assert not different_paths(whole[-1], snapshot(got(model, kind)))
    assert not different_paths(*whole)


@both_views
@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2, timeout_s=180)
def test_state_is_loaded_into_the_summoned_parameters(rank, kind, use_orig_params):
    source = built("fsdp_c", use_orig_params, seed=1)
    state, whole = got(source, KINDS[kind]), snapshot(got(source, FULL))
    before = values_elsewhere(FULL, use_orig_params)
    for arguments in summons(use_orig_params):
        if arguments["rank0_only"] and not arguments["recurse"]:
            continue  # the loaded part of the model differs between ranks
        model = built("fsdp_c", use_orig_params)
        with type(model).summon_full_params(model, **arguments):
            found = attempt(lambda model=model: loaded(model, KINDS[kind], state))
            if arguments["rank0_only"] and rank != 0:
                assert isinstance(found, RuntimeError), arguments
            else:
                assert found.missing_keys == found.unexpected_keys == [], arguments
                assert same_bits(whole["inp.weight"], model.module.inp.weight.detach()), arguments
        if arguments["recurse"]:
            expected = whole if arguments["writeback"] else before
            assert not different_paths(expected, snapshot(got(model, FULL))), arguments


@both_views
@on_ranks(2)
def test_local_state_is_refused_inside_summon_and_nothing_is_changed(use_orig_params):
    """The shard is unchanged. torch raises that shards exceed the tensor."""
    source = built("fsdp_c", use_orig_params, seed=1)
    state = got(source, LOCAL)
    before = values_elsewhere(FULL, use_orig_params)
    for arguments in summons(use_orig_params):
        model = built("fsdp_c", use_orig_params)
        with type(model).summon_full_params(model, **arguments):
            for work in (lambda m=model: got(m, LOCAL), lambda m=model: loaded(m, LOCAL, state)):
                error = attempt(work)
                assert isinstance(error, AssertionError) and "leave it first" in str(error), arguments
        assert not different_paths(before, snapshot(got(model, FULL))), arguments


@both_views
@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2, timeout_s=180)
def test_optim_state_dict_at_each_place_equals_torchs(rank, kind, use_orig_params):
    """Also where the modules' parameters are not those that the optimizer holds: where they are summoned both
    refuse, inside a forward torch does."""

    def work(model: Any, optimizer: Any) -> Any:
        fsdp = type(model)
        with fsdp.state_dict_type(model, KINDS[kind], None, WHOLE if kind == "full" else None):
            state = attempt(lambda: fsdp.optim_state_dict(model, optimizer))
            if isinstance(state, Exception):
                return type(state)
            return snapshot(state["state"]), fsdp.optim_state_dict_to_load(model, optimizer, state)["state"]

    def in_summon(model: Any, rank: int, work: Work) -> Any:
        with type(model).summon_full_params(model):
            return work()

    idle: Any = None
    for name, place in (IDLE | BUSY | {"summon": in_summon}).items():
        gc.collect()  # close contexts that torch left open when it raised, before they disturb its next run
        results = []
        for which in ("torch", "fsdp_c"):
            model = built(which, use_orig_params)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            model(batch(rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(place(model, rank, lambda m=model, o=optimizer: work(m, o)))
        idle = results[1] if idle is None else idle
        if name in BUSY and results[0] is KeyError:
            results[0] = idle
        assert not different_paths(*results), (name, [type(each) for each in results])
