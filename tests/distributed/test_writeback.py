"""Writeback: edits of parameters and gradients between steps reach the shards, as with torch's FSDP1, or are
refused by name.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.test_use_orig_params import backward, named
from tests.models import WIDTH
from tests.parity.engine import implementation
from tests.ranks import device, on_ranks
from tests.training import batch, debug_level, sharded

BOTH = ("torch", "fsdp_c")
X = torch.ones(3, WIDTH)


def build(which: str, level: dist.DebugLevel = dist.DebugLevel.INFO, **arguments: Any) -> Any:
    with debug_level(level):
        return sharded(which, **arguments)


def messages_with(text: str, record: list[warnings.WarningMessage]) -> list[str]:
    return [message for one in record if text in (message := str(one.message))]


def held(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.numel()]


@on_ranks(2)
def test_writeback_is_warned_of_under_debug_info(rank: int) -> None:
    """Each parameter or gradient is warned of once, and not without the level."""
    counts = {}
    for which in BOTH:
        for level in (dist.DebugLevel.INFO, dist.DebugLevel.OFF):
            model = build(which, level)
            model(X).sum().backward()
            held(model)[0].data = torch.zeros_like(held(model)[0])
            held(model)[1].grad = torch.zeros_like(held(model)[1])
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                with torch.no_grad():
                    model(X)
            found = messages_with("needs writeback", record)
            counts[which, level.name] = sorted(text.split()[2] for text in found)
            assert all(f"[Rank {rank}]" in text for text in found)
    wanted = {"INFO": ["Gradient", "Parameter"], "OFF": []}
    assert counts == {(which, level): kinds for which in BOTH for level, kinds in wanted.items()}


def replace_parameter(model: Any, param: nn.Parameter, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    owner = dict((key.replace("_fsdp_wrapped_module.", ""), module) for key, module in model.named_modules())
    module = owner[path]
    module = getattr(module, "_fsdp_wrapped_module", module)
    setattr(module, attribute, nn.Parameter(param.detach() * 0.5 + 0.125))


def unheld(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the first block that lie in the other rank's shard."""
    found = [
        (name, param)
        for name, param in named(model).items()
        if name.startswith("blocks.0.") and not param.numel()
    ]
    assert found
    return found


@on_ranks(2)
def test_data_outside_the_shard_is_refused_after_one_gather_per_such_parameter(
    rank: int,
) -> None:
    """Each unshard checks one parameter outside the shard. Each rank holds two of the four, so both raise
    together."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    model = implementation("fsdp_c")(layers, use_orig_params=True, device_id=device())
    with torch.no_grad():
        model(batch(rank, 0))
    name = "3.weight" if rank == 0 else "0.weight"
    named(model)[name].data = torch.ones(3)
    with pytest.raises(RuntimeError) as found, torch.no_grad():
        for _ in range(2):
            model(batch(rank, 0))
    message = str(found.value)
    for part in (
        f"{name} of unit Sequential",
        f"rank {rank} holds none",
        "[3]",
        "summon_full_params(module, writeback=True)",
    ):
        assert part in message


@on_ranks(2)
def test_summon_checks_all_parameters_outside_the_shard(rank: int) -> None:
    """The error comes before the all-gather, and changes nothing."""
    model = sharded("fsdp_c")
    with torch.no_grad():
        model(batch(rank, 0))
    edited = [param for _, param in unheld(model)[-1:]]
    for param in edited:
        param.data = torch.ones(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="holds none of the parameter"):
            with type(model).summon_full_params(model.blocks[0]):
                pass
    for param in edited:
        param.data = torch.empty(0)
    with type(model).summon_full_params(model):
        assert named(model)["blocks.0.up.weight"].shape == (7, 5)


@on_ranks(2)
def test_a_parameter_replaced_outside_the_shard_stays_the_parameter(
    rank: int,
) -> None:
    model = sharded("fsdp_c")
    name, param = unheld(model)[0]
    replace_parameter(model, param, name)
    new = named(model)[name]
    assert new is not param
    backward(model, 0, rank)
    assert named(model)[name] is new


@pytest.mark.parametrize("name", ["torch", "fsdp_c"])
@on_ranks(2)
def test_skipped_check_leaves_replaced_data_alone(rank: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SKIP_WRITEBACK_CHECK", "1")
        model = sharded(name)
    backward(model, 0, rank)
    expected = sharded(name)(batch(rank, 0))
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    assert torch.equal(model(batch(rank, 0)), expected)
