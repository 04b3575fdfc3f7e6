"""Which units leave the device waiting for the host: by hand for given costs, and the costs measured here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_c
from fsdp_c import cli, host_cost
from fsdp_c.host_cost import HostCost
from fsdp_c.tools.host_bound import HostBound, HostUnit, host_bound
from fsdp_c.wrap import ModuleWrapPolicy
from tests.processes import ROOT, output_of_python

COST = HostCost(unit_us=100.0, param_us=10.0)
UNITS = [HostUnit(numel, 10, True) for numel in (1_000_000, 10_000_000, 100_000_000)]


def bound(units: list[HostUnit] = UNITS, cost: HostCost = COST, **settings: Any) -> HostBound:
    return host_bound(units, cost, **{"tokens": 1000, "flops": 1e14} | settings)


def test_by_hand() -> None:
    """200 us of the host are 2e10 operations of the device: 6000 for each parameter."""
    assert bound() == HostBound(600.0, 60.0 + 600.0 + 6000.0, 3_333_333, 1, 3)


def test_a_unit_of_just_the_least_size_keeps_the_device_busy() -> None:
    least = bound().least_numel
    assert bound([HostUnit(least + 1, 10, True)]).waiting == 0
    assert bound([HostUnit(least - 1, 10, True)]).waiting == 1


def test_frozen_parameters_have_less_to_compute() -> None:
    trained, frozen = (bound([HostUnit(4_000_000, 10, is_trainable)]) for is_trainable in (True, False))
    assert frozen.device_us * 6 == trained.device_us * 4
    assert (trained.waiting, frozen.waiting) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "larger"),
    [
        ({"tokens": 500}, True),
        ({"tokens": 2000}, False),
        ({"flops": 2e14}, True),
        ({"flops": 5e13}, False),
        ({"cost": HostCost(200.0, 10.0)}, True),
        ({"cost": HostCost(100.0, 20.0)}, True),
        ({"cost": HostCost(50.0, 0.0)}, False),
    ],
)
def test_the_least_size_grows_with_the_host_s_costs_and_the_device_s_speed(
    settings: dict[str, Any], larger: bool
) -> None:
    other = bound(**settings)
    assert (other.least_numel > bound().least_numel) is larger
    assert (other.waiting >= bound().waiting) if larger else (other.waiting <= bound().waiting)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"tokens": 0}, "tokens"), ({"flops": 0.0}, "flops"), ({"cost": HostCost(0.0, 1.0)}, "unit_us")],
)
def test_nothing_is_computed_of_nothing(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be more than 0, not 0"):
        bound(**settings)
    with pytest.raises(ValueError, match="param_us must be at least 0, not -1"):
        bound(cost=HostCost(1.0, -1.0))


def test_a_plan_counts_units_that_have_parameters() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(100, 100), nn.Linear(5000, 5000, bias=False), nn.ReLU())
    planned = fsdp_c.plan(net, world_size=8, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    found = planned.host_bound(COST, tokens=1000, flops=1e14)
    assert (found.units, found.waiting) == (2, 1)
    assert found.host_us == 2 * 100.0 + 3 * 10.0
    assert found.device_us == pytest.approx(6 * 1000 * 25_010_100 / 1e14 * 1e6)
    assert str(found) == (
        "the host takes 0.2 ms of a step, and the device computes for 1.5 ms; 1 of 2 units leave the device "
        "waiting for the host, as units of fewer than about 1,900,000 parameters do"
    )


def test_the_parts_of_a_unit_count_as_one() -> None:
    net = nn.Linear(10, 10)
    net.bias.requires_grad_(False)
    planned = fsdp_c.plan(net, world_size=8)
    assert len(planned.units) == 2
    assert planned.host_bound(COST, tokens=1, flops=1.0)[0] == 120.0


@pytest.fixture(scope="module")
def measured() -> HostCost:
    return host_cost.measure()


def test_what_is_measured_is_more_than_nothing_and_less_than_a_hundredth_of_a_second(
    measured: HostCost,
) -> None:
    assert 1.0 <= measured.unit_us < 1e4
    assert 0.0 < measured.param_us < 1e4


def test_a_process_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    with pytest.raises(RuntimeError, match=r"fsdp_c.host_cost --json failed"):
        host_cost.measure()


def test_the_command_says_what_plan_takes() -> None:
    first, second = output_of_python("-m", "fsdp_c.host_cost", cwd=ROOT).splitlines()
    assert first.startswith("a unit takes ") and "--host-us " in second
    assert all(float(number) > 0 for number in second.split("--host-us ")[1].split())


FLAGS = ["plain_torchrun:build_model", "--world-size", "8", "--wrap", "TransformerEncoderLayer"]


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.usefixtures("in_examples")
def test_plan_says_it_by_given_costs_and_measures_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cost, "measure", lambda: HostCost(40.0, 10.0))
    host = ["--tokens", "4096", "--tflops", "400"]
    assert cli.main(["plan", *FLAGS, *host]) == 0
    measured = capsys.readouterr().out
    assert cli.main(["plan", *FLAGS, *host, "--host-us", "40", "10"]) == 0
    given = capsys.readouterr().out
    assert measured == given
    said = " ".join(given.split())
    assert (
        "with 4,096 tokens per rank at 400 TFLOP/s, the host takes " in said
        and "; 4 of 4 units leave" in said
    )


@pytest.mark.usefixtures("in_examples")
@pytest.mark.parametrize("flags", [["--tokens", "4096"], ["--tflops", "400"], ["--host-us", "40", "10"]])
def test_plan_takes_tokens_and_speed_together(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *FLAGS, *flags])
    assert "--tokens and --tflops go together" in capsys.readouterr().err
