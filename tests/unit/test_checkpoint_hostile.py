"""Checkpoints made to harm: nothing in them is executed, no file outside is touched, no size is believed."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli
from fsdp_c.checkpoint.metadata import check_pickle, checksums_content, read_checkpoint
from fsdp_c.checkpoint.storage import read_nested
from tests.fuzz.checkpoint import SUBJECTS
from tests.fuzz.checkpoint import run as run_trials


class Harm:
    """Leaves a file behind when it is unpickled by something that calls what it is told to."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def torch_checkpoint(path: Path) -> Metadata:
    """One that torch wrote, without a process group; its metadata."""
    state = {"model": {"weight": torch.ones(2, 3)}, "note": "hello"}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def rewrite(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(path)
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(model, None, path)
    assert torch.equal(model.weight, before)


def test_an_untouched_one_loads(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    rewrite(path, torch_checkpoint(path))
    model = nn.Linear(3, 2, bias=False)
    checkpoint.load(model, None, path, strict=False)
    assert torch.equal(model.weight, torch.ones(2, 3))


@pytest.mark.parametrize("where", ["all", "planner_data", "size", "class state"])
def test_metadata_are_not_executed(where: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "ckpt", tmp_path / "harmed"
    metadata: Any = torch_checkpoint(path)
    if where == "all":
        metadata = Harm(marker)
    elif where == "planner_data":
        metadata.planner_data = {"note": Harm(marker)}
    elif where == "size":
        metadata.state_dict_metadata["model.weight"].size = Harm(marker)
    else:
        metadata.storage_meta.modules = [Harm(marker)]
    rewrite(path, metadata)
    refused(path, "it names posix.system")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.serialization.load"])
def test_only_names_of_dcp_are_known(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    module, _, attribute = name.rpartition(".")
    (path / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
    refused(path, f"it names {name}")


def test_nothing_is_left_on_torchs_classes(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    # BUILD with a slot state sets attributes of whatever is on the stack: of a class, here
    stream = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x05\x00\x00\x00ownedK\x01stb."
    (path / ".metadata").write_bytes(stream)
    refused(path, "damaged, or not written by DCP")
    assert not hasattr(Metadata, "owned")


def set_place(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            for name, value in changes.items():
                setattr(info, name, value)

    return change


def set_tensor(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in changes.items():
            setattr(metadata.state_dict_metadata["model.weight"], name, value)

    return change


def huge(metadata: Metadata) -> None:
    shape = torch.Size([2**40, 2**20])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), shape)
    metadata.state_dict_metadata["model.weight"] = TensorStorageMetadata(TensorProperties(), shape, [chunk])


def long_path(metadata: Metadata) -> None:
    metadata.planner_data["note"] = ("note", 2**40)


def no_place(metadata: Metadata) -> None:
    metadata.storage_data = {}


def chunk(offsets: list[int], sizes: list[int]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


def repeated(metadata: Metadata) -> None:
    """The same bytes of a file as ever more rows."""
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size, entry.chunks = torch.Size([2000, 3]), [chunk([2 * at, 0], [2, 3])[0] for at in range(1000)]
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == "model.weight"]
    metadata.storage_data[MetadataIndex("model.weight")] = place


def doubled(times: int) -> Any:
    """A tuple in a few bytes whose text would fill the memory."""
    value: Any = ()
    for _ in range(times):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_place(relative_path="../outside"), "leads out of the folder"),
        (set_place(relative_path="/etc/passwd"), "leads out of the folder"),
        (set_place(relative_path="a\0b"), "leads out of the folder"),
        (set_place(relative_path="link"), "a link out of the folder"),
        (set_place(relative_path="nowhere"), "nowhere: missing"),
        (set_place(relative_path=3), "the name of a file is no text"),
        (set_place(offset=-1), "sizes"),
        (set_place(offset=True), "sizes"),
        (set_place(length=2**40), "but .* ends at .*: torn"),
        (set_place(length=1), "24 bytes in 1 bytes of a file"),
        (set_place(transform_descriptors=["zstd"]), "compressed or encrypted"),
        (set_place(piece=(0, 24, 0, None)), "outside its entry"),
        (set_place(piece=(2**30, 24, 0, None)), "outside its entry"),
        (set_place(piece="x"), "damaged"),
        (set_tensor(size=torch.Size([2, 4])), "the chunks of model.weight have 6 elements"),
        (set_tensor(chunks=chunk([0, 1], [2, 3])), "outside its shape"),
        (set_tensor(chunks=chunk([0], [6])), "outside its shape"),
        (set_tensor(chunks=None), "no dtype or chunks"),
        (set_tensor(properties=None), "damaged"),
        (set_tensor(chunks=chunk([0, 0], [1, 3]) + chunk([1, 0], [1, 3])), "is nowhere|24 bytes|have"),
        (set_tensor(chunks=chunk([0, 0], [1, 3]) * 2), "overlap"),
        (repeated, "model.weight is larger than all files"),
        (set_tensor(size=doubled(40)), "where sizes are expected"),
        (huge, "sizes|bytes of a file"),
        (long_path, "the path of note"),
        (no_place, "nowhere"),
    ],
)
def test_values_are_checked(change: Callable[[Metadata], None], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    metadata = torch_checkpoint(path)
    (tmp_path / "outside").write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "link").symlink_to(tmp_path / "outside")
    change(metadata)
    rewrite(path, metadata)
    refused(path, reason)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([]), pickle.dumps({"a": 1})])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / ".metadata").write_bytes(content)
    refused(path, "damaged, or not written by DCP")


def with_object(path: Path, content: bytes) -> None:
    """Puts ``content`` where "note" is, in a checkpoint with the right checksums."""
    metadata = torch_checkpoint(path)
    (path / "__1_0.distcp").write_bytes(content)
    metadata.storage_data[MetadataIndex("note")] = _StorageInfo("__1_0.distcp", 0, len(content))
    rewrite(path, metadata)


def test_objects_are_not_executed(tmp_path: Path) -> None:
    path, marker = tmp_path / "ckpt", tmp_path / "harmed"
    content = io.BytesIO()
    torch.save(Harm(marker), content)
    with_object(path, content.getvalue())
    with pytest.raises(CheckpointError, match="__1_0.distcp: note cannot be read"):
        read_nested(read_checkpoint(path), "note")
    assert cli.main(["verify", str(path)]) == 1
    assert not marker.exists()


def test_pieces_without_checksums_are_an_interrupted_copy(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    checkpoint.save(nn.Linear(3, 2, bias=False), None, path)
    (path / "checksums.json").unlink()
    refused(path, "checksums.json is missing")


def test_tensors_are_not_executed(tmp_path: Path) -> None:
    path, marker = tmp_path / "ckpt", tmp_path / "harmed"
    metadata = torch_checkpoint(path)
    content = io.BytesIO()
    torch.save({"weight": torch.ones(2, 3), "x": Harm(marker)}, content)
    (path / "__0_0.distcp").write_bytes(content.getvalue())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content.getvalue())
    rewrite(path, metadata)
    with pytest.raises(CheckpointError, match="model.weight cannot be read"):
        checkpoint.load(nn.Linear(3, 2, bias=False), None, path, strict=False)
    assert not marker.exists()


def test_a_tensor_of_another_shape_than_promised_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    metadata = torch_checkpoint(path)
    weight = metadata.state_dict_metadata["model.weight"]
    weight.size = torch.Size([3, 2])
    weight.chunks[0].sizes = torch.Size([3, 2])
    rewrite(path, metadata)
    with pytest.raises(CheckpointError, match=r"model.weight is not a tensor of shape \(3, 2\)"):
        checkpoint.load(nn.Linear(2, 3, bias=False), None, path, strict=False)


def test_right_checksums_make_no_metadata_trusted(tmp_path: Path) -> None:
    path, marker = tmp_path / "ckpt", tmp_path / "harmed"
    torch_checkpoint(path)
    content = pickle.dumps(Harm(marker))
    (path / ".metadata").write_bytes(content)
    (path / "checksums.json").write_bytes(checksums_content(content, {}))
    refused(path, "it names posix.system")
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [b"{}", b"[]", b"\xff", b'{"format": "other", "version": 1, "algorithm": "crc32", "files": {}}', b"[" * 100000],
)
def test_bad_checksum_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / "checksums.json").write_bytes(content)
    refused(path, "checksums.json: damaged")


def test_a_file_of_torch_save_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "harmed"
    torch.save({"a": Harm(marker)}, tmp_path / "model.pt")
    assert cli.main(["inspect", str(tmp_path / "model.pt")]) == 2
    assert "may run code when loaded, and was not loaded" in capsys.readouterr().err
    assert not marker.exists()


def safetensors_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)
    return path


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, None),  # no data
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, None),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, None),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, None),
        ({"a": {"dtype": "F32", "shape": [2**61, 8], "data_offsets": [0, 0]}}, None),
        ({"a": {"shape": [1]}}, None),
        (b"{" * 3000, None),
        ({}, 2**62),
    ],
)
def test_safetensors_headers_are_checked(header: Any, length: int | None, tmp_path: Path, capsys) -> None:
    path = safetensors_file(tmp_path / "model.safetensors", header, b"\0" * 4, length)
    assert cli.main(["inspect", str(path)]) == 2
    assert f"error: {path}: " in capsys.readouterr().err


def test_bytes_entries_stay_bytes(tmp_path: Path) -> None:
    """A model's tensor is not read from what the metadata call an object."""
    path = tmp_path / "ckpt"
    metadata = torch_checkpoint(path)
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("model.weight")] = metadata.storage_data[MetadataIndex("note")]
    rewrite(path, metadata)
    with pytest.raises(CheckpointError, match="model.weight is no tensor in the checkpoint"):
        checkpoint.load(nn.Linear(3, 2, bias=False), None, path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of 2**31 places
        b"\x80\x02]p2147483647\n.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # 2**40 bytes
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2**31 bytes
    ],
)
def test_metadata_do_not_say_how_much_memory_is_taken(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path, "damaged, or not written by DCP")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_ordinary_pickles_pass(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        value = {f"key{i}": (i, [i] * (i % 7), -i, 2**40 * i, 0.5, None, True, b"x" * i, "y" * 300) for i in range(600)}
        check_pickle(pickle.dumps(value, protocol))


def compressed(path: Path) -> Path:
    """A file of torch.save, in a thousandth of its size."""
    torch.save({"a": torch.zeros(2**20)}, path.with_suffix(".stored"))
    with zipfile.ZipFile(path.with_suffix(".stored")) as stored:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in stored.namelist():
                archive.writestr(name, stored.read(name))
    return path


def test_compressed_data_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ckpt"
    with_object(path, compressed(tmp_path / "bomb.pt").read_bytes())
    with pytest.raises(CheckpointError, match="compressed data"):
        read_nested(read_checkpoint(path), "note")
    assert cli.main(["inspect", str(tmp_path / "bomb.pt")]) == 2
    assert "compressed data" in capsys.readouterr().err


def test_a_tensor_of_more_elements_than_its_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.zeros(1).expand(2**40)}, tmp_path / "model.pt")
    assert cli.main(["inspect", str(tmp_path / "model.pt")]) == 2
    assert "a is sparse, or has more elements than the file" in capsys.readouterr().err


def test_the_files_of_ranks_are_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "harmed"
    for name in ("rank0.pt", "rank1.pt"):
        torch.save({name: torch.ones(2), f"{name}.harm": Harm(marker)}, tmp_path / name)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "it names posix.system, which no state dict has" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutated_checkpoints_are_refused_or_read(name: str) -> None:
    """A few of the trials of tests/fuzz/checkpoint.py."""
    outcomes = run_trials(name, seed=1, first=0, count=150)
    assert outcomes["refused"] > 30 and outcomes["read"] > 5
