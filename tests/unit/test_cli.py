"""python -m fsdp_c: unmodified scripts, and invalid arguments."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp_c
from fsdp_c import cli
from fsdp_c.compat import installation, upstream
from fsdp_c.sharding import flattening
from fsdp_c.tools import environment
from tests.processes import ROOT, run_python

pytestmark = pytest.mark.usefixtures("units_left_by_others_unseen")


def call(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "fsdp_c", *arguments, cwd=cwd, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a command or a script"),
        (["nowhere.py", "--lr", "1"], "'nowhere.py' is neither a command .* nor a file"),
        (["."], "'.' is neither a command"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["run"], "name a SCRIPT, or -m MODULE"),
        (["run", "--fast", "train.py"], "unrecognized arguments: --fast"),
        (["run", "nowhere.py"], "no script 'nowhere.py' to run"),
        (["run", "-m", "nowhere.at_all"], "no module 'nowhere.at_all' to run"),
        (["run", "-m"], "expected one argument"),
        (["--split-frozen"], "name a SCRIPT, or -m MODULE"),
        (["--split-frozen", "selftest"], "no script 'selftest' to run"),
    ],
)
def test_bad_arguments_end_with_their_reason_and_status_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert re.match(f"python -m fsdp_c[ a-z]*: error: .*{reason}", capsys.readouterr().err.splitlines()[-1])
    assert not installation.is_installed()


def test_help_names_the_ways_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert "torchrun --nproc-per-node 8 -m fsdp_c train.py" in capsys.readouterr().out


SPAWNING = """\
import sys
from helper import NAME
import torch, torch.multiprocessing as mp
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

def shown():
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    return f"{len(model.params)} of {type(model).__module__}"

def child(index):
    print("child", shown(), flush=True)

if __name__ == "__main__":
    print(sys.argv, shown(), flush=True)
    mp.spawn(child, nprocs=1)
    sys.exit(3)
"""


@pytest.mark.parametrize("split", [pytest.param(True, marks=pytest.mark.slow), False])
def test_script_keeps_its_flags_and_status_and_the_processes_it_spawns_train_with_us(
    tmp_path: Path, split: bool
) -> None:
    """--split-frozen before the script's name keeps frozen parameters apart. After it, it is the script's own."""
    (tmp_path / "script.py").write_text(SPAWNING)
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'\n")
    folder, flag = (tmp_path, "--split-frozen") if split else (tmp_path.parent, "--split-frozen")
    script = str((tmp_path / "script.py").relative_to(folder))
    own = ["--help", "-m", "x", *([] if split else [flag])]
    done = call(*([flag] if split else []), script, *own, cwd=folder)
    assert done.returncode == 3, done.stderr
    expected = f"{2 if split else 1} of fsdp_c.fully_sharded_data_parallel"
    assert done.stdout.splitlines() == [f"{[script, *own]} {expected}", f"child {expected}"]


FAILING = "import sys\nprint(__name__, __package__, sys.argv)\nimport nowhere\n"


def test_module_is_run_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module runs in this process and its exceptions propagate, here a ModuleNotFoundError of another name."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(flattening, "splits_by_default", False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
            cli.main(["run", "--split-frozen", "-m", "package.train", "--lr", "1"])
        assert installation.is_installed() and flattening.splits_frozen()
    finally:
        installation.uninstall()
        sys.modules.pop("package", None)
    assert capsys.readouterr().out.strip() == f"__main__ package ['{tmp_path}/package/train.py', '--lr', '1']"


def test_env_lists_versions_and_devices_for_a_bug_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert torch.__version__ in facts["torch"] and platform.python_version() in facts["Python"]
    assert {"fsdp_c", "CUDA of torch", "NCCL", "OS", "C compiler", "nvcc"} <= set(facts)
    assert facts["CPU kernels"].endswith("default; in use") and facts["CUDA kernels"]


def test_env_gives_the_reason_for_missing_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environment._C, "why_no_kernels", lambda device_type: f"no library for {device_type}")
    monkeypatch.setattr(upstream, "HAS_FSDP1", False)
    monkeypatch.setattr(upstream, "WHY_NO_FSDP1", "No module named 'x'")
    text = environment.report()
    assert "C compiler:     not found" in text and "nvcc:           not found" in text
    assert "CUDA kernels:   built: " in text and "; no library for cuda" in text
    assert "torch's FSDP1:  missing (No module named 'x')" in text


def test_import_from_an_unbuilt_checkout_names_make_build(tmp_path: Path) -> None:
    """Such a checkout hides an installed fsdp_c if Python is started in it."""
    package = Path(fsdp_c.__path__[0])
    shutil.copytree(package, tmp_path / "fsdp_c", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); import fsdp_c"
    )
    result = run_python("-c", program)
    assert (
        f"fsdp_c is imported from {tmp_path}/fsdp_c, where its extension module is not built: run"
        in result.stderr
    )


def test_submodules_are_there_without_an_import_of_their_own() -> None:
    program = "import fsdp_c; fsdp_c.checkpoint.save, fsdp_c.optim.WholeParameters, fsdp_c.nothing"
    result = run_python("-c", program)
    assert result.stderr.splitlines()[-1] == "AttributeError: module 'fsdp_c' has no attribute 'nothing'"
