"""Checkpoints between versions of Python, which pickle enum members and paths differently."""

from __future__ import annotations

import base64
import enum
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
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from fsdp_c.checkpoint.contents import BytesEntry, TensorEntry
from fsdp_c.checkpoint.folder import METADATA
from fsdp_c.checkpoint.storage import read_checkpoint

# Pickles of one Metadata in base64. Only Python 3.11 had torch; the others had classes of the same names.
RECORDED = json.loads(Path(__file__).with_name("recorded_metadata.json").read_text())


def written(path: Path, content: bytes) -> Path:
    path.mkdir()
    (path / METADATA).write_bytes(content)
    (path / "__0_0.distcp").write_bytes(bytes(2000))
    return path


@pytest.mark.parametrize("by", RECORDED)
def test_metadata_of_every_python_and_torch_are_read(by: str, tmp_path: Path) -> None:
    found = read_checkpoint(written(tmp_path / "ckpt", base64.b64decode(RECORDED[by])))
    weight, note = found.entries["model.weight"], found.entries["note"]
    assert isinstance(weight, TensorEntry) and (weight.shape, weight.dtype) == ((2, 3), torch.float32)
    assert weight.chunks == [((0, 0), (2, 3), "__0_0.distcp", 0, 1200, None, None)]
    assert isinstance(note, BytesEntry) and (note.start, note.nbytes) == (1200, 800)
    assert found.paths == {"model.weight": ("model", "weight"), "note": ("note",)}


def test_what_was_recorded_names_getattr_where_python_does() -> None:
    for by, content in RECORDED.items():
        assert (b"getattr" in base64.b64decode(content)) == ("3.11.2" in by), by


def as_of_python_3_11_2(member: enum.Enum) -> tuple[Any, ...]:
    return getattr, (type(member), member.name)


def as_python_3_11_2_pickles() -> Any:
    return mock.patch.multiple(enum.Enum, __reduce_ex__=lambda self, protocol: as_of_python_3_11_2(self))


def names(content: bytes) -> set[str]:
    return {str(argument) for _, argument, _ in pickletools.genops(content)}


def test_members_of_enums_are_written_by_value_on_every_python(tmp_path: Path) -> None:
    with as_python_3_11_2_pickles():
        assert "getattr" in names(pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, 4))
        checkpoint.save(nn.Linear(3, 2), None, tmp_path / "ours")
        dcp.save({"model": nn.Linear(3, 2).state_dict()}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert "getattr" in names((tmp_path / "torchs" / METADATA).read_bytes())
    assert "getattr" not in names((tmp_path / "ours" / METADATA).read_bytes())
    for name in ("ours", "torchs"):
        checkpoint.load(nn.Linear(3, 2), None, tmp_path / name)
        assert cli.main(["verify", str(tmp_path / name)]) == 0
