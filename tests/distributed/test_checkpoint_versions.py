"""Checkpoints between versions of torch. DCP has supported more kinds of tensors since 2.14."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint.folder import METADATA
from fsdp_c.checkpoint.storage import read_checkpoint, read_chunk
from tests.ranks import device, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
_five_values = TensorProperties.__getstate__


def _six_values(self: TensorProperties) -> tuple[Any, ...]:
    """Return the state as in torch 2.15, with strides. The reader of the installed torch may expect five
    values.
    """
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
    with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", 24):
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
    ours = read_checkpoint(tmp_path / "saved")  # reads the layout
    assert [*ours.entries] == [*found.state_dict_metadata] and ours.paths == found.planner_data
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
            own = ours.entries[key].chunks[number]
            assert (own.offsets, own.sizes, own.file) == (
                *map(tuple, vars(chunk).values()),
                info.relative_path,
            )
            assert torch.equal(read_chunk(ours, key, own), loaded)
            assert [*ours.entries[key].find((own.offsets, own.sizes))] == [own] or not loaded.numel()
            assert (loaded.stride() == own.strides) if own.strides else loaded.is_contiguous()
            places.add((info.relative_path, info.offset))
    assert {*indices.values()} == {None} and len(places) > 25  # all other entries are objects
    assert any(chunk.strides for chunk in ours.tensor("model.1.weight").chunks)
    state = model.state_dict()
    torch_reads = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
    dcp.load(torch_reads, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(torch_reads["model"][key], value) for key, value in state.items())
    if len(TensorProperties().__getstate__()) == 5:  # newer versions write more
        assert pickle.loads(pickle.dumps(found)) == found


def test_checkpoint_of_torch_2_15_is_loaded(tmp_path: Path) -> None:
    with as_of_torch_2_15():
        dcp.save({"model": model_of(3.0).state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    model = model_of(0.0)
    checkpoint.load(model, None, tmp_path / "saved")
    assert all(bool((param == 3).all()) for param in model.parameters())


# ----------------------------------------------------------------- plain tensors that are parts of others


def part(tensor: Any) -> Any:
    """Mark ``tensor`` as a part of a larger one, by the attributes of CheckpointableTensor in torch 2.14 and
    later.
    """
    tensor.global_shape, tensor.global_offsets = (8, *tensor.shape[1:]), ((0,) * tensor.dim(),)
    tensor.local_offsets, tensor.local_sizes = tensor.global_offsets, (tuple(tensor.shape),)
    return tensor


class Own(nn.Linear):
    """A layer with extra state."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": [self.seen]}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


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
def test_a_part_of_a_larger_tensor_is_refused_by_name(rank, where, name, tmp_path):
    """A save would treat it as complete and lose the other ranks' parts."""
    inner = nn.Sequential(Own(3, 3), nn.Linear(3, 3))
    inner[0].register_buffer("rows", torch.ones(2))
    if where == "unit":
        part(inner[0].weight)
    ignored = [inner[1].weight, inner[1].bias]
    model = FSDP(inner, ignored_states=ignored, device_id=device(), use_orig_params=True)
    if where == "ignored":
        part(inner[1].weight)
    elif where == "buffer":
        part(inner[0].rows)
    elif where == "extra state":
        inner[0].seen = part(torch.ones(2))
    extra = {"deep": [part(torch.ones(2))]} if where == "extra" else None
    with pytest.raises(
        (NotImplementedError, checkpoint.CheckpointError), match=rf"{name}: its attributes say"
    ):
        checkpoint.save(model, None, tmp_path / "saved", extra=extra)
    assert not (tmp_path / "saved").exists()
