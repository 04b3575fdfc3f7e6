"""Registration of parameters on modules: the calls of a module's class methods, compared with torch's.

Each value of FSDP_USE_UNSAFE_SETATTR is tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding.param_views import way_to_set
from tests.collectives import fake_ranks
from tests.ranks import both_views

CPU = torch.device("cpu")
SETTINGS = {"unset": None, "off": "0", "on": "1"}
all_settings = pytest.mark.parametrize("setting", SETTINGS)
both_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])


_group = fake_ranks(0, 2)


def noting(name: str, seen: list[str]) -> Any:
    """Return a method of modules that writes down its calls for "weight"."""
    original = getattr(nn.Module, name)

    def method(self: nn.Module, attribute: str, *args: Any) -> Any:
        if attribute == "weight":
            seen.append(name)
        return original(self, attribute, *args)

    return method


def watched(method: str, seen: list[str]) -> nn.Module:
    return type("Watched", (nn.Linear,), {method: noting(method, seen)})(4, 4)


def wrap(fsdp: type, module: nn.Module, use_orig_params: bool, strategy: str = "FULL_SHARD") -> Any:
    arguments: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "device_id": CPU}
    return fsdp(module, use_orig_params=use_orig_params, **arguments)


def choose(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    value = SETTINGS[setting]
    if value is None:
        monkeypatch.delenv("FSDP_USE_UNSAFE_SETATTR", raising=False)
    else:
        monkeypatch.setenv("FSDP_USE_UNSAFE_SETATTR", value)


@pytest.mark.parametrize("method", ["__setattr__", "__delattr__", "register_parameter"])
@all_settings
@both_strategies
@both_views
def test_class_takes_part_in_every_forward_where_torchs_does(
    monkeypatch: pytest.MonkeyPatch, use_orig_params: bool, strategy: str, setting: str, method: str
) -> None:
    choose(monkeypatch, setting)
    seen: list[str] = []
    asked = []
    for fsdp in (Upstream, FSDP):
        model = wrap(fsdp, watched(method, seen), use_orig_params, strategy)
        for _ in range(2):
            seen.clear()
            model(torch.ones(2, 4)).sum().backward()
            asked.append(bool(seen))
    assert asked[2:] == asked[:2]
    if method == "__setattr__":
        assert asked == [setting != "on"] * 4


@all_settings
@both_views
def test_parameters_lie_in_the_dict_of_the_module_where_torchs_do(
    monkeypatch: pytest.MonkeyPatch, use_orig_params: bool, setting: str
) -> None:
    """With the bypass, attributes are found in the module's dict, before, in and after a forward."""
    choose(monkeypatch, setting)
    found = []
    for fsdp in (Upstream, FSDP):
        module, places = nn.Linear(4, 4), []

        def look(*_: Any, module: nn.Module = module, places: list[Any] = places) -> None:
            places.append(("weight" in vars(module), "weight" in module._parameters))

        model = wrap(fsdp, module, use_orig_params)
        module.register_forward_pre_hook(look)
        for _ in range(2):
            look()
            model(torch.ones(2, 4)).sum().backward()
        look()
        found.append(places)
    if setting == "on":
        assert found[1] == found[0]
    else:  # in a forward torch registers a view in both dicts, which attribute lookup cannot distinguish
        assert [registered for _, registered in found[1]] == [registered for _, registered in found[0]]


@both_views
def test_bypassed_parameters_train_and_are_summoned_as_others(
    monkeypatch: pytest.MonkeyPatch, use_orig_params: bool
) -> None:
    results = []
    for setting in ("off", "on"):
        choose(monkeypatch, setting)
        torch.manual_seed(0)
        model = wrap(FSDP, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use_orig_params, "NO_SHARD")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with FSDP.summon_full_params(model), torch.no_grad():
                model.module[0].weight.mul_(0.5)
                results.append([loss.detach(), *(param.clone() for param in model.parameters())])
    assert len(results) == 6 and len(results[0]) == 5
    assert all(all(map(torch.equal, *pair)) for pair in zip(results[:3], results[3:], strict=True))


def test_hooks_on_registrations_see_the_parameters() -> None:
    names: list[str] = []
    counts = []
    for fsdp in (Upstream, FSDP):
        removable = register_module_parameter_registration_hook(lambda _, name, param: names.append(name))
        try:
            model = wrap(fsdp, nn.Linear(4, 4), True)
            names.clear()
            model(torch.ones(2, 4)).sum().backward()
            counts.append("weight" in names)
        finally:
            removable.remove()
    assert counts == [True, True]


@both_views
def test_search_for_new_parameters_ignores_those_of_units(use_orig_params: bool) -> None:
    seen: list[str] = []
    model = wrap(FSDP, watched("register_parameter", seen), use_orig_params)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert not model._unit.runtime.unchecked
    assert seen
    model(torch.ones(2, 4))
    assert not model._unit.runtime.unchecked
    assert way_to_set(nn.Linear(4, 4)) == _C.SET_DIRECTLY
    model.module.scale = nn.Parameter(torch.ones(1))
    assert model._unit.runtime.unchecked


def test_method_that_was_replaced_on_module_itself_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(nn.Module, "__setattr__", noting("__setattr__", seen))
    model = wrap(FSDP, nn.Linear(4, 4), True)
    seen.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert seen
