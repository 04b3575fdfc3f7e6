"""Malicious checkpoints execute nothing, read no other file, take no memory, and replace no value."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import zipfile
import zlib
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
from fsdp_c.checkpoint.metadata import Value, read_metadata
from fsdp_c.checkpoint.storage import read_checkpoint, read_nested
from tests.checkpoints import contents, pickle_of, trained
from tests.fuzz.checkpoint import SUBJECTS
from tests.processes import ROOT, output_of_python


class Harm:
    """An object whose unpickling calls a function that creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def torch_checkpoint(path: Path) -> Metadata:
    """Write a checkpoint with torch, without a process group, and return its metadata."""
    state = {"model": {"weight": torch.ones(2, 3)}, "note": "hello"}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def rewrite(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        contents(path)
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.clone()
    # a load reports a different shape before it looks for the parts
    with pytest.raises(CheckpointError, match=f"{reason}|model.weight has shape"):
        checkpoint.load(model, None, path)
    assert torch.equal(model.weight, before)


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


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.serialization.load", "torch.ops"])
def test_only_names_of_dcp_are_known(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    module, _, attribute = name.rpartition(".")
    (path / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
    refused(path, f"it names {name}")


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_getattr_gives_no_attribute(module: str) -> None:
    """CPython 3.11.0 to 3.11.3 pickle members of enums through getattr."""
    cls = "ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert isinstance(read_metadata(f"c{module}\ngetattr\n({cls}S'__class__'\ntR.".encode()), Value)


@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.metadata\nMetadata", "torch\nSize", "torch\nfloat32"]
)
def test_nothing_is_left_on_classes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    # BUILD with a slot state sets attributes of the object on the stack, here of a class
    stream = b"\x80\x02c%b\n(N}X\x05\x00\x00\x00ownedK\x01stb." % name.encode()
    (path / ".metadata").write_bytes(stream)
    refused(path, "damaged, or not written by DCP")
    assert not any(hasattr(each, "owned") for each in (Metadata, tuple, torch.Size, torch.float32, Value))


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
    """Use the same bytes of a file for many rows."""
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size, entry.chunks = torch.Size([2000, 3]), [chunk([2 * at, 0], [2, 3])[0] for at in range(1000)]
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == "model.weight"]
    metadata.storage_data[MetadataIndex("model.weight")] = place


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_place(relative_path="../outside"), "leads out of the folder"),
        (set_place(relative_path="/etc/passwd"), "leads out of the folder"),
        (set_place(relative_path="a\0b"), "leads out of the folder"),
        (set_place(relative_path="link"), "a link out of the folder"),
        (set_place(relative_path="nowhere"), "nowhere: missing"),
        (set_place(relative_path=3), "a file name is not a string"),
        (set_place(offset=-1), "sizes"),
        (set_place(offset=True), "sizes"),
        (set_place(length=2**40), "but .* ends at .*: truncated"),
        (set_place(length=1), "24 bytes in 1 bytes of a file"),
        (set_place(transform_descriptors=["zstd"]), "compressed or encrypted"),
        (set_tensor(size=torch.Size([2, 4])), "the chunks of model.weight have 6 elements"),
        (set_tensor(chunks=chunk([0, 1], [2, 3])), "outside its shape"),
        (set_tensor(size=torch.Size([3, 2]), chunks=chunk([0, 0], [3, 2])), "not a tensor of shape"),
        (set_tensor(chunks=chunk([0], [6])), "outside its shape"),
        (set_tensor(chunks=None), "no dtype or chunks"),
        (set_tensor(properties=None), "damaged"),
        (
            set_tensor(chunks=chunk([0, 0], [1, 3]) + chunk([1, 0], [1, 3])),
            "has no place in a file|24 bytes|have",
        ),
        (set_tensor(chunks=chunk([0, 0], [1, 3]) * 2), "overlap"),
        (repeated, "model.weight is larger than all files"),
        (set_tensor(size=((2,), (3,))), "is not a list of sizes or offsets"),
        (huge, "larger than all files"),
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"not a pickle",
        pickle.dumps([]),
        pickle.dumps({"a": 1}),
        # more bytes than the file has
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of 2**31 places
        b"\x80\x02]p2147483647\n.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # 2**40 bytes
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2**31 bytes
    ],
)
def test_other_files_are_refused_without_the_memory_that_they_ask_for(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path, "damaged, or not written by DCP")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # limit in KiB


def test_ordinary_pickles_are_read() -> None:
    values = [(i, [i] * (i % 7), -i, 2 ** (i % 99), 0.5, None, True, b"x" * i, "y" * 300) for i in range(600)]
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        for value in (values, dict(enumerate(values)), 2**63 + 0x74859000, 0x8A0885858585):
            assert read_metadata(pickle.dumps(value, protocol)) == value


FOOTERS = [b"{}", b"[]", b"\xff", b'["fsdp_c-data-0123456789ab", {"x": [1, 1]}]', b"[" * 100000]
FOOTERS += [b'["..", {}]', b'[".", {}]', b'["fsdp_c-data-0123456789ab", {"../../__0_0.distcp": [4, 0]}]']


@pytest.mark.parametrize("text", FOOTERS)
@pytest.mark.parametrize("nbytes", [None, 0, 2**39])
def test_a_bad_end_of_metadata_is_refused_and_leads_nowhere(
    text: bytes, nbytes: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    model = nn.Linear(3, 2, bias=False)
    checkpoint.save(model, None, path)
    others = [tmp_path / "__0_0.distcp", path / "notes.txt"]
    for other in others:
        other.write_text("mine")
    content = pickle_of((path / ".metadata").read_bytes()) + text
    content += b"fsdp_c 1 %010x " % (len(text) if nbytes is None else nbytes)
    (path / ".metadata").write_bytes(content + b"%08x\n" % zlib.crc32(content))
    refused(path, ".metadata: damaged at its end")
    checkpoint.save(model, None, path)  # removes the data of the checkpoint that it replaces
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("names", [None, 3, [1, 2], "0.weight"])
def test_a_group_whose_parameters_are_not_names_is_refused(names: object, tmp_path: Path) -> None:
    model, optimizer = trained()
    optim = checkpoint.optim_state(model, optimizer)
    optim["param_groups"][0]["params"] = names
    dcp.save({"model": model.state_dict(), "optim": optim}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(
        CheckpointError, match="group 0 of the optimizer lists .* as its parameters, which are"
    ):
        checkpoint.load(model, optimizer, tmp_path)


def test_bytes_entries_stay_bytes(tmp_path: Path) -> None:
    """A tensor of the model is not loaded from an entry that the metadata declare an object."""
    path = tmp_path / "ckpt"
    metadata = torch_checkpoint(path)
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("model.weight")] = metadata.storage_data[MetadataIndex("note")]
    rewrite(path, metadata)
    with pytest.raises(CheckpointError, match="model.weight is not a tensor in the checkpoint"):
        checkpoint.load(nn.Linear(3, 2, bias=False), None, path)


# ----------------------------------------------------------------- objects


def written(value: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, **options)
    return content.getvalue()


def script() -> bytes:
    content = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(3, 2)), content)
    return content.getvalue()


def torn_tensor() -> bytes:
    torn = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(written(torch.ones(2, 3)))) as whole,
        zipfile.ZipFile(torn, "w") as archive,
    ):
        for name in whole.namelist():
            content = whole.read(name)
            archive.writestr(name, content[:8] if name.endswith("data/0") else content)
    return torn.getvalue()


OBJECTS: dict[str, Callable[[Harm], bytes]] = {
    "a call": written,
    "a call beside a tensor": lambda harm: written({"weight": torch.ones(2, 3), "x": harm}),
    "a call in the format before zip": lambda harm: written(harm, _use_new_zipfile_serialization=False),
    "a bare pickle": pickle.dumps,
    "TorchScript": lambda harm: script(),
    "a torn tensor": lambda harm: torn_tensor(),
    "a torn archive": lambda harm: written(torch.ones(2, 3))[:-1],
    "nothing": lambda harm: b"",
}


# torch warns before it refuses or loads an archive
@pytest.mark.filterwarnings("ignore:.*TorchScript archive")
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_and_tensors_are_not_executed(
    kind: str, as_tensor: bool, tmp_path: Path, capsys, monkeypatch
) -> None:
    path, marker = tmp_path / "ckpt", tmp_path / "harmed"
    content = OBJECTS[kind](Harm(marker))
    # the replacement shows whether TorchScript would be run
    monkeypatch.setattr(torch.jit, "load", lambda *args, **options: marker.touch())
    key = "model.weight" if as_tensor else "note"
    metadata = torch_checkpoint(path)
    (path / "__1_0.distcp").write_bytes(content)
    place = _StorageInfo("__1_0.distcp", 0, len(content))
    changed = metadata.storage_data if as_tensor else [MetadataIndex("note")]
    metadata.storage_data |= dict.fromkeys(changed, place)
    rewrite(path, metadata)
    with pytest.raises(
        CheckpointError, match=rf"__1_0.distcp: {key} cannot be read|model.weight is larger than all files"
    ) as caught:
        if as_tensor:
            checkpoint.load(nn.Linear(3, 2, bias=False), None, path)
        else:
            read_nested(read_checkpoint(path), "note")
    assert not marker.exists()
    if "cannot be read" in str(caught.value):
        assert cli.main(["verify", str(path)]) == 1
        assert str(caught.value).removeprefix(f"loading {path} failed on rank 0: ") in capsys.readouterr().out
        assert not marker.exists()


# ----------------------------------------------------------------- files


@pytest.mark.timeout(300)
def test_pipes_in_a_dcp_folder_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    refused(path, "__0_0.distcp: missing")


# ----------------------------------------------------------------- printed names


def test_names_command_no_terminal(tmp_path: Path, capsys) -> None:
    name, path = "a\x1b[2Jb\u202ec\nd", tmp_path / "ckpt"
    dcp.save({name: torch.ones(2), "b": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    (data,) = path.glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    for each, status in ((path, 1), (tmp_path / "\x1b[2J", 2)):
        assert cli.main(["verify", str(each)]) == status
        shown = "".join(capsys.readouterr())
        assert shown and all(each.isprintable() for line in shown.split("\n") for each in line), shown
    cli.main(["verify", str(path)])
    assert "a\\x1b[2Jb\\u202ec\\nd cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("error", [RecursionError("too deep"), MemoryError(), RuntimeError("no\nmemory")])
def test_an_error_of_python_or_torch_is_one_line_and_status_2(
    error: Exception, monkeypatch, tmp_path, capsys
) -> None:
    torch_checkpoint(tmp_path / "ckpt")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(cli, "read_object", fail)
    assert cli.main(["verify", str(tmp_path / "ckpt")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'ckpt'}: ") and said.count("\n") == 1 and len(said) > 15


@pytest.fixture(scope="module")
def fuzzed() -> str:
    """Run a few trials of tests/fuzz/checkpoint.py, under its limits of time and memory."""
    command = f"-m tests.fuzz.checkpoint --seed 1 --count {200 * len(SUBJECTS)}".split()
    return output_of_python(*command, cwd=ROOT, timeout_s=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SUBJECTS)
def test_mutated_checkpoints_are_refused_or_read(name: str, fuzzed: str) -> None:
    (line,) = [line for line in fuzzed.splitlines() if line.startswith(f"{name}: ")]
    outcomes = json.loads(line[len(name) + 2 : line.index("}") + 1])
    assert sum(outcomes.values()) == 200
    assert outcomes["refused"] > 30 and outcomes["read"] > 5
