"""Checkpoints between versions of torch, and of Python, which differ in pickles of enum members and paths."""

from __future__ import annotations

import base64
import enum
import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorProperties

from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from fsdp_c.checkpoint.contents import BytesEntry, TensorEntry
from fsdp_c.checkpoint.folder import METADATA
from fsdp_c.checkpoint.storage import read_checkpoint, read_chunk
from tests.checkpoints import plain, save, trained

pytestmark = pytest.mark.filterwarnings("ignore")
_five_values = TensorProperties.__getstate__


def _six_values(self: TensorProperties) -> tuple[Any, ...]:
    """Return the state as in torch 2.15, with strides; the installed torch may read five values."""
    return (*_five_values(self)[:5], (3, 1))


def test_metadata_written_by_torch_2_15_are_read_by_the_installed_torch(tmp_path: Path) -> None:
    with mock.patch.object(TensorProperties, "__getstate__", _six_values):
        save(tmp_path / "saved", 1)
    states = []
    with mock.patch.object(TensorProperties, "__setstate__", lambda self, state: states.append(len(state))):
        pickle.loads((tmp_path / "saved" / METADATA).read_bytes())
    assert set(states) == {5}
    found = {"model": plain().state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(value, torch.ones_like(value)) for value in found["model"].values())


def test_metadata_hold_what_torch_looks_for_and_what_pickle_writes_on_older_versions(
    tmp_path: Path,
) -> None:
    model, optimizer = trained()
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
    assert any(chunk.strides for chunk in ours.tensor("model.2.weight").chunks)
    state = model.state_dict()
    torch_reads = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
    dcp.load(torch_reads, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(torch_reads["model"][key], value) for key, value in state.items())
    if len(TensorProperties().__getstate__()) == 5:  # newer versions write more
        assert pickle.loads(pickle.dumps(found)) == found


# ----------------------------------------------------------------- versions of Python

# Pickles of one Metadata in base64. Only Python 3.11 had torch; the others had classes of the same names.
RECORDED = json.loads(Path(__file__).with_name("recorded_metadata.json").read_text())


@pytest.mark.parametrize("by", RECORDED)
def test_metadata_of_every_python_and_torch_are_read(by: str, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(base64.b64decode(RECORDED[by]))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(2000))
    found = read_checkpoint(tmp_path)
    weight, note = found.entries["model.weight"], found.entries["note"]
    assert isinstance(weight, TensorEntry) and (weight.shape, weight.dtype) == ((2, 3), torch.float32)
    assert weight.chunks == [((0, 0), (2, 3), "__0_0.distcp", 0, 1200, None, None)]
    assert isinstance(note, BytesEntry) and (note.start, note.nbytes) == (1200, 800)
    assert found.paths == {"model.weight": ("model", "weight"), "note": ("note",)}


def names(content: bytes) -> set[str]:
    return {str(argument) for _, argument, _ in pickletools.genops(content)}


def test_members_of_enums_are_written_by_value_on_every_python(tmp_path: Path) -> None:
    def of_python_3_11_2(member: enum.Enum, protocol: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    with mock.patch.object(enum.Enum, "__reduce_ex__", of_python_3_11_2):
        assert "getattr" in names(pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, 4))
        checkpoint.save(nn.Linear(3, 2), None, tmp_path / "ours")
        dcp.save({"model": nn.Linear(3, 2).state_dict()}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert "getattr" in names((tmp_path / "torchs" / METADATA).read_bytes())
    assert "getattr" not in names((tmp_path / "ours" / METADATA).read_bytes())
    for name in ("ours", "torchs"):
        checkpoint.load(nn.Linear(3, 2), None, tmp_path / name)
        assert cli.main(["verify", str(tmp_path / name)]) == 0
