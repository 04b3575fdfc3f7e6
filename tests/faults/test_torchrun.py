"""Ranks that die or stop under torchrun. The other ranks end by themselves and report their progress, and
torchrun continues from the last intact checkpoint to the losses of an undisturbed run.

One of the ten faults is tried; all are with pytest --exhaustive.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_c import checkpoint
from tests.checkpoints import differences
from tests.faults import faulty_lm
from tests.faults.faulty_lm import LAYERS, ROOT, TIMEOUT, train_lm
from tests.ranks import pool
from tests.settings import EXHAUSTIVE

pytestmark = pytest.mark.slow

PHASES = ("forward", "backward", "reduce", "save", "load")
TRIED = [("kill", "reduce")]
if EXHAUSTIVE:
    TRIED = [(action, phase) for phase in PHASES for action in ("kill", "stop")]
MARGIN_S = 60.0  # time for a survivor to end, on top of the process group's timeout
FLAGS = f"--layers {LAYERS} --width 16 --heads 2 --context 16 --accumulate 1 --sample-bytes 1 --steps 6 "
FLAGS += "--warmup 1 --eval-every 6 --eval-batches 1 --checkpoint-every 2 --keep 3"
ARGUMENTS = [*FLAGS.split(), "--data", f"{ROOT}/LICENSE"]

FIRST, LAST = "blocks.0", f"blocks.{LAYERS - 1}"
SURVIVOR = {  # text of a survivor's error
    "forward": f"rank 0, step 3: .* waits in the all-gather of Block at '{LAST}'",
    "backward": "rank 0, step 3: .* waits in the (reduction|all-gather for the backward) of Block at 'blocks",
    "reduce": f"rank 0, step 3: .* waits in the reduction of Block at '{FIRST}'",
    "save": r"rank 0: .* is saving /.+/step-000004",
    "load": r"rank 0: .* is loading /.+/step-000002",
}


def train_undisturbed(rank: int, world_size: int, out: Path) -> None:
    args = train_lm.parse_arguments([*ARGUMENTS, "--out", str(out)])
    ranks = train_lm.Ranks(rank, world_size, torch.device("cpu"))
    train_lm.Trainer("fsdp_c", args, ranks, train_lm.prepare(args, ranks)[0]).train(out)
    dist.barrier()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without a fault."""
    out = tmp_path_factory.mktemp("undisturbed")
    pool(2, "faults").run(train_undisturbed.__module__, train_undisturbed.__name__, {"out": out})
    return out


def launch(action: str, phase: str, folder: Path) -> subprocess.Popen[str]:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1".split()
    script = [faulty_lm.__file__, action, phase, str(folder)]
    flags = [*ARGUMENTS, "--out", str(folder / "run"), "--resume", "auto"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # otherwise a new rank may connect to the address of a dead one
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, *launcher, *script, *flags]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Any, torchrun: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < deadline and torchrun.poll() is None, what
        time.sleep(0.05)


def seconds_to_the_end(torchrun: subprocess.Popen[str], folder: Path) -> float:
    """Return the seconds from the fault to the survivor's end."""
    fault = folder / "fault"
    wait_for(fault.exists, torchrun, "the fault did not come")
    survivor = int((folder / "pid-0-0").read_text())
    wait_for(lambda: not is_running(survivor), torchrun, "the survivor did not end")
    return time.time() - float(fault.read_text())


def assert_same_end(one: Path, other: Path) -> None:
    """Assert that parameters, optimizer state and every loss are bitwise equal."""
    ends = [path / "step-000006" for path in (one, other)]
    losses = [checkpoint.load(torch.nn.Module(), None, end, strict=False)["losses"] for end in ends]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert differences(*ends) == []


@dataclass
class Row:
    """A row of the table of faults."""

    action: str
    phase: str
    ended: float
    said: str
    total: float

    def __str__(self) -> str:
        return f"| {self.action} | {self.phase} | {self.ended:.1f} | {self.said} | {self.total:.0f} |"


def survive(action: str, phase: str, folder: Path) -> tuple[Row, str]:
    """Run torchrun with one fault and return the row and the output of the ranks."""
    started = time.monotonic()
    torchrun = launch(action, phase, folder)
    try:
        ended = seconds_to_the_end(torchrun, folder)
        # a stopped rank ignores SIGTERM, and torchrun sends SIGKILL only after 30 s
        if action == "stop":
            os.kill(int((folder / "pid-0-1").read_text()), signal.SIGKILL)
        torchrun.wait(250)
    finally:
        torchrun.kill()
        torchrun.wait()
    output = (folder / "output").read_text()
    assert torchrun.returncode == 0, output[-4000:]
    said = re.search(r"\[rank0\]: (rank 0.*)", output)
    assert said, output[-4000:]
    return Row(action, phase, ended, said[1], time.monotonic() - started), output


@pytest.mark.timeout(800)
@pytest.mark.parametrize(("action", "phase"), TRIED)
def test_a_survivor_says_what_it_waits_for_and_the_restarted_run_ends_as_if_undisturbed(
    action: str, phase: str, undisturbed: Path, tmp_path: Path
) -> None:
    if phase == "load":
        shutil.copytree(undisturbed / "step-000002", tmp_path / "run" / "step-000002")
        (tmp_path / "run" / train_lm.RUN_FILE).touch()
    row, output = survive(action, phase, tmp_path)
    print(row)
    assert re.search(SURVIVOR[phase], row.said), row.said
    assert row.ended < (TIMEOUT.total_seconds() if action == "stop" else 0) + MARGIN_S
    resumed = f"resumed from {tmp_path / 'run' / 'step-000002'}: 2 of 6 steps done" in output
    # otherwise the save that overlaps with step 3 may not have finished
    assert resumed or phase not in ("save", "load")
    assert_same_end(undisturbed, tmp_path / "run")
