"""Checkpoints that others wrote or read: a torch.save of each rank, DCP's planners, Hugging Face's format,
FSDP2."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from torch.distributed.fsdp import StateDictType

import fsdp_c
from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from fsdp_c.checkpoint.formats import open_source
from tests.distributed.test_checkpoint import (
    adamw,
    assert_same_tensors,
    folder_of_ranks,
    full_model,
    torch_model,
)
from tests.distributed.test_sharded_state_dict import contiguous, odd, wrap
from tests.parity.engine import same_bits
from tests.ranks import both_views, on_ranks
from tests.training import train

both = pytest.mark.parametrize("which", ["torch", "fsdp_c"])


def state_of(model: Any, kind: str, optimizer: Any = None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with type(model).state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            state = {"model": model.state_dict()}
            return (
                state
                if optimizer is None
                else state | {"optim": type(model).optim_state_dict(model, optimizer)}
            )


def save_by_rank(state: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    return folder


def assert_holds(path: Path, expected: dict[str, Any], *flags: str) -> None:
    """That the command line makes one file of it, with all values."""
    assert cli.main(["verify", str(path)]) == 0
    assert cli.main(["convert", str(path), str(path) + ".full.pt", *flags]) == 0
    loaded = torch.load(str(path) + ".full.pt", weights_only=True)
    assert sorted(loaded["model"]) == sorted(expected["model"])
    assert [
        name for name, value in expected["model"].items() if not same_bits(loaded["model"][name], value)
    ] == []
    if "optim" in expected:
        assert_same_tensors(expected["optim"]["state"], loaded["optim"]["state"])


@both
@both_views
@on_ranks(3)
def test_files_of_all_ranks_become_one(rank, which, use_orig_params):
    """F-034, F-040 to F-043: SHARDED with either type of value, LOCAL with flat parameters; nothing else is
    loaded."""
    folder = folder_of_ranks()
    # torch makes no ShardedTensor of a channels_last parameter, but flattens it
    for name, mesh, plain in (
        ("tensors", False, contiguous),
        ("dtensors", True, contiguous),
        ("local", False, odd),
    ):
        model = wrap(plain(0), use_orig_params, which=which, mesh=mesh)
        optimizer = adamw(model, groups=1)
        train(model, optimizer)
        kind = "LOCAL" if name == "local" else "SHARDED"
        # of use_orig_params=True torch's FULL optimizer state has exp_avg_sq for exp_avg
        with_optimizer = (
            optimizer if kind == "SHARDED" and (which == "fsdp_c" or not use_orig_params) else None
        )
        path = save_by_rank(state_of(model, kind, with_optimizer), folder / name)
        expected = state_of(model, "FULL", with_optimizer)
        if rank == 0 and name == "local":
            torch.save(plain(1).state_dict(), folder / "like.pt")
            assert_holds(path, expected, "--like", str(folder / "like.pt"))
            assert sum(key.endswith("_flat_param") for key in open_source(path).entries) >= 2
        elif rank == 0:
            assert_holds(path, expected)


@on_ranks(2)
def test_a_model_on_the_meta_device_tells_where_parameters_are(rank):
    folder = folder_of_ranks()
    plain = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = wrap(plain, True, auto_wrap_policy=None)
    path = save_by_rank(state_of(model, "LOCAL")["model"], folder / "local")
    expected = full_model(model)
    if rank == 0:
        with torch.device("meta"):
            like = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        torch.save(like.state_dict(), folder / "meta.pt")
        assert cli.main(["convert", str(path), str(folder / "dcp"), "--like", str(folder / "meta.pt")]) == 0
        assert_same_tensors(expected, {key: open_source(folder / "dcp").read(key) for key in expected})


@on_ranks(2)
def test_what_does_not_make_a_whole_is_refused(rank):
    folder = folder_of_ranks()
    model = wrap(contiguous(0), False)
    sharded = save_by_rank(state_of(model, "SHARDED"), folder / "sharded")
    local = save_by_rank(state_of(model, "LOCAL"), folder / "local")
    if rank == 0:
        for path in (sharded, local):
            with pytest.raises(checkpoint.CheckpointError, match="name a folder with the files of all ranks"):
                open_source(path / "rank0.pt")
            (path / "rank2.pt").write_bytes((path / "rank1.pt").read_bytes())
        torch.save(nn.Linear(2, 2).state_dict(), folder / "other.pt")
        (local / "rank2.pt").unlink()
        out = str(folder / "out.pt")
        assert cli.main(["convert", str(local), out, "--like", str(folder / "other.pt")]) == 2
        assert cli.main(["convert", str(sharded), out, "--like", str(folder / "other.pt")]) == 2
        assert not Path(out).exists()


# ----------------------------------------------------------------- DCP with other planners and formats


@pytest.mark.parametrize(
    "options", [{"dedup_save_to_lowest_rank": True}, {"flatten_state_dict": False}], ids=str
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


@pytest.mark.parametrize("consolidated", [False, True])
@on_ranks(2)
def test_safetensors_through_dcps_writer_and_reader(consolidated):
    pytest.importorskip("safetensors")
    folder = folder_of_ranks()
    model = wrap(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), True, auto_wrap_policy=None)
    expected = full_model(model)
    # its reader knows parts that are rows: DTensors
    meshed = wrap(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), True, auto_wrap_policy=None, mesh=True)
    meshed.load_state_dict(expected)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), save_distributed=True, enable_consolidation=consolidated
    )
    dcp.save(state_of(meshed, "SHARDED")["model"], storage_writer=writer)
    assert_same_tensors(expected, {key: open_source(folder).read(key) for key in expected})
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(checkpoint.model_state(model), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    assert_same_tensors(expected, full_model(model))


# ----------------------------------------------------------------- FSDP2


@pytest.mark.parametrize("full", [True, False])
@on_ranks(2, label="installs")
def test_state_dicts_of_fsdp2_go_both_ways(full):
    """get_model_state_dict and set_model_state_dict, whole tensors or DTensors, without a file (H-001)."""
    options = StateDictOptions(full_state_dict=full)
    with installed():
        model, theirs = wrap(contiguous(0), True, mesh=True), torch_model("fsdp2", seed=1)
        there = get_model_state_dict(theirs, options=options)
        expected = whole_tensors(there)
        set_model_state_dict(model, there, options=options)
        here = get_model_state_dict(model, options=options)
        assert {type(value) for value in here.values()} <= (
            {Tensor} if full else {dist.tensor.DTensor, Tensor}
        )
        assert_same_tensors(expected, whole_tensors(here))
        back = torch_model("fsdp2", seed=2)
        set_model_state_dict(back, here, options=options)
        assert_same_tensors(expected, whole_tensors(get_model_state_dict(back, options=options)))


@contextmanager
def installed() -> Iterator[None]:
    gc.collect()  # units of torch's that earlier tests left
    fsdp_c.install()
    try:
        yield
    finally:
        fsdp_c.uninstall()


def whole_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        key: (value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value).clone()
        for key, value in state.items()
    }
