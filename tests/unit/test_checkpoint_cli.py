"""python -m fsdp_c.checkpoint: verify, its errors, and torch's own converters on the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_c import checkpoint
from fsdp_c.checkpoint import cli
from tests.checkpoints import differences, flipped, trained
from tests.processes import ROOT, output_of_python


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    checkpoint.save(*trained(), path, extra={"step": 3, "list": [1, torch.ones(2)], "pair": (1, "x")})
    return path


def run(*args: Any, status: int = 0) -> None:
    assert cli.main([str(arg) for arg in args]) == status


def test_verify_says_what_is_damaged(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("verify", saved)
    assert "written by fsdp_c, with checksums: " in capsys.readouterr().out
    (file,) = saved.rglob("*.distcp")
    flipped(file, file.read_bytes().index(trained()[0][0].weight.detach().numpy().tobytes()))
    run("verify", saved, status=1)
    damaged, summary = capsys.readouterr().out.splitlines()
    assert damaged == f"{file}: the data of model.0.weight are damaged: their checksum does not match"
    assert summary.endswith(": 1 problems")


@pytest.mark.slow
def test_torchs_converters_make_one_file_of_a_checkpoint_and_one_of_it(saved: Path, tmp_path: Path) -> None:
    module = "torch.distributed.checkpoint.format_utils"
    output_of_python("-W", "ignore", "-m", module, "dcp_to_torch", saved, tmp_path / "full.pt", cwd=ROOT)
    loaded = torch.load(tmp_path / "full.pt", weights_only=True)
    model, optimizer = trained()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded["model"][name], value), name
    state = loaded["optim"]["state"]["0.weight"]
    assert torch.equal(state["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert loaded["extra"]["step"] == 3 and loaded["extra"]["pair"] == (1, "x")
    output_of_python(
        "-W", "ignore", "-m", module, "torch_to_dcp", tmp_path / "full.pt", tmp_path / "dcp", cwd=ROOT
    )
    run("verify", tmp_path / "dcp")
    other, other_optimizer = trained(seed=1)
    assert checkpoint.load(other, other_optimizer, tmp_path / "dcp")["pair"] == (1, "x")
    checkpoint.save(other, other_optimizer, tmp_path / "again", extra=checkpoint.load(other, None, saved))
    assert differences(saved, tmp_path / "again") == []


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["verify", "nowhere"], "nowhere: no such checkpoint"),
        (["verify", "empty"], "empty: not a checkpoint: it has no .metadata file"),
        (["verify", "full.pt"], "full.pt: is a file, but sharded checkpoints are folders"),
        (["verify", "{saved}/.metadata"], ".metadata: is a file, but sharded checkpoints are folders"),
    ],
)
def test_trouble_is_one_line_and_status_2(args, message, saved, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    torch.save({"a": torch.ones(1)}, "full.pt")
    run(*[arg.format(saved=saved) for arg in args], status=2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_module_runs(saved: Path) -> None:
    assert "no problems" in output_of_python("-m", "fsdp_c.checkpoint", "verify", saved, cwd=ROOT)
    said = output_of_python("-m", "fsdp_c.checkpoint", "--help", cwd=ROOT)
    assert "verify" in said and "Exit status" in said
