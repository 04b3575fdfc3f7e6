"""Checkpoints between versions of torch, whose DCP has learnt more of tensors since 2.14."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint.folder import METADATA
from tests.ranks import device, on_ranks
from tests.unit.test_checkpoint_pythons import ROOT, early_3_11

pytestmark = pytest.mark.filterwarnings("ignore")
_five_values = TensorProperties.__getstate__


def _six_values(self: TensorProperties) -> tuple[Any, ...]:
    """As of torch 2.15, which adds the strides; the reader of the installed torch may want five."""
    return (*_five_values(self)[:5], (3, 1))


def as_of_torch_2_15() -> Any:
    return mock.patch.object(TensorProperties, "__getstate__", _six_values)


def model_of(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    return nn.Module.requires_grad_(module, False).apply(lambda m: [p.fill_(value) for p in m.parameters()])


def test_metadata_written_by_torch_2_15_are_read_by_the_installed_torch(tmp_path: Path) -> None:
    with as_of_torch_2_15():
        checkpoint.save(model_of(1.0), None, tmp_path / "saved")
    states = []
    with mock.patch.object(TensorProperties, "__setstate__", lambda self, state: states.append(len(state))):
        pickle.loads((tmp_path / "saved" / METADATA).read_bytes())
    assert set(states) == {5}
    found = {"model": model_of(2.0).state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(value, torch.ones_like(value)) for value in found["model"].values())


def test_metadata_hold_what_torch_looks_for_and_what_pickle_would_write_on_older_versions(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters())
    model[1](model[0](torch.ones(3, 3, 5))[None]).sum().backward()
    optimizer.step()
    with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", 16):
        checkpoint.save(
            model, optimizer, tmp_path / "saved", extra={"b": [1, {"c": torch.ones(2)}], "a": "x"}
        )
    content = (tmp_path / "saved" / METADATA).read_bytes()
    found = pickle.loads(content)
    keys = [key for key in found.state_dict_metadata if key.startswith("extra")]
    assert keys == ["extra.b.0", "extra.b.1.c", "extra.a"] and found.planner_data[keys[1]] == (
        "extra",
        "b",
        1,
        "c",
    )
    assert found.version == "1.0.0" and found.storage_meta.checkpoint_id == str(tmp_path / "saved")
    indices = {index: index.index for index in found.storage_data}
    places = set()
    for key, entry in found.state_dict_metadata.items():
        chunks = getattr(entry, "chunks", [])
        for number, chunk in enumerate(chunks):
            assert indices.pop(MetadataIndex(key, chunk.offsets)) == number
            info = found.storage_data[MetadataIndex(key, chunk.offsets)]
            stored = (tmp_path / "saved" / info.relative_path).read_bytes()
            loaded = torch.load(io.BytesIO(stored[info.offset :][: info.length]))
            assert loaded.shape == chunk.sizes and loaded.dtype == entry.properties.dtype
            offset, nbytes, _, strides = info.piece
            assert (
                nbytes == loaded.nbytes and info.offset < offset < offset + nbytes < info.offset + info.length
            )
            assert (loaded.stride() == strides) if strides else loaded.is_contiguous()
            places.add((info.relative_path, info.offset))
    assert {*indices.values()} == {None} and len(places) > 25  # what is left is objects
    state = model.state_dict()
    torch_reads = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
    dcp.load(torch_reads, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(torch_reads["model"][key], value) for key, value in state.items())
    if len(TensorProperties().__getstate__()) == 5:  # newer ones write more
        assert pickle.loads(pickle.dumps(found)) == found


def test_checkpoint_of_torch_2_15_is_loaded(tmp_path: Path) -> None:
    with as_of_torch_2_15():
        dcp.save({"model": model_of(3.0).state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    model = model_of(0.0)
    checkpoint.load(model, None, tmp_path / "saved")
    assert all(bool((param == 3).all()) for param in model.parameters())


# ----------------------------------------------------------------- plain tensors that are parts of others


def part(
    local: Any, shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
) -> Any:
    """``local`` with the attributes of DCP's CheckpointableTensor; a box: offsets, local offsets, sizes."""
    local.global_shape = shape
    local.global_offsets, local.local_offsets, local.local_sizes = map(tuple, zip(*boxes, strict=True))
    return local


def half(rank: int, tensor: Tensor) -> Any:
    """Of a (4, 3) tensor rank 0 has the first and the last row, rank 1 the others; behind them is a row of
    padding."""
    rows = (0, 3) if rank == 0 else (1, 2)
    return part(tensor, (4, 3), *(((row, 0), (at, 0), (1, 3)) for at, row in enumerate(rows)))


WHOLE = torch.arange(12.0).reshape(4, 3)


class Expert(nn.Module):
    """A weight of which each rank holds a half, a sharded layer, and state of its own with a half in a
    list."""

    def __init__(self, rank: int, filled: bool) -> None:
        super().__init__()
        self.rank = rank
        rows = WHOLE[[0, 3] if rank == 0 else [1, 2]] if filled else torch.zeros(2, 3)
        self.weight = half(rank, nn.Parameter(torch.cat([rows, torch.full((1, 3), -1.0)])))
        self.layer = nn.Linear(3, 3)
        self.seen = [half(rank, self.weight.detach() * 2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight.sum()

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def wrapped(rank: int, filled: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Expert(rank, filled)
    model = FSDP(module, ignored_states=[module.weight], device_id=device(), use_orig_params=True)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@on_ranks(2)
def test_parts_are_saved_and_loaded_as_parts(rank, tmp_path):
    model, optimizer = wrapped(rank, filled=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.module.weight[:2] = WHOLE[[0, 3] if rank == 0 else [1, 2]]
    state = optimizer.state[model.module.weight]["exp_avg"]
    state[:2] = WHOLE[[0, 3] if rank == 0 else [1, 2]] + 100
    checkpoint.save(model, optimizer, tmp_path / "saved")
    dist.barrier()
    found = {
        "model": {"weight": torch.zeros(4, 3)},
        "optim": {"state": {"weight": {"exp_avg": torch.zeros(4, 3)}}},
    }
    dcp.load(found, checkpoint_id=tmp_path / "saved")  # what torch makes of it
    assert torch.equal(found["model"]["weight"], WHOLE)
    assert torch.equal(found["optim"]["state"]["weight"]["exp_avg"], WHOLE + 100)
    other, its_optimizer = wrapped(rank, filled=False)
    checkpoint.load(other, its_optimizer, tmp_path / "saved")
    assert torch.equal(other.module.weight[:2], model.module.weight[:2])
    assert bool((other.module.weight[2] == -1).all())  # its own padding
    assert torch.equal(its_optimizer.state[other.module.weight]["exp_avg"][:2], state[:2])
    (seen,) = other.module.seen
    assert torch.equal(seen, model.module.seen[0])
    assert seen.global_shape == (4, 3) and seen.global_offsets == model.module.seen[0].global_offsets


@on_ranks(2)
def test_parts_are_loaded_where_they_lie_otherwise(rank, tmp_path):
    model, _ = wrapped(rank, filled=True)
    checkpoint.save(model, None, tmp_path / "saved")
    other, _ = wrapped(rank, filled=False)
    # without padding: () for the local offsets
    columns = torch.zeros(4, 2) if rank == 0 else torch.zeros(4, 1)
    other.module.weight = part(nn.Parameter(columns), (4, 3), ((0, 2 * rank), (), (4, 2 - rank)))
    checkpoint.load(other, None, tmp_path / "saved")
    assert torch.equal(other.module.weight, WHOLE[:, :2] if rank == 0 else WHOLE[:, 2:])


@on_ranks(2)
def test_part_that_rank_0_alone_would_save_is_refused_by_name(rank, tmp_path):
    model, _ = wrapped(rank, filled=True)
    with pytest.raises(Exception, match=r"extra\.deep\.0: rank 0 holds 6 of the 12 elements"):
        checkpoint.save(model, None, tmp_path / "saved", extra={"deep": [half(rank, torch.zeros(3, 3))]})
    whole = part(WHOLE.clone(), (4, 3), ((0, 0), (0, 0), (2, 3)), ((2, 0), (2, 0), (2, 3)))
    checkpoint.save(model, None, tmp_path / "saved", extra={"deep": [whole]})
    (found,) = checkpoint.load(model, None, tmp_path / "saved")["deep"]
    assert torch.equal(found, WHOLE.cpu())


@on_ranks(2)
def test_part_that_a_unit_divides_besides_is_refused_by_name(rank, tmp_path):
    model = FSDP(Expert(rank, filled=True), device_id=device(), use_orig_params=True)
    with pytest.raises(NotImplementedError, match=r"weight is part of a tensor of shape \(4, 3\)"):
        checkpoint.save(model, None, tmp_path / "saved")


@on_ranks(2)
def test_attributes_that_do_not_fit_are_refused_by_name(rank, tmp_path):
    model, _ = wrapped(rank, filled=True)
    for attribute, value, text in (
        ("local_sizes", ((1, 3),), "different lengths"),
        ("global_offsets", ((0, 0), (4, 0)), "is not inside a tensor of shape"),
        ("local_offsets", ((0, 0), (3, 0)), "is not inside a tensor of shape"),
    ):
        before = getattr(model.module.weight, attribute)
        setattr(model.module.weight, attribute, value)
        with pytest.raises(ValueError, match=f"weight: .*{text}"):
            checkpoint.save(model, None, tmp_path / "saved")
        setattr(model.module.weight, attribute, before)
    model.module.seen = (half(rank, torch.zeros(3, 3)),)
    with pytest.raises(NotImplementedError, match=r"_extra_state\.seen: a part of a tensor in a tuple"):
        checkpoint.save(model, None, tmp_path / "saved")


# ----------------------------------------------------------------- another Python

UNIT = "pieces integrity folder objects cli hostile pythons"


@pytest.mark.timeout(900)
def test_checkpoint_tests_pass_on_a_python_that_pickles_members_by_getattr() -> None:
    """CPython 3.11.0 to 3.11.3: the unit tests of checkpoints run once on it, where there is one."""
    environment = early_3_11()
    files = [f"tests/unit/test_checkpoint_{name}.py" for name in UNIT.split()]
    left_out = (
        "not mutated and not to_and_from and not memory_is_a_few"  # the fuzzer; what starts other Pythons
    )
    command = ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", left_out, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.findall("([0-9]+) passed", done.stdout)[-1]) > 300
