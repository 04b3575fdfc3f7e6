"""torch.set_default_device(): fsdp_c creates its tensors on the right device under any default."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import StateDictType

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from tests.distributed.test_checkpoint import (
    adamw,
    assert_same_tensors,
    folder_of_ranks,
    full_model,
    full_optim,
)
from tests.distributed.test_state_dict import wrap
from tests.models import WIDTH
from tests.ranks import both_views, device, on_ranks
from tests.training import plain


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        batch = torch.full((3, WIDTH), 1.0 + step + dist.get_rank(), device=device())
        model(batch).square().mean().backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def trained(use_orig_params: bool) -> tuple[Any, torch.optim.Optimizer]:
    """Train before the default device changes: torch's AdamW creates its step counts on the default device."""
    model = wrap(plain(blocks=2, tied=True), use_orig_params)
    optimizer = adamw(model, groups=1)
    train(model, optimizer)
    return model, optimizer


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": full_model(model), "optim": full_optim(model, optimizer)["state"]}


@both_views
@on_ranks(2)
def test_training_saving_and_loading_are_the_same(rank: int, use_orig_params: bool) -> None:
    folder = folder_of_ranks()
    (model, optimizer), as_usual, into = (trained(use_orig_params) for _ in range(3))
    train(*as_usual)
    actual = {}
    # tensors created there by mistake can be neither computed with nor sent nor written
    with torch.device("meta"):
        train(model, optimizer)
        actual["trained"] = values(model, optimizer)
        for kind in ("LOCAL", "FULL", "SHARDED"):
            of_type = StateDictType[f"{kind}_STATE_DICT"]
            with FSDP.state_dict_type(model, of_type), FSDP.state_dict_type(into[0], of_type):
                into[0].load_state_dict(model.state_dict())
                if kind != "LOCAL":
                    state = FSDP.optim_state_dict(model, optimizer)
                    into[1].load_state_dict(FSDP.optim_state_dict_to_load(*into, state))
            actual[kind] = {"model": full_model(into[0])} if kind == "LOCAL" else values(*into)
        checkpoint.save(model, optimizer, folder / "saved")
        checkpoint.load(*into, folder / "saved")
        actual["checkpoint"] = values(*into)
        if rank == 0:
            assert cli.main(["verify", str(folder / "saved")]) == 0
    expected = values(*as_usual)
    for found in actual.values():
        assert_same_tensors({key: expected[key] for key in found}, found)
