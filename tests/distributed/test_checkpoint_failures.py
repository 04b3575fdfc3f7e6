"""A failed load or save changes no model, state or groups on any rank, except the values that it names."""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, folder, loading
from fsdp_c.checkpoint.folder import LAYOUT, METADATA
from fsdp_c.checkpoint.storage import read_checkpoint
from fsdp_c.optim import WholeParameters
from tests.checkpoints import ExtraState, flipped
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_sharded_state_dict import wrap
from tests.parity.engine import same_bits
from tests.ranks import both_views, device, device_type, on_ranks


class Own(ExtraState, nn.Linear):
    """A module with extra state, which refuses it on rank ``refuses_on``."""

    refuses_on: int | None = None

    def set_extra_state(self, state: Any) -> None:
        if dist.get_rank() == self.refuses_on:
            raise ValueError("not this one")
        super().set_extra_state(state)


class Giving(nn.Linear):
    """A module that returns extra state, and has no function to load it."""

    def get_extra_state(self) -> Any:
        return "given"


def made(
    seed: int, kind: type[nn.Linear] = Own, use_orig_params: bool = True
) -> tuple[Any, torch.optim.Optimizer, nn.Linear]:
    torch.manual_seed(seed)
    layer = kind(6, 5)
    model = wrap(nn.Sequential(nn.Linear(4, 6), layer), use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    model(torch.ones(2, 4, device=device()) * seed).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, layer


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the values of model, state and groups by their paths."""
    own, state = checkpoint.model_state(model), optimizer.state_dict()
    values = {name: value.local.detach() for name, value in own.items() if hasattr(value, "local")}
    parts = {"model": values, "state": state["state"], "groups": state["param_groups"]}
    return {name: dict(tree_flatten_with_path(copy.deepcopy(part))[0]) for name, part in parts.items()}


def changed(before: Any, model: Any, optimizer: torch.optim.Optimizer, alike: bool = True) -> list[str]:
    """Return the changed parts of model, state and groups; with ``alike`` the same on all ranks."""
    mine = []
    for name, after in snapshot(model, optimizer).items():
        is_same = [same_bits(value, after.get(path)) for path, value in before[name].items()]
        if not all(is_same) or after.keys() != before[name].keys():
            mine.append(name)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    assert not alike or len({tuple(each) for each in everyones}) == 1, everyones
    return mine


def saved(model: Any, optimizer: Any, **options: Any) -> Any:
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(model, optimizer, path, **options)
    dist.barrier()
    return path


@on_ranks(2)
def test_missing_or_unexpected_extra_state_is_an_error_before_any_change():
    without, with_state = saved(*made(1, nn.Linear)[:2]), saved(*made(1, Own)[:2])
    for path, kind, what in (
        (without, Own, "model.1._extra_state is missing"),
        (with_state, nn.Linear, "model.1._extra_state is unexpected"),
        (
            with_state,
            Giving,
            "model.1._extra_state is unexpected: its module has no set_extra_state",
        ),
    ):
        model, optimizer, layer = made(2, kind)
        before = snapshot(model, optimizer)
        layer.own = "mine"
        with pytest.raises(CheckpointError, match=what):
            checkpoint.load(model, optimizer, path)
        assert changed(before, model, optimizer) == [] and layer.own == "mine"
        checkpoint.load(model, optimizer, path, strict=False)
        assert layer.own == ("mine" if path == without or kind is not Own else None)


def test_names_that_resemble_extra_state_and_extra_are_the_models(tmp_path):
    def named(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "extra": nn.Linear(2, 2)})
        model["a"].register_parameter("no_extra_state", nn.Parameter(torch.randn(3)))
        return model

    one, other = named(1), named(2)
    checkpoint.save(one, None, tmp_path)
    checkpoint.load(other, None, tmp_path)
    assert torch.equal(one["a"].no_extra_state, other["a"].no_extra_state)
    del other["extra"]
    with pytest.raises(CheckpointError, match="model.extra.weight is unexpected"):
        checkpoint.load(other, None, tmp_path)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for options in ({"model_key": "a", "optim_key": "a"}, {"model_key": "extra", "extra": {"step": 1}}):
        with pytest.raises(ValueError, match="the key '(a|extra)' is used twice"):
            checkpoint.save(one, optimizer, tmp_path / "twice", **options)


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_with_an_optimizer_that_communicates(rank):
    model, _, _ = made(1)
    optimizer = WholeParameters(model, torch.optim.AdamW)
    error = ValueError("none here") if rank else None
    with mock.patch.object(Own, "get_extra_state", side_effect=error):
        with pytest.raises(CheckpointError, match="failed on rank 1: ValueError: none here"):
            checkpoint.save(model, optimizer, folder_of_ranks())


@both_views
@on_ranks(2)
def test_numbers_that_are_not_a_number_are_loaded(use_orig_params):
    model, optimizer, _ = made(1)
    for state in filter(None, optimizer.state.values()):
        state["rms"] = torch.tensor(math.nan)
    path = saved(model, optimizer)
    model, optimizer, _ = made(2, use_orig_params=use_orig_params)
    checkpoint.load(model, optimizer, path)
    assert all(math.isnan(state["rms"]) for state in optimizer.state.values())


@on_ranks(2)
def test_steps_that_differ_within_a_flat_parameter_are_found_before_any_change():
    model, optimizer, _ = made(1)
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        if index % 2 and optimizer.state[param]:
            optimizer.state[param]["step"] = torch.tensor(7.0)
    path = saved(model, optimizer)
    model, optimizer, _ = made(2, use_orig_params=False)
    before = snapshot(model, optimizer)
    with pytest.raises((ValueError, CheckpointError), match="must have the same optimizer state: .*step is"):
        checkpoint.load(model, optimizer, path)
    assert changed(before, model, optimizer) == []


def last_of_rank(path: Any, rank: int) -> Any:
    """Return the chunk with the last data of a rank's file, among tensors that are read into place."""
    entries = read_checkpoint(path).entries.values()
    tensors = [entry for entry in entries if hasattr(entry, "chunks") and entry.shape]
    chunks = [
        chunk for entry in tensors for chunk in entry.chunks if chunk.file.endswith(f"/__{rank}_0.distcp")
    ]
    return max(chunks, key=lambda chunk: chunk.start)


@on_ranks(2)
def test_damaged_tensors_of_one_rank_leave_groups_and_extra_state_of_all(rank):
    model, optimizer, layer = made(1)
    layer.own = "saved"
    path = saved(model, optimizer)
    chunk = last_of_rank(path, 1)
    dist.barrier()
    if rank == 0:
        flipped(path / chunk.file, chunk.start)
    dist.barrier()
    for fresh in (False, True):
        model, optimizer, layer = made(2)
        if fresh:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        before = snapshot(model, optimizer)
        with pytest.raises(CheckpointError, match="rank 1: .*are damaged"):
            checkpoint.load(model, optimizer, path)
        # Tensors that were read are in the model and in the optimizer's existing state; nothing else is
        # changed. On a GPU they are copied by the jobs of a read; the rank with the damage runs one.
        found = changed(before, model, optimizer, alike=device_type() == "cpu")
        is_read = rank == 0 or device_type() == "cpu"
        assert found == (["model", *([] if fresh else ["state"])] if is_read else [])
        assert layer.own is None


@pytest.mark.parametrize(
    "what",
    [
        METADATA,
        LAYOUT,
        "a file of rank 1",
        "extra.note",
        "model.1._extra_state",
        "optim.param_groups.0.lr",
        "optim.state.0.bias.step",
    ],
)
@on_ranks(2)
def test_damage_that_is_found_first_leaves_everything_on_all_ranks(rank, what):
    path = saved(*made(1)[:2], extra={"note": "text"})
    file, at, error = path / METADATA, (path / METADATA).stat().st_size // 2, "are damaged"
    failing = mock.patch(
        "fsdp_c.checkpoint.loading.read_nested", side_effect=OSError(5, "Input/output error")
    )
    if what == METADATA:
        error = rf"failed on rank 0: {re.escape(str(path / METADATA))}: damaged"
    elif what == LAYOUT:  # damage bytes that no rank needs
        (file,) = path.rglob(LAYOUT)
        at, error = 28, f"failed on rank 0: .*{LAYOUT}: damaged"
    elif what == "a file of rank 1":
        error = "failed on rank 1: OSError: .*Input/output error"
    else:
        entry = read_checkpoint(path).entries[what]
        part = entry.chunks[0] if hasattr(entry, "chunks") else entry
        file, at = path / part.file, part.start
    dist.barrier()
    if rank == 0 and what != "a file of rank 1":
        flipped(file, at)
    dist.barrier()
    model, optimizer, _ = made(2)
    before = snapshot(model, optimizer)
    with (
        failing if (what, rank) == ("a file of rank 1", 1) else nullcontext(),
        mock.patch.object(folder, "crc32_of", wraps=folder.crc32_of) as compared,
        pytest.raises(CheckpointError, match=error),
    ):
        checkpoint.load(model, optimizer, path)
    # one rank compares .metadata and the layout with their checksums
    assert compared.call_count == (rank == 0) * (1 if what == METADATA else 2)
    assert changed(before, model, optimizer) == []


@on_ranks(2)
def test_extra_state_that_one_rank_does_not_take_is_an_error_on_all():
    path = saved(*made(1)[:2])
    model, optimizer, layer = made(2)
    before = snapshot(model, optimizer)
    layer.refuses_on = 1
    with pytest.raises(CheckpointError, match="failed on rank 1: ValueError: not this one"):
        checkpoint.load(model, optimizer, path)
    assert "groups" not in changed(before, model, optimizer)


@on_ranks(2)
def test_ranks_that_found_different_checkpoints_begin_anew(rank):
    (model, *_), folder = made(1, nn.Linear), folder_of_ranks()
    path, other = folder / "ckpt", folder / "other"
    original, reads = loading.read_checkpoint, []
    for version, target in ((1, path), (2, other)):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(version)
        checkpoint.save(model, None, target, extra={"version": version})

    def read(path: Path, **options: Any) -> Any:
        """Replace the checkpoint between the reads of the two ranks."""
        reads.append(path)
        if rank == 1 and len(reads) == 1:
            found = original(path, **options)
            (data,) = other.glob("fsdp_c-data-*")
            shutil.copytree(data, path / data.name)
            os.replace(other / ".metadata", path / ".metadata")
            return found
        while (other / ".metadata").exists():
            time.sleep(0.01)
        return original(path, **options)

    with mock.patch.object(loading, "read_checkpoint", read):
        found = checkpoint.load(model, None, path)
    assert found == {"version": 2} and len(reads) == 2
    assert all((param == 2).all() for param in model.parameters())


# ----------------------------------------------------------------- state that cannot be saved


@on_ranks(2)
def test_state_that_is_not_a_parameters_own_is_refused_by_name():
    folder = folder_of_ranks()
    plain = nn.Linear(3, 3)
    lbfgs = torch.optim.LBFGS(plain.parameters())
    checkpoint.save(plain, lbfgs, folder / "fresh")  # the optimizer has no state yet

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = plain(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    lbfgs.step(closure)
    with pytest.raises(ValueError, match=r"LBFGS has one state for all parameters.*optimizer=None"):
        checkpoint.save(plain, lbfgs, folder / "ckpt")
    for state in ({"a": {"b": 1}}, {"a": [torch.ones(1)]}, {0: 1}, {"a": (torch.ones(1),)}):
        model, optimizer, _ = made(1)
        for param in optimizer.state:
            optimizer.state[param].update(state)
        (name,) = state
        with pytest.raises(
            (ValueError, CheckpointError), match=f"optimizer state {name!r} of .*optimizer=None"
        ):
            checkpoint.save(model, optimizer, folder / "ckpt")
    optimizer = torch.optim.SGD(plain.parameters())
    optimizer.state["all"]["seen"] = 1
    with pytest.raises(ValueError, match=r"SGD has state of \['all'\], which are not parameters"):
        checkpoint.save(plain, optimizer, folder / "ckpt")
    dist.barrier()
    assert [file.name for file in folder.iterdir()] == ["fresh"]


def part(tensor: torch.Tensor) -> torch.Tensor:
    """Give ``tensor`` the attributes of a part of a larger CheckpointableTensor, of torch 2.14 and later."""
    tensor.global_shape, tensor.global_offsets = (8, *tensor.shape[1:]), ((0,) * tensor.dim(),)
    tensor.local_offsets, tensor.local_sizes = tensor.global_offsets, (tuple(tensor.shape),)
    return tensor


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("unit", "0.weight"),
        ("ignored", "1.weight"),
        ("buffer", "0.rows"),
        ("extra state", r"0._extra_state.seen.0"),
        ("extra", r"extra.deep.0"),
    ],
)
@on_ranks(2)
def test_a_part_of_a_larger_tensor_is_refused_by_name(where, name, tmp_path):
    """A save would treat it as complete and lose the other ranks' parts."""
    inner = nn.Sequential(Own(3, 3), nn.Linear(3, 3))
    inner[0].register_buffer("rows", torch.ones(2))
    if where == "unit":
        part(inner[0].weight)
    model = wrap(inner, True, auto_wrap_policy=None, ignored_states=[inner[1].weight, inner[1].bias])
    if where == "ignored":
        part(inner[1].weight)
    elif where == "buffer":
        part(inner[0].rows)
    elif where == "extra state":
        inner[0].own = {"seen": [part(torch.ones(2))]}
    extra = {"deep": [part(torch.ones(2))]} if where == "extra" else None
    with pytest.raises((NotImplementedError, CheckpointError), match=rf"{name}: its attributes say"):
        checkpoint.save(model, None, tmp_path / "saved", extra=extra)
    assert not (tmp_path / "saved").exists()
