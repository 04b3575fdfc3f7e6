"""Writeback: edits of parameters and gradients between steps reach the shards, as with torch's FSDP1, or are
refused by name.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.test_use_orig_params import backward, named
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.training import batch, debug_level, sharded, wrap

X = torch.ones(3, WIDTH)


def held(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.numel()]


@on_ranks(2)
def test_writeback_is_warned_of_under_debug_info(rank: int) -> None:
    """Each parameter or gradient is warned of once, and not without the level."""
    counts = {}
    wanted = {"INFO": ["Gradient", "Parameter"], "OFF": []}
    for which in ("torch", "fsdp_c"):
        for level in wanted:
            with debug_level(getattr(dist.DebugLevel, level)):
                model = sharded(which)
            model(X).sum().backward()
            held(model)[0].data = torch.zeros_like(held(model)[0])
            held(model)[1].grad = torch.zeros_like(held(model)[1])
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                with torch.no_grad():
                    model(X)
            found = [text for one in record if "needs writeback" in (text := str(one.message))]
            counts[level] = sorted(text.split()[2] for text in found)
            assert all(f"[Rank {rank}]" in text for text in found)
        assert counts == wanted, which


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
def test_data_outside_the_shard_is_refused_after_one_gather_per_such_parameter(rank: int) -> None:
    """Each unshard checks one parameter outside the shard. Each rank holds two of the four, so both raise
    together."""
    model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))))
    with torch.no_grad():
        model(batch(rank, 0))
    name = "3.weight" if rank == 0 else "0.weight"
    named(model)[name].data = torch.ones(3)
    with pytest.raises(RuntimeError) as found, torch.no_grad():
        for _ in range(2):
            model(batch(rank, 0))
    parts = (f"{name} of unit Sequential", f"rank {rank} holds none", "[3]")
    for part in (*parts, "summon_full_params(module, writeback=True)"):
        assert part in str(found.value)


@on_ranks(2)
def test_summon_checks_all_parameters_outside_the_shard(rank: int) -> None:
    """The error comes before the all-gather, and changes nothing."""
    model = sharded("fsdp_c")
    with torch.no_grad():
        model(batch(rank, 0))
    _, param = unheld(model)[-1]
    param.data = torch.ones(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="holds none of the parameter"):
            with type(model).summon_full_params(model.blocks[0]):
                pass
    param.data = torch.empty(0)
    with type(model).summon_full_params(model):
        assert named(model)["blocks.0.up.weight"].shape == (7, 5)


@on_ranks(2)
def test_a_parameter_replaced_outside_the_shard_stays_the_parameter(rank: int) -> None:
    model = sharded("fsdp_c")
    name, param = unheld(model)[0]
    path, _, attribute = name.rpartition(".")
    new = nn.Parameter(param.detach() * 0.5 + 0.125)
    setattr(model.module.get_submodule(path), attribute, new)
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
