"""fsdp_c.layout is equivalent to ``.metadata``, is used only if it is of the same save, and is not trusted."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli, layout_file, metadata
from fsdp_c.checkpoint.contents import TensorEntry
from fsdp_c.checkpoint.folder import LAYOUT
from fsdp_c.checkpoint.storage import read_checkpoint
from tests.checkpoints import loaded_version, model_of, save, with_right_checksums


def saved(path: Path, version: int = 3) -> Path:
    with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", 16):
        save(path, version)
    return path


def test_a_damaged_one_is_refused_and_torch_reads_the_checkpoint(tmp_path: Path, capsys: Any) -> None:
    path, other = saved(tmp_path / "ckpt"), saved(tmp_path / "other", 4)
    (layout,), (of_other,) = path.rglob(LAYOUT), other.rglob(LAYOUT)
    sound = layout.read_bytes()
    flips = (0, 20, 60, len(sound) - 30, len(sound) - 1)
    damaged = [sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in flips]
    for content in (*damaged, sound[:-1], sound + b"x", of_other.read_bytes()):
        layout.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=f"{LAYOUT}: (damaged: .*checkpoint.load|.*truncated or replaced)"
        ):
            loaded_version(path)
        assert cli.main(["verify", str(path)]) == 1
        assert f"error: {layout}: " in capsys.readouterr().err
    model, _ = model_of(0)
    dcp.load({"model": checkpoint.model_state(model)}, checkpoint_id=path, no_dist=True)
    assert all((param == 3).all() for param in model.parameters())
    rewrite(other, lambda header: None, magic=b"fsdp_c.layout 0\n")
    with pytest.raises(CheckpointError, match=f"{LAYOUT}: damaged, or of another version"):
        loaded_version(other)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], magic: bytes = layout_file.MAGIC) -> None:
    """Rewrite the layout with a changed header and correct checksums."""
    (layout,) = path.rglob(LAYOUT)
    content = layout.read_bytes()
    (text,) = struct.unpack_from("<Q", content, 16)
    header = json.loads(content[32 : 32 + text])
    change(header)
    packed = json.dumps(header).encode()
    head = magic + struct.pack("<QI4x", len(packed), zlib.crc32(packed))
    with_right_checksums(path, layout=head + packed + content[32 + text :])


def weight(header: dict[str, Any]) -> dict[str, Any]:
    """Return the group of the model's first weight."""
    (number,) = [at for at, path in enumerate(header["paths"]) if path == ["model", "0.weight"]]
    (group,) = [group for group in header["groups"] if number in group["keys"]]
    return group


def put(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: weight(header).update(changes)


def put_box(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: weight(header)["boxes"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(shape=[2**40, 2**40]), "sizes"),
        (put(shape=[2**30, 2**30]), "have 2000 elements, but its shape is"),
        (put(shape=[-1, 5]), "is not a list of sizes or offsets"),
        (put(dtype="load"), "has no dtype"),
        (put(dtype="complex128"), "pieces are missing|boxes|larger"),
        (put(keys=[]), "index out of range"),
        (put(keys=[10**6]), "index out of range"),
        (put(keys=[0, 0]), "optim.state.0.weight|model.0.weight"),
        (put_box(sizes=[2**30, 2**30]), "outside"),
        (put_box(sizes=[1, 7]), "have 7 elements"),
        (put_box(offsets=[1, 0]), "outside"),
        (put_box(order=[0, 0]), "order of dimensions of .* is invalid"),
        (put_box(starts=[0, 2**40]), "ranges of .* are incomplete"),
        (put_box(pieces=[0, 2**40]), "its records are incomplete|ranges of"),
        (put_box(pieces=[0, 1]), "pieces|ranges of"),
        (lambda header: header.update(piece_nbytes=2**40), "pieces, but"),
        (lambda header: header.update(piece_nbytes=-1), "pieces are missing"),
        (lambda header: header.update(piece_nbytes=1), "by zero|pieces are missing"),
        (lambda header: header.update(groups=header["groups"][:-1]), "'"),
    ],
)
def test_its_values_are_checked(
    change: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "ckpt")
    rewrite(path, lambda header: None)
    with mock.patch.object(metadata, "read_metadata", side_effect=AssertionError("read")):
        assert loaded_version(path) == 3
    rewrite(path, change)
    model, optimizer = model_of(0)
    with pytest.raises(CheckpointError, match=f"{LAYOUT}: damaged.*({reason})"):
        checkpoint.load(model, optimizer, path)
    assert all((param == 0).all() for param in model.parameters())


def test_a_load_asks_for_the_same_records_however_many_there_are(tmp_path: Path) -> None:
    def asked(nbytes: int) -> int:
        model = nn.Linear(64, 64, bias=False)
        with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", nbytes):
            checkpoint.save(model, None, tmp_path / str(nbytes))
        found = read_checkpoint(tmp_path / str(nbytes)).entries["model.weight"]
        assert isinstance(found, TensorEntry) and len(found.chunks) >= 64 * 64 * 4 // nbytes
        with mock.patch.object(
            layout_file._Layout, "record", autospec=True, side_effect=layout_file._Layout.record
        ) as one:
            (chunk,) = found.find(((10, 0), (1, 4)))
        assert chunk.offsets[0] <= 10 < chunk.offsets[0] + chunk.sizes[0]
        return one.call_count

    assert asked(256) == asked(1024) == 1
