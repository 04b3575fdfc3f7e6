"""Checkpoints through DCP's planners and Hugging Face's format, and state dicts of FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import ShardingStrategy

import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from tests.checkpoints import code_of_page
from tests.distributed.test_checkpoint import (
    assert_same_tensors,
    folder_of_ranks,
    full_model,
    full_optim,
    torch_model,
    whole,
)
from tests.distributed.test_sharded_state_dict import contiguous, odd, saved, wrap
from tests.ranks import both_views, on_ranks
from tests.training import SHARDED

# ----------------------------------------------------------------- DCP with other planners and formats


@pytest.mark.parametrize(
    "options", [{}, {"dedup_save_to_lowest_rank": True}, {"flatten_state_dict": False}], ids=str
)
@on_ranks(2)
def test_the_values_work_with_planners(options):
    model = wrap(odd(0), True)
    folder = folder_of_ranks()
    expected = full_model(model)
    values = checkpoint.model_state(model)
    dcp.save(values, checkpoint_id=folder / "plain", planner=DefaultSavePlanner(**options))
    other = wrap(odd(1), False)
    dcp.load(checkpoint.model_state(other), checkpoint_id=folder / "plain")
    assert_same_tensors(expected, full_model(other))
    again = wrap(odd(2), True)
    checkpoint.load(again, None, folder / "plain", model_key="")
    assert_same_tensors(expected, full_model(again))


@on_ranks(2)
def test_a_partial_load_leaves_what_the_checkpoint_lacks():
    model, other = wrap(odd(0), True), wrap(odd(1), True)
    folder = folder_of_ranks()
    expected = full_model(other) | {"vector": full_model(model)["vector"]}
    dcp.save({"vector": checkpoint.model_state(model)["vector"]}, checkpoint_id=folder / "part")
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load(checkpoint.model_state(other), checkpoint_id=folder / "part")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(checkpoint.model_state(other), checkpoint_id=folder / "part", planner=planner)
    assert_same_tensors(expected, full_model(other))


@both_views
@on_ranks(3)
def test_an_export_has_the_parameters_of_flat_shards(rank, use_orig_params):
    """Shards that begin and end inside rows contain several boxes of a parameter."""
    library = pytest.importorskip("safetensors.torch")
    model = wrap(odd(0), use_orig_params)
    folder = folder_of_ranks()
    checkpoint.save(model, None, folder / "saved")
    expected = full_model(model)
    if rank == 0:
        assert cli.main(["export", str(folder / "saved"), str(folder / "exported")]) == 0
        assert_same_tensors(expected, library.load_file(folder / "exported" / "model.safetensors"))


@pytest.mark.parametrize("save_distributed", [False, True])
@on_ranks(2)
def test_torchs_safetensors_writer_is_refused_where_it_would_drop_boxes(rank, save_distributed):
    pytest.importorskip("safetensors")
    # 5 x 7 elements on two ranks: each shard ends inside a row
    shape = (5, 7) if save_distributed else (4, 2)
    model = wrap(nn.Linear(*shape, bias=False), True, auto_wrap_policy=None)
    folder = folder_of_ranks()
    writer = dcp.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=save_distributed)
    with pytest.raises(
        dcp.api.CheckpointException, match=r"weight: . boxes of it on this rank cannot be saved by"
    ):
        dcp.save(checkpoint.model_state(model), storage_writer=writer)
    dcp.save(checkpoint.model_state(model), checkpoint_id=folder / "dcp")
    unsharded = wrap(nn.Linear(4, 3), True, sharding_strategy=ShardingStrategy.NO_SHARD)
    values = checkpoint.model_state(unsharded)
    if rank == 0:
        writer = dcp.HuggingFaceStorageWriter(str(folder / "whole"))
        dcp.save(values, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("consolidated", [False, True])
@on_ranks(2)
def test_safetensors_through_dcps_writer_and_reader(consolidated):
    pytest.importorskip("safetensors")
    folder = folder_of_ranks()
    model = wrap(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), True, auto_wrap_policy=None)
    expected = full_model(model)
    # HuggingFaceStorageReader supports only parts that are rows: DTensors
    meshed = wrap(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), True, auto_wrap_policy=None, mesh=True)
    meshed.load_state_dict(expected)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), save_distributed=True, enable_consolidation=consolidated
    )
    dcp.save(saved(meshed, SHARDED), storage_writer=writer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(checkpoint.model_state(model), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    assert_same_tensors(expected, full_model(model))


# ----------------------------------------------------------------- remote storage


@both_views
@on_ranks(2, label="installs")
def test_the_pages_functions_save_to_an_address_and_load_from_it(rank, use_orig_params):
    functions: dict[str, Any] = {"fsdp_c": fsdp_c}
    exec(code_of_page("Remote storage"), functions)
    folder = folder_of_ranks()
    address = f"file://{folder}/step-000200"
    with installed():
        model = wrap(odd(0), use_orig_params)
        optimizer = trained_optimizer(model)
        functions["save"](model, optimizer, address)
        expected = full_model(model), full_optim(model, optimizer)["state"]
        ways = (True, functions["load"], address), (False, functions["load"], address)
        for flat, load, path in (*ways, (use_orig_params, checkpoint.load, folder / "step-000200")):
            other = wrap(odd(1), flat, mesh=load is not checkpoint.load)
            resumed = torch.optim.AdamW(other.parameters(), lr=9.0)
            load(other, resumed, path)
            assert_same_tensors(expected[0], full_model(other))
            assert_same_tensors(expected[1], full_optim(other, resumed)["state"])
            assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        resumed = torch.optim.AdamW(other.parameters(), lr=9.0)
        with pytest.raises(dcp.api.CheckpointException, match="Missing key.*param_groups"):
            functions["load"](other, resumed, address)


@on_ranks(2)
def test_plain_dcp_loads_no_state_into_a_new_optimizer_and_never_its_groups():
    """Plain dcp.load behaves as described in docs/checkpoints.md, which shows an alternative."""
    model = wrap(odd(0), True)
    optimizer = trained_optimizer(model)
    address = f"file://{folder_of_ranks()}/step"
    dcp.save({"optim": checkpoint.optim_state(model, optimizer)}, checkpoint_id=address)
    other = wrap(odd(1), True)
    new = torch.optim.AdamW(other.parameters(), lr=9.0)
    dcp.load({"optim": checkpoint.optim_state(other, new)}, checkpoint_id=address)
    assert not new.state and new.param_groups[0]["lr"] == 9.0
    trained_optimizer(other, new)
    dcp.load({"optim": checkpoint.optim_state(other, new)}, checkpoint_id=address)
    assert new.param_groups[0]["lr"] == 9.0
    assert_same_tensors(full_optim(model, optimizer)["state"], full_optim(other, new)["state"])


def trained_optimizer(model: Any, optimizer: Any = None) -> Any:
    """Return an optimizer with the state of two steps; AdamW by default."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * (index + 1))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# ----------------------------------------------------------------- FSDP2


@pytest.mark.parametrize("full", [True, False])
@on_ranks(2, label="installs")
def test_state_dicts_of_fsdp2_go_both_ways(full):
    """get_model_state_dict and set_model_state_dict exchange full tensors or DTensors without a file."""
    options = StateDictOptions(full_state_dict=full)
    with installed():
        model, theirs = wrap(contiguous(0), True, mesh=True), torch_model("fsdp2", seed=1)
        there = get_model_state_dict(theirs, options=options)
        expected = {name: value.clone() for name, value in whole(there).items()}
        set_model_state_dict(model, there, options=options)
        here = get_model_state_dict(model, options=options)
        assert {type(value) for value in here.values()} <= (
            {Tensor} if full else {dist.tensor.DTensor, Tensor}
        )
        assert_same_tensors(expected, whole(here))
        back = torch_model("fsdp2", seed=2)
        set_model_state_dict(back, here, options=options)
        assert_same_tensors(expected, whole(get_model_state_dict(back, options=options)))


@contextmanager
def installed() -> Iterator[None]:
    gc.collect()  # units of torch's left by earlier tests
    fsdp_c.install()
    try:
        yield
    finally:
        fsdp_c.uninstall()
