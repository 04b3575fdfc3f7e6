"""fsdp_c.checkpoint on ranks: any number of them, any wrapping, torch's FSDP1 and FSDP2 both ways, no exchange."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from fsdp_c import checkpoint
from tests.distributed.test_sharded_state_dict import odd, wrap
from tests.models import WIDTH
from tests.parity.engine import same_bits
from tests.ranks import pool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
EXTRA = {"step": 3, "losses": [1.0, 0.5], "nested": {"name": "x", "tensor": torch.arange(4)}}


def made(
    seed: int = 0, strategy: str = "FULL_SHARD", use_orig_params: bool = True, one_unit: bool = False, **options: Any
) -> Any:
    options = {"sharding_strategy": ShardingStrategy[strategy]} | options
    if one_unit:
        options["auto_wrap_policy"] = None
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrap(odd(seed), use_orig_params, **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups, so that which parameter is in which matters."""
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:1], "lr": 0.02}, {"params": params[1:]}], lr=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(3, WIDTH, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = made(**options)
    optimizer = adamw(model)
    train(model, optimizer)
    return model, optimizer


def full_model(model: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return model.state_dict()


def full_optim(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return type(model).optim_state_dict(model, optimizer)


def write_full(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What the checkpoint must hold, in plain tensors, for ranks of another test body."""
    expected = {"model": full_model(model), "optim": full_optim(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    dist.barrier()


def assert_holds(folder: Path, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    actual = full_model(model)
    assert sorted(actual) == sorted(expected["model"])
    assert [name for name in actual if not same_bits(actual[name], expected["model"][name])] == []
    if optimizer is None:
        return
    state = full_optim(model, optimizer)
    assert sorted(state["state"]) == sorted(expected["optim"]["state"])
    for fqn, own in state["state"].items():
        assert sorted(own) == sorted(expected["optim"]["state"][fqn])
        assert [name for name in own if not same_bits(own[name], expected["optim"]["state"][fqn][name])] == [], fqn
    assert state["param_groups"][0]["lr"] == expected["optim"]["param_groups"][0]["lr"] == 0.02


def folder_of_ranks() -> Path:
    """A folder that all ranks of a body share."""
    told = [tempfile.mkdtemp(prefix="checkpoint-")]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


# ----------------------------------------------------------------- save here, load there


def body_save(rank: int, world_size: int, folder: str, **options: Any) -> None:
    model, optimizer = trained(**options)
    write_full(Path(folder), model, optimizer)
    checkpoint.save(model, optimizer, Path(folder) / "ckpt", extra=EXTRA)


def body_load(rank: int, world_size: int, folder: str, **options: Any) -> None:
    model = made(seed=1, **options)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = 0.5
    extra = checkpoint.load(model, optimizer, Path(folder) / "ckpt")
    assert_holds(Path(folder), model, optimizer)
    assert (
        extra["step"] == 3 and extra["losses"] == [1.0, 0.5] and torch.equal(extra["nested"]["tensor"], torch.arange(4))
    )
    train(model, optimizer, 1)  # with the state as it came


def across(tmp_path: Path, saving: int, loading: int, save: dict[str, Any], load: dict[str, Any]) -> None:
    folder = {"folder": str(tmp_path)}
    pool(saving).run(__name__, "body_save", folder | save)
    pool(loading).run(__name__, "body_load", folder | load)


@pytest.mark.parametrize("loading", [1, 2, 3, 4])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_four_ranks_save_and_others_load(loading: int, use_orig_params: bool, tmp_path: Path) -> None:
    across(tmp_path, 4, loading, {"use_orig_params": use_orig_params}, {"use_orig_params": use_orig_params})
