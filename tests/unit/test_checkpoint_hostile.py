"""Checkpoints made to harm: nothing in them is executed, no file outside is touched, no size is believed."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from fsdp_c.checkpoint import CheckpointError, cli, pickles
from fsdp_c.checkpoint.metadata import checksums_content, read_checkpoint
from fsdp_c.checkpoint.pickles import check_pickle, check_values
from fsdp_c.checkpoint.storage import read_nested
from tests.fuzz.checkpoint import SUBJECTS
from tests.processes import ROOT, output_of_python


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
    # a load sees that a shape is another before it looks where the parts are
    with pytest.raises(CheckpointError, match=f"{reason}|model.weight has shape"):
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


@pytest.mark.parametrize(
    "name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.serialization.load"]
)
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


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([]), pickle.dumps({"a": 1})]
)
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
    (path / "checksums.json").write_bytes(checksums_content((len(content), zlib.crc32(content)), {}))
    refused(path, "it names posix.system")
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"format": "other", "version": 1, "algorithm": "crc32", "files": {}}',
        b"[" * 100000,
    ],
)
def test_bad_checksum_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    checkpoint.save(nn.Linear(3, 2, bias=False), None, path)
    (path / "checksums.json").write_bytes(content)
    refused(path, "checksums.json: damaged")


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


def test_integers_are_passed_over_many_at_once() -> None:
    """In their bytes may be what elsewhere makes a tuple."""
    odd = (2**31 + 0x85, 0x85868774, 0x74859000, 0x8A0885858585, 2**62)
    for value in (
        [(each, -each) for _ in range(500) for each in odd],
        [2 ** (8 * nbytes) // 3 for nbytes in range(99)],
    ):
        content = pickle.dumps(value, protocol=3)
        alone = [content[start] for start, _, is_fixed in pickles._runs(content) if not is_fixed]
        assert alone.count(ord(pickle.LONG1)) == sum(
            isinstance(each, int) and each >= 2**63 for each in value
        )
        reader = pickle.Unpickler(io.BytesIO(pickles.with_marked_tuples(content)))
        reader.persistent_load = list  # type: ignore[assignment]  # it is given what becomes a tuple
        assert reader.load() == [list(each) if isinstance(each, tuple) else each for each in value]


def test_ordinary_pickles_pass(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        value = {
            f"key{i}": (i, [i] * (i % 7), -i, 2**40 * i, 0.5, None, True, b"x" * i, "y" * 300)
            for i in range(600)
        }
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
    refused_object(tmp_path, compressed(tmp_path / "bomb.pt").read_bytes(), capsys, "compressed data")


def refused_object(folder: Path, content: bytes, capsys: Any, why: str = "note cannot be read") -> None:
    """An entry whose bytes are ``content`` is refused by a read and by verify, without the memory it claims."""
    path = folder / "dcp"
    with_object(path, content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=why) as caught:
        read_nested(read_checkpoint(path), "note")
    assert str(caught.value).startswith(f"{path / '__1_0.distcp'}: note cannot be read")
    assert cli.main(["verify", str(path)]) == 1
    assert str(caught.value) in capsys.readouterr().out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stride", [0, 1])
def test_a_tensor_within_a_value_has_as_many_elements_as_are_there(
    stride: int, tmp_path: Path, capsys
) -> None:
    content = b"\x80\x02}X\1\0\0\0v" + tensor_of(2**28, stride) + b"\x85s."
    refused_object(tmp_path, archive_of(content, **{"data/0": bytes(4)}), capsys)


# ----------------------------------------------------------------- TorchScript


class Script(nn.Module):
    """Its code runs when it is loaded, and writes a file."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.weight, self.marker = nn.Parameter(torch.ones(2)), marker

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, str, bool]:
        return (self.weight, self.marker, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]) -> None:
        self.weight, self.marker, self.training = state[0], state[1], state[2]
        torch.from_file(state[1], True, 16, dtype=torch.uint8).fill_(88)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def script(path: Path, marker: Path) -> bytes:
    """An archive of TorchScript that is stored, as those of torch.save are."""
    torch.jit.script(Script(str(marker))).save(path)
    content = io.BytesIO()
    with zipfile.ZipFile(path) as compressed, zipfile.ZipFile(content, "w") as stored:
        for name in compressed.namelist():
            stored.writestr(name, compressed.read(name))
    path.unlink()
    return content.getvalue()


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads TorchScript, or anything that a pickle names, fails."""
    load = torch.load

    def only_weights(*args: Any, **kwargs: Any) -> Any:
        assert kwargs.get("weights_only") is True and "pickle_module" not in kwargs
        return load(*args, **kwargs)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("TorchScript is loaded")

    monkeypatch.setattr(torch, "load", only_weights)
    monkeypatch.setattr(torch.jit, "load", never)


def test_the_code_of_torchscript_does_not_run(no_code: None, tmp_path: Path, capsys) -> None:
    marker = tmp_path / "outside"
    content = script(tmp_path / "raw.pt", marker)
    refused_object(tmp_path, content, capsys, "TorchScript archive, which holds code")
    assert not marker.exists()


def test_no_checkpoint_is_loaded_by_what_runs_code(no_code: None, tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    torch_checkpoint(tmp_path / "torch")
    checkpoint.save(model, None, tmp_path / "ours", extra={"list": [1, torch.ones(2)]})
    for name in ("torch", "ours"):
        assert cli.main(["verify", str(tmp_path / name)]) == 0
    checkpoint.load(model, None, tmp_path / "torch", strict=False)
    assert torch.equal(checkpoint.load(model, None, tmp_path / "ours")["list"][1], torch.ones(2))


# ----------------------------------------------------------------- little that is much


def doubled_dict(times: int) -> Any:
    value: Any = {}
    for _ in range(times):
        value = {"a": value, "b": value}
    return value


def saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def archive_of(pickled: bytes, **records: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")  # or torch's reader would refuse it
        for name, record in records.items():
            archive.writestr(f"archive/{name}", record)
    return content.getvalue()


def pickle_of_doubled_key(times: int) -> bytes:
    """A dict with a tuple for key that pickle itself would never finish hashing."""
    steps = b"".join(b"0h%ch%c\x86q%c" % (at, at, at + 1) for at in range(times))
    return b"\x80\x02)q\x00" + steps + b"0}h%cK\x01s." % times


def tensor_of(size: int, stride: int) -> bytes:
    """In a pickle: a tensor whose storage, record 0, has one element of float32."""
    place = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\1tQ"
    shape = b"K\0\x8a\x08" + struct.pack("<q", size) + b"\x85K%c\x85" % stride
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + shape + b"\x89ccollections\nOrderedDict\n)RtR"


def number_of_numpy(value: int) -> bytes:
    """In a pickle, as ``torch.save`` writes it."""
    with zipfile.ZipFile(io.BytesIO(saved(np.int64(value)))) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return archive.read(name)[2:-1]


NEVER_ENDS = {
    "tuples": saved({"x": doubled(40)}),
    "dicts": saved(doubled_dict(30) | {"t": torch.ones(1)}),
    "a key": archive_of(pickle_of_doubled_key(60)),
    "an element of a set": archive_of(
        pickle_of_doubled_key(60).replace(b"0}h\x3cK\x01s", b"0cbuiltins\nset\n]h\x3ca\x85R")
    ),
    "text in another coding": archive_of(
        b"\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00abX\x03\x00\x00\x00hex\x86R."  # which doubles it, and again
    ),
    "an array of a size": archive_of(b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
    "a tensor of a size": archive_of(b"\x80\x02ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R."),
    "an array of a size, by another call": archive_of(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nctorch\nTensor\nJ\xff\xff\xff\x7f\x85}tR."
    ),
    "an array of numpy's number": archive_of(
        b"\x80\x02cbuiltins\nbytearray\n" + number_of_numpy(2**30) + b"\x85R."
    ),
    "an array of a tensor": archive_of(
        b"\x80\x02cbuiltins\nbytearray\n" + tensor_of(1, 1) + b"\x85R.", **{"data/0": b"\xff\xff\xff\x7f"}
    ),
    "a tensor of a Size": archive_of(b"\x80\x02ctorch\nTensor\nctorch\nSize\n]J\xff\xff\xff\x0fa\x85R\x85R."),
    "a set of all elements": archive_of(
        b"\x80\x02cbuiltins\nset\n" + tensor_of(2**20, 0) + b"\x85R.", **{"data/0": bytes(4)}
    ),
    "arguments without end": archive_of(
        b"\x80\x02cbuiltins\nset\n" + tensor_of(2**20, 0) + b"R.", **{"data/0": bytes(4)}
    ),
    "itself": archive_of(b"\x80\x02]q\x00h\x00a."),
    "depth": archive_of(b"\x80\x02K\x01" + b"\x85" * 5000 + b"."),
}


WHY_NOT = "hold one another so often|in another way than pickle|by its size alone|another call gave|itself|1001 deep"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", NEVER_ENDS)
def test_values_of_archives_that_never_end_are_refused(kind: str, tmp_path: Path, capsys) -> None:
    assert len(NEVER_ENDS[kind]) < 8000
    refused_object(tmp_path, NEVER_ENDS[kind], capsys, WHY_NOT)


@pytest.mark.timeout(300)
def test_metadata_with_a_key_whose_hash_never_ends_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    body = pickle_of_doubled_key(60)
    through_size = body.replace(b"0}h\x3cK\x01s", b"0}ctorch\nSize\nh\x3c\x85RK\x01s")
    in_dict = body.replace(b"0}h\x3cK\x01s", b"0(h\x3cK\x01d")
    in_set = body.replace(b"0}h\x3cK\x01s", b"0\x8f(h\x3c\x90")
    in_frozenset = body.replace(b"0}h\x3cK\x01s", b"0(h\x3c\x91")
    ordered = body.replace(b"0}h\x3cK\x01s", b"0ccollections\nOrderedDict\n]]h\x3caK\x01aa\x85R")
    for content in (body, through_size, in_dict, in_set, in_frozenset, ordered):
        (path / ".metadata").write_bytes(content)
        refused(path, "unhashable type: 'Tuple'")


def test_what_people_save_is_not_too_much() -> None:
    import random

    group = {"lr": 0.1, "betas": (0.9, 0.999)}
    shared = [1] * 1000
    for value in (
        {"groups": [group] * 500, "rng": random.Random(0).getstate(), (1, 2): 3, "set": {(1, 2), "x"}},
        {
            "bytes": b"x" * 1000,
            "array": bytearray(b"abc"),
            "none": None,
            "big": 2**70,
            "many": list(range(3000)),
        },
        [shared] * 10,
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))).state_dict(),
    ):
        for protocol in range(6):
            check_values(pickle.dumps(value, protocol))
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    check_values(pickle.dumps(deep))


# ----------------------------------------------------------------- archives that readers see differently


def zip_records(records: dict[str, bytes]) -> tuple[bytes, list[tuple[bytes, int, int, int]]]:
    """Stored records one behind the other, and name, checksum, size and place of each."""
    body, listed = b"", []
    for name, data in records.items():
        listed.append((f"archive/{name}".encode(), zlib.crc32(data), len(data), len(body)))
        where = listed[-1][0]
        body += struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, *listed[-1][1:3], len(data), len(where), 0
        )
        body += where + data
    return body, listed


def zip_directory(listed: list[tuple[bytes, int, int, int]], method: int = 0, times: int = 1) -> bytes:
    entries = b""
    for name, crc32, nbytes, at in listed:
        fields = (
            0x02014B50,
            20,
            20,
            0,
            method,
            0,
            33,
            crc32,
            nbytes,
            nbytes * times,
            len(name),
            0,
            0,
            0,
            0,
            0,
            at,
        )
        entries += struct.pack("<IHHHHHHIIIHHHHHII", *fields) + name
    return entries


def zip_end(count: int, nbytes: int, at: int, comment: int = 0) -> bytes:
    return struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, nbytes, at, comment)


def zip_end64(count: int, nbytes: int, at: int) -> bytes:
    return struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, at)


def odd_archives() -> dict[str, bytes]:
    body, listed = zip_records(
        {"data.pkl": pickle.dumps({"a": 1}, 2), "version": b"3\n", "data/0": bytes(64)}
    )
    sound = zip_directory(listed)
    claims = zip_directory(listed, times=2**20)
    deflated = zip_directory(listed, method=8)
    shifted = [(*each[:3], each[3] + 1) for each in listed]
    behind = len(body + sound) + 22  # Python counts from where the directory should be, torch from the start
    moved = zip_directory([(*each[:3], each[3] + behind - len(body)) for each in listed])

    def ended(directory: bytes, count: int) -> bytes:
        return body + directory + zip_end(count, len(directory), len(body))

    return {
        "sound": ended(sound, 3),
        "two directories": body + sound + claims + zip_end(3, len(sound), len(body)),
        "a directory behind the end": body + moved + zip_end(3, len(sound), behind) + deflated,
        "two ends of 64 bits": body
        + deflated
        + zip_end64(3, len(sound), len(body))
        + sound
        + zip_end64(3, len(sound), len(body + sound) + 56)
        + struct.pack("<IIQI", 0x07064B50, 0, len(body + sound), 1)
        + zip_end(0xFFFF, 2**32 - 1, 2**32 - 1),
        "sizes": ended(claims, 3),
        "compressed": ended(deflated, 3),
        "overlapping": ended(zip_directory([*listed, (b"archive/data/1", *listed[2][1:])]), 4),
        "twice": ended(zip_directory([*listed, listed[2]]), 4),
        "case": ended(zip_directory([*listed[:2], (b"archive/DATA.PKL", *listed[2][1:])]), 3),
        "elsewhere": ended(zip_directory(shifted), 3),
        "fewer": ended(sound, 2),
        "a comment": body + sound + zip_end(3, len(sound), len(body), 5) + b"hello",
        "something in front": b"PK\3\4" + body + sound + zip_end(3, len(sound), len(body) + 4),
        "cut": ended(sound, 3)[:-1],
        "nothing": b"PK\3\4",
    }


@pytest.mark.parametrize("kind", odd_archives())
def test_archives_are_read_as_torch_save_lays_them_out(kind: str, tmp_path: Path, capsys) -> None:
    with_object(tmp_path / "dcp", odd_archives()[kind])
    assert cli.main(["verify", str(tmp_path / "dcp")]) == (0 if kind == "sound" else 1)
    assert ("cannot be read" in capsys.readouterr().out) == (kind != "sound")


# ----------------------------------------------------------------- files


@pytest.mark.timeout(300)
def test_pipes_in_a_dcp_folder_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    torch_checkpoint(path)
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    refused(path, "__0_0.distcp: missing")


# ----------------------------------------------------------------- what is printed


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


def test_deep_values_are_read_or_one_line(tmp_path: Path, capsys) -> None:
    with_object(tmp_path / "dcp", archive_of(b"\x80\x02" + b"]" * 900 + b"a" * 899 + b"."))
    assert cli.main(["verify", str(tmp_path / "dcp")]) in (0, 1)
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("\n") <= 2


@pytest.fixture(scope="module")
def fuzzed() -> str:
    """A few of the trials of tests/fuzz/checkpoint.py, under its limits of time and memory."""
    command = f"-m tests.fuzz.checkpoint --seed 1 --count {150 * len(SUBJECTS)}".split()
    return output_of_python(*command, cwd=ROOT, timeout_s=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SUBJECTS)
def test_mutated_checkpoints_are_refused_or_read(name: str, fuzzed: str) -> None:
    (line,) = [line for line in fuzzed.splitlines() if line.startswith(f"{name}: ")]
    outcomes = json.loads(line[len(name) + 2 : line.index("}") + 1])
    assert sum(outcomes.values()) == 150
    assert outcomes["refused"] > 30 and outcomes["read"] > 5
