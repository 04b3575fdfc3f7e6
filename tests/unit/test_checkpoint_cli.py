"""python -m fsdp_c.checkpoint: every format into every other, differences, errors, and memory of one
tensor."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from fsdp_c.checkpoint.formats import open_source
from tests.processes import output_of_python

ROOT = Path(__file__).resolve().parents[2]


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    (model[1](model[0](torch.randn(4, 7))).square().sum() + model[2].weight.square().sum()).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "ckpt"
    checkpoint.save(*trained(), path, extra={"step": 3, "list": [1, torch.ones(2)], "pair": (1, "x")})
    return path


def run(*args: Any, status: int = 0) -> None:
    assert cli.main([str(arg) for arg in args]) == status


def contents(path: Path) -> dict[str, Any]:
    source = open_source(path)
    return {key: source.read(key) for key in source.entries}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert sorted(left) == sorted(right)
    for key, value in left.items():
        if isinstance(value, Tensor):
            assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


# ----------------------------------------------------------------- convert


def test_to_torch_gives_the_nested_dict_that_torch_load_reads(saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "full.pt")
    loaded = torch.load(tmp_path / "full.pt", weights_only=True)
    model, optimizer = trained(seed=1)
    expected, expected_optimizer = trained()
    model.load_state_dict(loaded["model"])
    assert_same(model.state_dict(), expected.state_dict())
    assert loaded["extra"]["step"] == 3 and loaded["extra"]["pair"] == (1, "x")
    assert loaded["extra"]["list"][0] == 1 and loaded["extra"]["list"][1].tolist() == [1, 1]
    state = loaded["optim"]["state"]["0.weight"]
    assert torch.equal(state["exp_avg"], expected_optimizer.state[expected[0].weight]["exp_avg"])
    assert loaded["optim"]["param_groups"][0]["lr"] == 1e-3
    assert torch.equal(torch.load(tmp_path / "full.pt", mmap=True)["model"]["0.bias"], expected[0].bias)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_there_and_back_is_the_same_for_any_number_of_ranks(saved: Path, ranks: int, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "full.pt")
    run("convert", tmp_path / "full.pt", tmp_path / "again", "--ranks", ranks)
    assert_same(contents(saved), contents(tmp_path / "again"))
    assert len(list((tmp_path / "again").glob("*.distcp"))) == ranks
    run("diff", saved, tmp_path / "again")
    run("verify", tmp_path / "again")
    model, optimizer = trained(seed=1)
    assert checkpoint.load(model, optimizer, tmp_path / "again")["step"] == 3
    assert_same(model.state_dict(), trained()[0].state_dict())


def test_torchs_own_reader_reads_what_was_converted(saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "again", "--ranks", 3)
    model, _ = trained(seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "again", no_dist=True)
    model.load_state_dict(state["model"])
    assert_same(model.state_dict(), trained()[0].state_dict())


def test_names_stay_whatever_paths_a_strangers_metadata_give_them(tmp_path: Path) -> None:
    dcp.save({"a": {"b": torch.ones(3)}, "c": torch.zeros(2)}, checkpoint_id=tmp_path / "theirs")
    metadata = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    metadata.planner_data = {"a.b": ("x",), "c": ("x",)}
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))
    run("convert", tmp_path / "theirs", tmp_path / "ours")
    found = {"a.b": torch.zeros(3), "c": torch.ones(2)}
    dcp.load(found, checkpoint_id=tmp_path / "ours")
    assert found["a.b"].tolist() == [1] * 3 and found["c"].tolist() == [0] * 2


def test_torchs_own_converter_and_ours_agree(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    model, _ = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    dcp_to_torch_save(tmp_path / "torch", tmp_path / "theirs.pt")
    run("convert", tmp_path / "torch", tmp_path / "ours.pt")
    run("diff", tmp_path / "theirs.pt", tmp_path / "ours.pt")
    torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "back")
    run("diff", tmp_path / "ours.pt", tmp_path / "back")
    run("verify", tmp_path / "back")


def test_safetensors_hold_the_model_and_what_is_left_out_is_said(saved: Path, tmp_path: Path, capsys) -> None:
    run("convert", saved, tmp_path / "model.safetensors")
    assert "entries not below 'model'" in capsys.readouterr().err
    assert_same(contents(tmp_path / "model.safetensors"), trained()[0].state_dict())
    run("convert", tmp_path / "model.safetensors", tmp_path / "again", "--ranks", 2)
    model, _ = trained(seed=1)
    checkpoint.load(model, None, tmp_path / "again")
    assert_same(model.state_dict(), trained()[0].state_dict())
    run("diff", saved, tmp_path / "model.safetensors", "--select", "model")


def test_safetensors_are_those_of_the_library(saved: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    run("convert", saved, tmp_path / "model.safetensors")
    assert_same(library.load_file(tmp_path / "model.safetensors"), trained()[0].state_dict())
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.uint16,
    ]
    tensors = {str(dtype): torch.tensor([[1, 0, 1]]).to(dtype) for dtype in dtypes} | {
        "empty": torch.zeros(0, 2)
    }
    library.save_file(tensors, tmp_path / "theirs.safetensors")
    for key, value in contents(tmp_path / "theirs.safetensors").items():
        assert value.dtype == tensors[key].dtype and value.tolist() == tensors[key].tolist()
    run("convert", tmp_path / "theirs.safetensors", tmp_path / "again.safetensors")
    assert library.load_file(tmp_path / "again.safetensors").keys() == tensors.keys()


def test_a_folder_of_dcps_hugging_face_writer_is_read_and_its_reader_reads_ours(
    saved: Path, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    state = {name: value.contiguous() for name, value in trained()[0].state_dict().items() if value.dim()}
    writer = dcp.HuggingFaceStorageWriter(
        path=str(tmp_path / "hf"), fqn_to_index_mapping=dict.fromkeys(state, 1)
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_same(contents(tmp_path / "hf"), state)
    (tmp_path / "ours").mkdir()
    run("convert", tmp_path / "hf", tmp_path / "ours" / "model.safetensors")
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path / "ours")), no_dist=True)
    assert_same(loaded, state)


def test_parts_of_tensors_in_several_safetensors_files_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    for index, rows in enumerate((whole[:1], whole[1:])):
        info = {"weight": {"saved_offsets": [index, 0]}}
        header = {
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)},
            "weight": {"dtype": "F32", "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]},
        }
        content = json.dumps(header).encode()
        data = len(content).to_bytes(8, "little") + content + rows.contiguous().numpy().tobytes()
        (tmp_path / f"shard-{index}.safetensors").write_bytes(data)
    assert torch.equal(contents(tmp_path)["weight"], whole)
    (tmp_path / "shard-0.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="do not make one tensor"):
        contents(tmp_path)


def hugging_face(folder: Path, kind: str) -> dict[str, str]:
    """A folder of three files with an index; which file has which tensor."""
    stem, suffix = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[kind]
    folder.mkdir()
    files = {f"l{i}.w": f"{stem}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)}
    for i, (key, name) in enumerate(files.items()):
        torch.save({key: torch.full((2,), float(i))}, folder / "one.pt")
        if kind == "safetensors":
            run("convert", folder / "one.pt", folder / name)
            (folder / "one.pt").unlink()
        else:
            (folder / "one.pt").rename(folder / name)
    write_index(folder, kind, files)
    return files


def write_index(folder: Path, kind: str, files: Any) -> Path:
    name = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[kind]
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": files}))
    return folder / name


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_hugging_face_folder_is_held_to_its_index(kind: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "hf"
    files = hugging_face(folder, kind)
    run("verify", folder)
    expected = {key: torch.full((2,), float(i)) for i, key in enumerate(files)}
    assert_same(contents(folder), expected)
    for name in ("training_args.bin", "optimizer.pt", "consolidated.safetensors"):
        (folder / name).write_bytes(b"no tensors")  # which the index does not name
    if kind == "bin":
        (folder / "consolidated.safetensors").unlink()
    capsys.readouterr()
    run("verify", folder)
    left_out = {"safetensors": "consolidated.safetensors", "bin": "training_args.bin"}[kind]
    assert f"index.json (left out: {left_out})" in capsys.readouterr().out
    assert_same(contents(folder), expected)

    last = folder / files["l3.w"]
    torch.save({"l4.w": torch.ones(2)}, folder / "other")
    cases = [
        ({**files, "l4.w": last.name}, f"{last}: l4.w is missing, which"),
        (
            {key: name for key, name in files.items() if key != "l3.w"} | {"l9.w": last.name},
            f"{last}: l9.w is missing",
        ),
        ({**files, "l1.w": last.name, "x": files["l1.w"]}, f"{last}: l1.w is missing"),
        ({**files, "l4.w": "nowhere." + kind}, f"{folder / ('nowhere.' + kind)}: missing: "),
        ({**files, "l4.w": "../" + last.name}, "leads out of the folder"),
        ({**files, "l4.w": 4}, "damaged"),
        ([], "damaged"),
    ]
    for listed, message in cases:
        write_index(folder, kind, listed)
        for command in (["inspect", folder], ["verify", folder], ["convert", folder, tmp_path / "out"]):
            run(*command, status=2)
            assert message in capsys.readouterr().err, (listed, command)
    write_index(folder, kind, files)
    (folder / files["l2.w"]).unlink()
    for command in (["inspect", folder], ["verify", folder], ["convert", folder, tmp_path / "out"]):
        run(*command, status=2)
        assert f"{folder / files['l2.w']}: missing: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_file_with_tensors_that_the_index_does_not_name_is_refused(
    kind: str, tmp_path: Path, capsys
) -> None:
    files = hugging_face(tmp_path / "hf", kind)
    torch.save({"l3.w": torch.ones(2), "l4.w": torch.ones(2)}, tmp_path / "more.pt")
    run("convert", tmp_path / "more.pt", tmp_path / f"more.{kind}")
    last = tmp_path / "hf" / files["l3.w"]
    (tmp_path / f"more.{kind}").rename(last)
    run("verify", tmp_path / "hf", status=2)
    assert f"{last}: holds l4.w, which " in capsys.readouterr().err


def test_a_folder_with_two_indices_is_ambiguous(tmp_path: Path, capsys) -> None:
    hugging_face(tmp_path / "hf", "safetensors")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.with_name("model.fp16.safetensors.index.json").write_bytes(index.read_bytes())
    run("inspect", tmp_path / "hf", status=2)
    assert "are both there" in capsys.readouterr().err


def test_dtype_casts_floating_tensors_but_for_single_numbers(saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "half", "--dtype", "bfloat16")
    entries = open_source(tmp_path / "half").entries
    assert entries["model.0.weight"].dtype == entries["optim.state.0.weight.exp_avg"].dtype == torch.bfloat16
    assert entries["optim.state.0.weight.step"].dtype == torch.float32
    assert entries["model.1.num_batches_tracked"].dtype == torch.int64
    value = contents(tmp_path / "half")["model.0.weight"]
    assert torch.equal(value, trained()[0][0].weight.bfloat16())


def test_select_and_under_change_names(saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "model.pt", "--select", "model")
    trained(seed=1)[0].load_state_dict(torch.load(tmp_path / "model.pt"))
    run("convert", tmp_path / "model.pt", tmp_path / "again", "--under", "model")
    checkpoint.load(trained(seed=1)[0], None, tmp_path / "again")
    run("convert", saved, tmp_path / "state.pt", "--select", "optim.state")
    assert "exp_avg" in torch.load(tmp_path / "state.pt")["0.weight"]


def test_an_existing_target_stays_unless_overwrite_is_said(saved: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "full.pt").write_text("mine")
    run("convert", saved, tmp_path / "full.pt", status=2)
    assert "exists; choose another name, or --overwrite" in capsys.readouterr().err
    assert (tmp_path / "full.pt").read_text() == "mine"
    run("convert", saved, tmp_path / "full.pt", "--overwrite")
    run("diff", saved, tmp_path / "full.pt")
    run("convert", tmp_path / "full.pt", tmp_path / "again")
    run("convert", tmp_path / "full.pt", tmp_path / "again", "--overwrite", "--ranks", 2)
    run("diff", saved, tmp_path / "again")


def test_a_failed_conversion_leaves_nothing(saved: Path, tmp_path: Path, capsys) -> None:
    work = tmp_path / "work"
    run("convert", saved, work)
    file = next(work.glob("*.distcp"))
    os.truncate(file, file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[content.index(trained()[0][0].weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(content)
    for target in ("full.pt", "model.safetensors", "again"):
        run("convert", work, tmp_path / "out" / target, status=2)
        assert "__0_0.distcp: the data of model.0.weight are damaged" in capsys.readouterr().err
        assert list((tmp_path / "out").iterdir()) == []


# ----------------------------------------------------------------- inspect, verify, diff


def test_inspect_lists_names_shapes_dtypes_and_values(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("inspect", saved)
    shown = capsys.readouterr().out
    assert "written by fsdp_c, with checksums" in shown
    assert any(line.split() == ["model.0.weight", "float32", "[5,", "7]"] for line in shown.splitlines())
    run("inspect", saved, "--select", "extra", "--values")
    assert "extra.step    3" in capsys.readouterr().out
    run("inspect", saved, "--json")
    assert json.loads(capsys.readouterr().out)["entries"]["model.0.bias"] == {
        "dtype": "float32",
        "shape": [5],
    }


def test_a_storage_is_a_value_and_no_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"tensor": torch.ones(2), "storage": torch.ones(3)._typed_storage()}, tmp_path / "one.pt")
    assert cli.main(["inspect", str(tmp_path / "one.pt"), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert entries == {"tensor": {"dtype": "float32", "shape": [2]}, "storage": {}}


def test_verify_says_what_is_damaged(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("verify", saved)
    assert "no problems" in capsys.readouterr().out
    run("convert", saved, tmp_path / "full.pt")
    run("verify", tmp_path / "full.pt")
    content = bytearray((tmp_path / "full.pt").read_bytes())
    content[content.index(trained()[0][0].weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "full.pt").write_bytes(content)
    capsys.readouterr()
    run("verify", tmp_path / "full.pt", status=1)
    assert "is damaged: its checksum does not match" in capsys.readouterr().out


def test_diff_tells_values_shapes_dtypes_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"same": torch.tensor([1.0, float("nan")]), "a": torch.zeros(4), "b": torch.zeros(2, 3), "n": 1}
    other = {
        "same": base["same"].clone(),
        "a": torch.tensor([0, 0.25, 0, -0.5]),
        "b": torch.zeros(3, 2),
        "n": 2,
    }
    torch.save(base | {"left": torch.ones(1), "d": torch.ones(2)}, tmp_path / "1.pt")
    torch.save(other | {"d": torch.ones(2).half()}, tmp_path / "2.pt")
    run("diff", tmp_path / "1.pt", tmp_path / "1.pt")
    assert capsys.readouterr().out == ""
    run("diff", tmp_path / "1.pt", tmp_path / "2.pt", status=1)
    assert capsys.readouterr().out.splitlines() == [
        "a: 2 of 4 elements differ, by at most 0.5",
        "b: shape [2, 3] and [3, 2]",
        "d: dtype float32 and float16",
        f"left: only in {tmp_path / '1.pt'}",
        "n: 1 and 2",
    ]
    torch.save({"a": torch.zeros(4)}, tmp_path / "3.pt")
    torch.save({"a": other["a"]}, tmp_path / "4.pt")
    run("diff", tmp_path / "3.pt", tmp_path / "4.pt", "--tolerance", "0.5")
    run("diff", tmp_path / "3.pt", tmp_path / "4.pt", "--tolerance", "0.4", status=1)
    torch.save({"a": torch.full((4,), float("nan"))}, tmp_path / "5.pt")
    run("diff", tmp_path / "3.pt", tmp_path / "5.pt", "--tolerance", "1e9", status=1)
    large = torch.tensor([2**62])
    torch.save({"a": large}, tmp_path / "6.pt")
    torch.save({"a": large + 1}, tmp_path / "7.pt")
    run("diff", tmp_path / "6.pt", tmp_path / "7.pt", status=1)


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "nowhere"], "nowhere: no such checkpoint"),
        (["inspect", "."], ".pt: not a file of torch.save"),
        (["inspect", "empty"], "empty: not a checkpoint: it has no .metadata file"),
        (["inspect", "{saved}/.metadata"], "name the folder"),
        (
            ["inspect", "{saved}", "--select", "weights"],
            "nothing is named weights; there is extra, model, optim",
        ),
        (["inspect", "text.pt"], "text.pt: cannot be read"),
        (["inspect", "list.pt"], "holds list, not a state dict"),
        (["convert", "{saved}", "x.pt", "--ranks", "2"], "a torch file is one file"),
        (["convert", "{saved}", "x.safetensors", "--select", "optim.param_groups"], None),
        (["convert", "{saved}", "complex.safetensors", "--select", "nothing.at.all"], "nothing is named"),
        (
            ["convert", "complex.pt", "x.safetensors"],
            "a is torch.complex128, which safetensors do not hold: use --dtype",
        ),
        (["convert", "{saved}", "list.pt/x", "--to", "dcp"], "list.pt"),
        (["diff", "{saved}", "nowhere"], "nowhere: no such checkpoint"),
        (["verify", "nowhere"], "no such checkpoint"),
    ],
)
def test_trouble_is_one_line_and_status_2(args, message, saved, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.pt").write_text("hello")
    torch.save([1], "list.pt")
    torch.save({"a": torch.ones(1, dtype=torch.complex128)}, "complex.pt")
    run(*[arg.format(saved=saved) for arg in args], status=2 if message else 0)
    error = capsys.readouterr().err
    if message:
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "required: COMMAND"),
        (["explode"], "invalid choice: 'explode'"),
        (["convert", "a"], "required: TARGET"),
        (["convert", "a", "b", "--ranks", "0"], "0 is not between 1 and"),
        (["convert", "a", "b", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["convert", "a", "b", "--to", "tar"], "invalid choice: 'tar'"),
        (["diff", "a", "b", "--tolerance", "-1"], "-1 is not a positive number"),
    ],
)
def test_bad_arguments_are_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_files_of_several_full_state_dicts_are_not_mixed(tmp_path: Path, capsys) -> None:
    for step in (1, 2):
        torch.save({"a": torch.full((2,), float(step))}, tmp_path / f"step{step}.pt")
    run("inspect", tmp_path, status=2)
    assert "2 files with state dicts that are not sharded; name one of them" in capsys.readouterr().err
    torch.save({"b": torch.ones(3)}, tmp_path / "step2.pt")
    assert_same(contents(tmp_path), {"a": torch.ones(2), "b": torch.ones(3)})


def test_the_module_runs(saved: Path) -> None:
    assert output_of_python("-m", "fsdp_c.checkpoint", "diff", saved, saved, cwd=ROOT) == ""
    said = output_of_python("-m", "fsdp_c.checkpoint", "--help", cwd=ROOT)
    assert "convert" in said and "Exit status" in said


# ----------------------------------------------------------------- memory

MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from fsdp_c.checkpoint import cli

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

folder, tensors, nbytes = Path(sys.argv[1]), 10, 16 * 2**20
torch.save({f"t{i}": torch.full((nbytes // 4,), float(i)) for i in range(tensors)}, folder / "full.pt")
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
torch.ones(10).sum()
before = anonymous()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
commands = ["convert full.pt dcp --ranks 3", "verify dcp", "convert dcp one.pt", "convert one.pt m.safetensors",
            "convert m.safetensors cast.dcp --dtype bfloat16", "diff dcp m.safetensors"]
for command in commands:
    args = [str(folder / word) if "." in word or word == "dcp" else word for word in command.split()]
    assert cli.main(args) == 0, args
done = True
thread.join()
print("peak", (peak - before) / nbytes)
"""


@pytest.mark.timeout(650)
def test_memory_is_a_few_times_the_largest_tensor_whatever_the_total(tmp_path: Path) -> None:
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MALLOC_TRIM_THRESHOLD_": "100000"}
    peak = float(output_of_python("-c", MEMORY, tmp_path, **settings).split("peak ")[1])
    assert 0.5 < peak < 4.5, f"{peak} tensors of 10"
