"""python -m fsdp_c.checkpoint export: the model only, as sharded safetensors, or an error and no files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli
from fsdp_c.checkpoint.export import export
from tests.checkpoints import flipped
from tests.processes import ROOT, output_of_python
from tests.training import assert_same

library = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """An embedding tied to the head, a channels_last weight, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.infinite = nn.Parameter(torch.tensor([float("inf"), -float("inf")]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(param.sum() for param in model.parameters()).backward()
    optimizer.step()
    checkpoint.save(model, optimizer, tmp_path / "ckpt", extra={"step": 3, "tensor": torch.ones(2)})
    return tmp_path / "ckpt"


def run(*args: Any, status: int = 0) -> None:
    assert cli.main(["export", *map(str, args)]) == status


def loaded(folder: Path) -> dict[str, Tensor]:
    """Load a folder as transformers does: its single file, or the files in its index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        return library.load_file(folder / "model.safetensors")
    listed = json.loads(index.read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == {*listed.values()}
    found = {}
    for name, file in listed.items():
        with library.safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found[name] = opened.get_tensor(name)
    return found


def state_of(path: Path) -> dict[str, Tensor]:
    """Load the checkpoint and return the model's state dict."""
    model = Tied()
    checkpoint.load(model, None, path)
    return model.state_dict()


def test_the_model_is_exported_alone_with_tied_weights_under_each_name(
    saved: Path, tmp_path: Path, capsys
) -> None:
    run(saved, tmp_path / "out")
    found = loaded(tmp_path / "out")
    assert_same(found, state_of(saved))
    Tied().load_state_dict(found, strict=True)
    others = len(cli.open_checkpoint(saved).entries) - len(found)
    assert f"{len(found)} tensors in 1 files; left out: {others} other entries" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_casts_floating_point_tensors(dtype: str, saved: Path, tmp_path: Path) -> None:
    run(saved, tmp_path / "out", "--dtype", dtype)
    expected = {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value
        for name, value in state_of(saved).items()
    }
    assert expected["norm.num_batches_tracked"].dtype == torch.int64
    assert_same(loaded(tmp_path / "out"), expected)


def test_large_models_are_divided_into_files_by_size(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(cli.open_checkpoint(saved), out, max_nbytes=300)[1] == 3
    assert_same(loaded(out), state_of(saved))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state_of(saved).values())
    assert sorted({*index["weight_map"].values()}) == [
        f"model-0000{at}-of-00003.safetensors" for at in range(1, 4)
    ]
    found = {name: torch.zeros_like(value) for name, value in state_of(saved).items() if value.dim()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(out)), no_dist=True)
    assert_same(found, {name: value for name, value in state_of(saved).items() if value.dim()})


def test_every_dtype_is_the_librarys_and_aligned(tmp_path: Path) -> None:
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.uint16,
    ]
    tensors = {f"t.{at}": torch.tensor([[1, 0, 1]]).to(dtype) for at, dtype in enumerate(dtypes)}
    tensors["empty"] = torch.zeros(0, 2)
    dcp.save(tensors, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    run(tmp_path / "ckpt", tmp_path / "out", "--model-key", "")
    found = loaded(tmp_path / "out")
    assert sorted(found) == sorted(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].tolist() == value.tolist(), name
        assert found[name].data_ptr() % value.itemsize == 0, name


@pytest.mark.parametrize(
    ("state", "flags", "reason"),
    [
        (
            {"model": {"a": torch.ones(1, dtype=torch.complex128)}},
            [],
            r"model\.a of torch\.complex128 cannot be written",
        ),
        (
            {"model": {"a": torch.tensor([1e6, 1.0])}},
            ["--dtype", "float16"],
            r"model\.a has values beyond the range of",
        ),
        (
            {"model": {"unit._flat_param": torch.ones(4)}},
            [],
            r"_flat_param is a flat parameter of LOCAL_STATE_DICT",
        ),
        (
            {"net": {"a": torch.ones(1)}},
            [],
            "has no tensors below 'model', but net. Pass another --model-key",
        ),
        ({"model": {"a": "text"}}, [], "has no tensors below 'model', but model"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    state: Any, flags: list[str], reason: str, tmp_path: Path, capsys
) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    run(tmp_path / "ckpt", tmp_path / "out", *flags, status=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'ckpt'}: ")
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(line)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(saved: Path, tmp_path: Path, capsys) -> None:
    (file,) = saved.rglob("*.distcp")
    flipped(file, file.read_bytes().index(state_of(saved)["norm.weight"].numpy().tobytes()))
    run(saved, tmp_path / "runs" / "out", status=2)
    assert f"error: {file}: the data of model.norm.weight are damaged" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_leaves_nothing_and_what_a_killed_export_left_is_named(
    saved: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "runs" / "out"
    full_disk = OSError(28, "No space left on device")
    with mock.patch("fsdp_c.checkpoint.export.sync_folder", side_effect=full_disk):
        run(saved, out, status=2)
    assert list(out.parent.iterdir()) == []
    left = out.with_name(".out.exporting")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    run(saved, out, status=2)
    assert f"error: {left}: exists already: another export" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == [left.name] and [*left.iterdir()]


def test_what_exists_stays(saved: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        run(saved, tmp_path / name, status=2)
        assert f"error: {tmp_path / name}: exists already. Export to another path" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder").iterdir()) == []


def test_an_export_reads_what_it_opened_whatever_takes_its_place(saved: Path, tmp_path: Path) -> None:
    expected, opened = state_of(saved), cli.open_checkpoint(saved)
    model = Tied()
    nn.init.zeros_(model.embedding.weight)
    checkpoint.save(model, None, saved)
    export(opened, tmp_path / "out")
    assert_same(loaded(tmp_path / "out"), expected)


MEMORY = """
import sys
from pathlib import Path
from fsdp_c.checkpoint import cli

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
assert cli.main(["export", *sys.argv[1:], "--dtype", "bfloat16"]) == 0
print("peak", peak() - before)
"""


def test_memory_is_that_of_the_largest_tensor_whatever_the_total(tmp_path: Path) -> None:
    numel, count = 2**22, 8
    model = nn.ParameterList(nn.Parameter(torch.full((numel,), float(at))) for at in range(count))
    checkpoint.save(model, None, tmp_path / "ckpt")
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MALLOC_TRIM_THRESHOLD_": "100000"}
    said = output_of_python("-c", MEMORY, tmp_path / "ckpt", tmp_path / "out", **settings)
    peak = float(said.split("peak ")[1]) / (4 * numel)
    assert 0.5 < peak < 2, f"{peak} tensors of {count}"
