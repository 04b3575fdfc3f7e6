"""State dicts of optimizers, compared with torch's FSDP1: names, values, and loading with other layouts.

Full state is not offloaded, as torch's offloaded state is wrong on a CPU device.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)

from fsdp_c import checkpoint
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_sharded_state_dict import assert_same_value
from tests.distributed.test_state_dict import wrap
from tests.models import WIDTH, Net
from tests.parity.engine import different_paths, implementation, same_bits, snapshot
from tests.ranks import both_views, device, on_ranks
from tests.training import FULL, SHARDED, batch, train

WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
both_forms = pytest.mark.parametrize("mesh", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore")


def two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    even, odd = (
        {"params": params[::2], "lr": 0.1, "tag": "even"},
        {"params": params[1::2], "weight_decay": 0.01},
    )
    return torch.optim.AdamW([even, odd], lr=1e-2)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "two groups": two_groups,
}


def net(seed: int = 0, tied_head: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(2, tied_head=tied_head)


def trained(use_orig_params: bool, rank: int, kind: str = "adam", **options: Any) -> tuple[Any, Any]:
    model = wrap(net(), use_orig_params, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, rank)
    return model, optimizer


def saved(model: Any, optimizer: Any, kind: StateDictType = FULL, config: Any = None) -> dict[str, Any]:
    config = config or (WHOLE if kind == FULL else None)
    with type(model).state_dict_type(model, kind, None, config):
        return type(model).optim_state_dict(model, optimizer)


def to_load(
    model: Any, optimizer: Any, state: Any, kind: StateDictType = FULL, config: Any = None, **more: Any
) -> Any:
    config = config or (WHOLE if kind == FULL else None)
    with type(model).state_dict_type(model, kind, None, config):
        return type(model).optim_state_dict_to_load(model, optimizer, state, **more)


def assert_same_osd(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert list(expected) == list(actual)
    assert list(expected["state"]) == list(actual["state"])
    for name, state in expected["state"].items():
        assert sorted(state) == sorted(actual["state"][name]), name
        for key, value in state.items():
            other = actual["state"][name][key]
            if isinstance(value, ShardedTensor):  # torch leaves its shards on the GPU against offload_to_cpu
                assert value.metadata() == other.metadata(), (name, key)
                shards = zip(value.local_shards(), other.local_shards(), strict=True)
                assert all(same_bits(one.tensor, two.tensor) for one, two in shards), (name, key)
            else:
                assert_same_value((name, key), value, other)
    assert expected["param_groups"] == actual["param_groups"]


# ----------------------------------------------------------------- saving


@both_views
@on_ranks(2)
def test_the_order_of_state_equals_torchs(rank, use_orig_params):
    orders = []
    for which in ("torch", "fsdp_c"):
        layers = {name: nn.Linear(4, 4, device=device()) for name in ("d", "b", "inner", "ignored", "a")}
        options = {"use_orig_params": use_orig_params, "which": which, "auto_wrap_policy": None}
        layers["inner"] = wrap(layers["inner"], **options)
        model = wrap(nn.Sequential(OrderedDict(layers)), ignored_modules=[layers["ignored"]], **options)
        first, second, *others = model.parameters()  # rank 0's order counts
        optimizer = torch.optim.Adam([second, first, *others] if rank else [first, second, *others])
        model(torch.ones(2, 4, device=device())).sum().backward()
        optimizer.step()
        orders.append(list(saved(model, optimizer)["state"]))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@both_views
@on_ranks(2)
def test_full_state_and_state_to_load_equal_torchs(rank, use_orig_params, kind):
    results = []
    for which in ("torch", "fsdp_c"):
        model, optimizer = trained(use_orig_params, rank, kind, which=which)
        state = saved(model, optimizer)
        results.append((state, to_load(model, optimizer, state)))
    for torchs, ours in zip(*results, strict=True):
        assert_same_osd(torchs, ours)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_parameters_of_different_steps_keep_their_own(rank, kind):
    model, optimizer = trained(True, rank)
    for number, param in enumerate(model.parameters()):
        if param in optimizer.state:
            optimizer.state[param]["step"].fill_(number)
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
    state = saved(model, optimizer, kind)
    found = {name: one["step"].item() for name, one in state["state"].items()}
    assert found == {name: number for number, name in enumerate(names)}
    loaded = to_load(model, optimizer, state, kind)["state"]
    assert loaded and all(one["step"].item() == number for number, one in loaded.items())


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("no_shard", FULL), *itertools.product(("rows", "mesh", "hybrid", "first dimension"), (FULL, SHARDED))],
)
@both_views
@on_ranks(4)
def test_state_of_each_layout_equals_torchs(rank, use_orig_params, layout, kind):
    options = {"mesh": layout == "mesh"}
    if layout in ("hybrid", "first dimension"):
        options = {"device_mesh": init_device_mesh(device().type, (2, 2))}
    if layout == "hybrid":
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if layout == "no_shard":
        options = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    data = rank // 2 if layout == "first dimension" else rank  # whose second dimension has copies
    both = [trained(use_orig_params, data, which=which, **options) for which in ("torch", "fsdp_c")]
    torchs, ours = (saved(*one, kind=kind) for one in both)
    assert_same_osd(torchs, ours)
    model, optimizer = both[1]
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    optimizer.load_state_dict(to_load(model, optimizer, torchs, kind))
    assert_same_osd(ours, saved(model, optimizer, kind=kind))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@both_views
@on_ranks(2)
def test_values_of_a_state_are_in_torchs_order(rank, use_orig_params, kind, strategy):
    """The order is the optimizer's under NO_SHARD with use_orig_params; otherwise by kind, and by name within
    a kind.
    """
    orders = []
    for which in ("torch", "fsdp_c"):
        model = wrap(net(), use_orig_params, which, sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        train(model, optimizer, rank)
        for param in model.parameters():
            if param.numel():
                values = {
                    "step": torch.tensor(1.0),
                    "b": torch.zeros_like(param),
                    "kept": 3,
                    "a": param.detach(),
                }
                optimizer.state[param] = {**values, "also": None, "count": torch.tensor(2)}
        state = saved(model, optimizer, kind)["state"]
        orders.append({name: list(one) for name, one in state.items()})
    assert orders[0] == orders[1]
    assert all(len(order) == 6 for order in orders[1].values())


# ----------------------------------------------------------------- state of other shapes than the parameter's


def adafactor(which: str, rank: int, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = wrap(net(seed), True, which, **options)
    return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
@on_ranks(2)
def test_state_of_any_shape_is_kept_where_parameters_are_not_sharded(rank, form):
    """Adafactor keeps sums of a matrix's rows and columns."""
    kind = SHARDED if form == "sharded" else FULL
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False) if form == "rank 0" else None
    results = []
    for which in ("torch", "fsdp_c"):
        model, optimizer = adafactor(which, rank, sharding_strategy=ShardingStrategy.NO_SHARD)
        train(model, optimizer, rank)
        state = copy.deepcopy(saved(model, optimizer, kind, config))  # torch's state is the optimizer's own
        before = copy.deepcopy(state)
        if state:
            assert state["state"]["inp.weight"]["col_var"].shape == (1, WIDTH)
        other, again = adafactor(which, rank, seed=5, sharding_strategy=ShardingStrategy.NO_SHARD)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(to_load(other, again, state, kind, config))
        train(other, again, rank)
        results.append((before, saved(other, again), other.state_dict()))
    torchs, ours = results
    if torchs[0]:
        assert_same_osd(torchs[0], ours[0])
    assert_same_osd(torchs[1], ours[1])
    assert all(same_bits(value, ours[2][name]) for name, value in torchs[2].items())


@on_ranks(2)
def test_state_of_other_shapes_is_refused_where_parameters_are_sharded(rank):
    model, optimizer = adafactor("fsdp_c", rank)
    train(model, optimizer, rank)
    whole, whole_optimizer = adafactor("fsdp_c", rank, sharding_strategy=ShardingStrategy.NO_SHARD)
    train(whole, whole_optimizer, rank)
    with pytest.raises(ValueError, match="does not have same shape as its parameter: '.*_var'"):
        to_load(model, optimizer, saved(whole, whole_optimizer))


def another_shape(optimizer: Any, rank: int) -> None:
    if rank == 1:
        optimizer.state[next(param for param in optimizer.state if param.numel())]["exp_avg"] = torch.zeros(2)


def factors(found: Any) -> Callable[[Any, int], None]:
    """Adafactor, Shampoo and SOAP keep such state of full parameters."""

    def add(optimizer: Any, rank: int) -> None:
        for state in optimizer.state.values():
            state["factors"] = found

    return add


def lacking(optimizer: Any, rank: int) -> None:
    if rank == 1:
        del optimizer.state[next(param for param in optimizer.state if param.numel())]


def other_names(optimizer: Any, rank: int) -> None:
    for state in optimizer.state.values() if rank == 1 else ():
        state["other"] = state.pop("exp_avg")


WHOLE_WORDS = "'factors' of .* has .* on rank 0.*fsdp_c.optim.WholeParameters"
# change of the optimizer's state, values of use_orig_params, words of the error
REFUSED: dict[str, tuple[Callable[[Any, int], None], tuple[bool, ...], str]] = {
    "shape": (
        another_shape,
        (True,),
        r"'exp_avg' of .* has shape \(2,\) on rank 1.* ShardingStrategy.NO_SHARD",
    ),
    "rows": (factors(torch.zeros(3)), (True, False), WHOLE_WORDS),
    "list": (factors([torch.zeros(3), torch.zeros(2, 2)]), (True, False), WHOLE_WORDS),
    "lacking, flat": (lacking, (False,), "some ranks are missing some of those states: {1: "),
    "lacking": (lacking, (True,), "rank 1 holds elements of .* but no optimizer state of it"),
    "names": (other_names, (False,), "different optimizer state of .*_flat_param: rank 0 .*, rank 1 "),
}


@pytest.mark.parametrize(
    ("kind", "use_orig_params"), [(kind, view) for kind, (_, views, _) in REFUSED.items() for view in views]
)
@on_ranks(2)
def test_state_that_cannot_be_saved_is_refused_once_on_every_rank(rank, kind, use_orig_params):
    change, _, words = REFUSED[kind]
    model, optimizer = trained(use_orig_params, rank)
    count = sum(bool(param.numel()) for param in optimizer.state)
    change(optimizer, rank)
    with pytest.raises((RuntimeError, ValueError), match=words) as error:
        saved(model, optimizer)
    if words is WHOLE_WORDS:
        assert str(error.value).count("optimizer state") == 1
        assert rank or f"the first of {count} states that do not fit" in str(error.value)
        with pytest.raises(ValueError, match=r"'factors' of .*fsdp_c.optim.WholeParameters"):
            checkpoint.save(model, optimizer, folder_of_ranks())


# ----------------------------------------------------------------- loading


@pytest.mark.parametrize("form", ["full", "directly", "sharded", "dtensor", "rank 0", "scattered"])
@both_views
@on_ranks(2)
def test_training_resumes_bitwise_from_each_form_of_state(rank, use_orig_params, form):
    mesh = form == "dtensor"
    model, optimizer = trained(use_orig_params, rank, mesh=mesh)
    kind = SHARDED if form in ("sharded", "dtensor") else FULL
    config = FullOptimStateDictConfig(rank0_only=True) if form in ("rank 0", "scattered") else None
    state = saved(model, optimizer, kind, config)
    before = copy.deepcopy(state) if kind == FULL else None
    other = wrap(net(5), use_orig_params, mesh=mesh)
    other.load_state_dict(model.state_dict())
    again = OPTIMIZERS["adam"](other.parameters())
    if form == "scattered":
        loaded = type(model).scatter_full_optim_state_dict(state if rank == 0 else None, other, optim=again)
    else:
        loaded = to_load(other, again, state, kind, config, load_directly=form == "directly")
    if form != "directly":
        again.load_state_dict(loaded)
    train(model, optimizer, rank)
    train(other, again, rank)
    assert_same_osd(saved(model, optimizer), saved(other, again))
    if before:
        assert_same_osd(before, state)


@both_views
@on_ranks(2)
def test_state_of_an_empty_parameter_is_kept_whatever_its_step(use_orig_params):
    """No step over shards reaches a parameter without elements. torch cannot save one."""
    states = []
    for is_source in (True, False):
        module = nn.ParameterDict({"empty": torch.empty(0, 3), "weight": torch.ones(3, 2)})
        model = wrap(module, is_source or use_orig_params, auto_wrap_policy=None)
        optimizer = torch.optim.Adagrad(model.parameters())
        if is_source:
            for param in filter(torch.numel, model.parameters()):
                param.grad = torch.ones_like(param)
            optimizer.step()
        else:
            optimizer.load_state_dict(to_load(model, optimizer, states[0]))
        states.append(saved(model, optimizer))
    assert list(states[0]["state"]) == list(states[1]["state"]) == ["empty", "weight"]
    assert states[0]["state"]["weight"]["step"] == states[1]["state"]["weight"]["step"] == 1


@both_views
@on_ranks(4)
def test_state_of_four_ranks_loads_on_two(rank, use_orig_params):
    model, optimizer = trained(use_orig_params, rank)
    state = saved(model, optimizer)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    other = wrap(net(), use_orig_params, process_group=group)
    again = OPTIMIZERS["adam"](other.parameters())
    again.load_state_dict(to_load(other, again, state, group=group))
    with type(other).state_dict_type(other, FULL, None, FullOptimStateDictConfig(rank0_only=False)):
        found = type(other).optim_state_dict(other, again, group=group)
    assert_same_osd(state, found)


@both_views
@on_ranks(2)
def test_state_of_a_plain_model_is_rekeyed_loaded_and_rekeyed_back(use_orig_params):
    plain = net(tied_head=False).to(device())
    plain_optimizer = OPTIMIZERS["adam"](plain.parameters())
    train(plain, plain_optimizer)
    by_id = plain_optimizer.state_dict()

    def rekeyed(which, state, key):
        return implementation(which).rekey_optim_state_dict(state, key, plain, optim=plain_optimizer)

    by_name = rekeyed("fsdp_c", by_id, OptimStateKeyType.PARAM_NAME)
    assert rekeyed("fsdp_c", by_name, OptimStateKeyType.PARAM_NAME) is by_name
    assert_same_osd(rekeyed("torch", by_id, OptimStateKeyType.PARAM_NAME), by_name)
    model = wrap(net(tied_head=False), use_orig_params)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    optimizer.load_state_dict(to_load(model, optimizer, by_name))
    again = rekeyed("fsdp_c", saved(model, optimizer), OptimStateKeyType.PARAM_ID)
    assert again["state"] and not different_paths(by_id["state"], again["state"])


@on_ranks(2)
def test_lists_of_rank_0_reach_the_ranks_that_hold_elements(rank):
    model = wrap(nn.Linear(4, 4), auto_wrap_policy=None)  # rank 1 holds all of the bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, device=device())).sum().backward()
    optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    state = saved(model, optimizer, FULL, config)
    for own in state["state"].values() if state else ():
        own["factors"] = [torch.ones(2)]
    loaded = to_load(model, optimizer, state, FULL, config)["state"]
    assert [own["factors"][0].tolist() for own in loaded.values()] == [[1.0, 1.0]] * (1 + rank)


@both_views
@pytest.mark.parametrize("form", ["full", "rank 0", "sharded", "named"])
@on_ranks(2)
def test_unknown_names_are_refused_in_groups_and_passed_through_in_state(rank, use_orig_params, form):
    """Parameters outside of units may be named in the state."""
    kind = SHARDED if form == "sharded" else FULL
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False) if form == "rank 0" else None
    more = {"is_named_optimizer": True} if form == "named" else {}
    for which in ("torch", "fsdp_c"):
        model = net()
        model = wrap(model, use_orig_params, which, ignored_modules=[model.inp])
        optimizer = OPTIMIZERS["adam"](model.parameters())
        train(model, optimizer, rank)
        state = saved(model, optimizer, kind, config)
        if state:
            assert "inp.weight" in state["param_groups"][0]["params"]
            state["state"]["nope"] = {"exp_avg": torch.ones(3), "factors": [torch.ones(2)]}
        loaded = to_load(
            model, optimizer, copy.deepcopy(state) if kind == FULL else state, kind, config, **more
        )
        if form != "rank 0":  # torch's other ranks have a placeholder
            assert torch.equal(loaded["state"]["nope"]["exp_avg"], torch.ones(3))
        if which == "fsdp_c":
            assert torch.equal(loaded["state"]["nope"]["factors"][0], torch.ones(2))
        if state:
            state["param_groups"][0]["params"] += ["nope"]
        before = repr(optimizer.state_dict())
        with pytest.raises(KeyError, match="nope"):
            to_load(model, optimizer, state, kind, config, load_directly=True, **more)
        assert repr(optimizer.state_dict()) == before
    with pytest.raises(
        KeyError, match="Can't find 'nope' from the parameters .*param_groups.0. .* names like ..*rekey"
    ):
        to_load(model, optimizer, state, kind, config, **more)
    if kind == FULL:
        by_number = {"state": {}, "param_groups": [{"params": [0, 1]}]}
        with pytest.raises(KeyError, match="Can't find 0, 1 .*rekey_optim_state_dict"):
            to_load(model, optimizer, by_number, kind, config, **more)


# ----------------------------------------------------------------- the older functions


@both_views
@on_ranks(2)
def test_older_functions_warn_and_equal_torchs(rank, use_orig_params):
    results = []
    for which in ("torch", "fsdp_c"):
        model, optimizer = trained(use_orig_params, rank, which=which)
        FSDP = type(model)
        with pytest.warns(FutureWarning, match="full_optim_state_dict.*replaced.*optim_state_dict"):
            full = FSDP.full_optim_state_dict(model, optimizer)
        assert full == {} if rank else full
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        with pytest.warns(FutureWarning, match="optim_input"):
            by_input = FSDP.full_optim_state_dict(
                model, optimizer, list(model.parameters()), rank0_only=False
            )
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        results.append(
            (
                full,
                by_input,
                FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
                FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer),
                FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
            )
        )
    assert_same_osd(saved(model, optimizer), results[1][0])
    assert_same_osd(saved(model, optimizer), results[1][1])
    # number of wrong values in torch's offloaded state
    wrong = 4 if use_orig_params else 0
    for torchs, ours in list(zip(*results, strict=True))[wrong:]:
        assert_same_osd(torchs, ours)


# ----------------------------------------------------------------- optimizers keyed by names


def keyed_by_names(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state as torch's NamedOptimizer and TorchRec's KeyedOptimizer do."""
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[key]: one for key, one in state["state"].items()}, "param_groups": groups}


@both_views
@on_ranks(2)
def test_state_keyed_by_names_equals_torchs_and_loads_again(rank, use_orig_params):
    results = []
    for which in ("torch", "fsdp_c"):
        model, optimizer = trained(use_orig_params, rank, which=which)
        with type(model).state_dict_type(model, FULL, None, WHOLE):
            state = type(model).optim_state_dict(model, optimizer, keyed_by_names(model, optimizer))
        loaded = to_load(model, optimizer, state, is_named_optimizer=True)
        results.append((state, loaded))
    assert results[0][0]["state"] and not different_paths(*results)


@on_ranks(2)
def test_state_of_a_parameter_that_the_optimizer_does_not_hold_is_named(rank):
    model, optimizer = trained(True, rank)
    other = torch.optim.Adam([next(p for p in model.parameters() if p.numel())], lr=0.1)
    with pytest.raises(KeyError, match="Can't find .* from the parameters that the optimizer holds"):
        to_load(model, other, saved(model, optimizer))


@pytest.mark.parametrize(
    "options", [{}, {"mesh": True}, {"sharding_strategy": "NO_SHARD"}], ids=["rows", "mesh", "NO_SHARD"]
)
@both_views
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_given_state_is_neither_changed_nor_aliased(rank, kind, use_orig_params, options):
    """Later steps do not change the result either. Ignored parameters belong to the optimizer too."""
    model = net()
    model = wrap(model, use_orig_params, ignored_modules=[model.inp], **options)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, rank)
    held = optimizer.state_dict()
    before = snapshot(held)
    state = saved(model, optimizer, kind)
    assert_same_osd(before, snapshot(held))
    before = snapshot(state)
    train(model, optimizer, rank)
    optimizer.load_state_dict(to_load(model, optimizer, state, kind))
    train(model, optimizer, rank)
    assert not different_paths(before, snapshot(state))


@both_forms
@both_views
@on_ranks(2)
def test_the_order_of_names_may_differ_between_ranks(rank, use_orig_params, mesh):
    model, optimizer = trained(use_orig_params, rank, mesh=mesh)
    state = saved(model, optimizer, SHARDED)
    expected = snapshot(to_load(model, optimizer, state, SHARDED))
    if rank == 1:
        turned = {fqn: dict(reversed(one.items())) for fqn, one in reversed(state["state"].items())}
        state = {**state, "state": turned}
    actual = to_load(model, optimizer, state, SHARDED)
    assert expected["state"] and not different_paths(expected, snapshot(actual))


@both_forms
@on_ranks(2)
def test_sharded_state_that_one_rank_lacks_or_cannot_load_is_refused_everywhere(rank, mesh):
    model, optimizer = trained(True, rank, mesh=mesh)
    state = saved(model, optimizer, SHARDED)
    lacking = {**state, "state": {fqn: dict(one) for fqn, one in state["state"].items()}}
    if rank == 1:
        del lacking["state"]["inp.weight"]["exp_avg"]
    with pytest.raises(
        ValueError, match=r"'exp_avg' of inp.weight, torch.float32, is on ranks \[0\] only of \[0, 1\]"
    ):
        to_load(model, optimizer, lacking, SHARDED)
    if not mesh:
        if rank == 1:
            state["state"]["inp.weight"]["exp_avg"].local_shards()[0].tensor = torch.zeros(1)
        with pytest.raises(AssertionError, match="inp.weight: rank 1 of 2 expects rows of"):
            to_load(model, optimizer, state, SHARDED)


class Masters(torch.optim.Optimizer):
    """SGD over float32 masters of bfloat16 parameters, with step counts in int16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[param]
            if not state:
                state["master"] = param.detach().float()
                state["count"] = torch.zeros_like(param, dtype=torch.int16)
            state["master"].sub_(1e-3 * param.grad.float())
            state["count"] += param.grad < 0
            param.copy_(state["master"])


def masters(use_orig_params: bool, seed: int) -> tuple[Any, Masters]:
    model = wrap(net(seed).bfloat16(), use_orig_params)
    return model, Masters(model.parameters(), {"lr": 1e-3})


def train_in_bfloat16(model: Any, optimizer: Masters, seed: int) -> None:
    for index in range(2):
        model(batch(seed, index, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["full", "sharded", "checkpoint"])
@both_views
@on_ranks(2)
def test_state_of_another_dtype_than_the_parameters_resumes_bitwise(
    rank: int, use_orig_params: bool, how: str, tmp_path: Path
) -> None:
    model, optimizer = masters(use_orig_params, 0)
    again, resumed = masters(use_orig_params, 1)
    train_in_bfloat16(model, optimizer, rank)
    if how == "checkpoint":
        checkpoint.save(model, optimizer, tmp_path / "saved")
        checkpoint.load(again, resumed, tmp_path / "saved")
    else:
        kind = FULL if how == "full" else SHARDED
        again.load_state_dict(model.state_dict())
        loaded = to_load(again, resumed, saved(model, optimizer, kind), kind)
        params = list(again.parameters())
        for index, state in loaded["state"].items():
            resumed.state[params[index]] = state  # torch's load_state_dict() casts to the parameters' dtype
    for one, other, seed in ((model, optimizer, 2), (again, resumed, 2)):
        train_in_bfloat16(one, other, seed + rank)
    expected = saved(model, optimizer)
    for state in expected["state"].values():
        assert {name: value.dtype for name, value in state.items()} == {
            "master": torch.float32,
            "count": torch.int16,
        }
    assert_same_osd(expected, saved(again, resumed))
