"""Which rank is where: the record that FSDP_C_LEDGER makes each rank keep, and what fsdp_c.where makes of
them."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import StateDictType

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint, where
from fsdp_c.state import redistribution
from fsdp_c.tools import flight_recorder, rank_entries
from tests.collectives import ALL_GATHER, REDUCE_SCATTER
from tests.models import WIDTH
from tests.processes import run_python
from tests.ranks import device, on_ranks
from tests.training import sharded


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == flight_recorder._THREAD]


def close() -> None:
    """With the end of the thread, also of one that an earlier test left."""
    flight_recorder.close()
    for thread in watching():
        thread.join(30)


@contextmanager
def flight_records(folder: str) -> Iterator[Path]:
    close()
    with mock.patch.dict(os.environ, {flight_recorder.VARIABLE: folder}):
        try:
            yield Path(folder)
        finally:
            dist.barrier()
            close()


def build() -> FSDP:
    return sharded(net={"blocks": 2})


def places(folder: Path) -> list[str]:
    return [
        flight_recorder.describe([entry._replace(world_size=0)]) for entry in flight_recorder.read(folder)
    ]


@on_ranks(2, label="faults")
def test_a_step_passes_through_the_phases_of_each_unit(rank: int, tmp_path: Path) -> None:
    with flight_records(str(tmp_path)):
        model, seen = build(), []

        def look(*_: object) -> None:
            seen.append(places(tmp_path)[rank].removeprefix(f"rank {rank} "))

        model.module.blocks[1].module.down.register_forward_pre_hook(look)
        model.module.head.register_forward_pre_hook(look)
        model.module.blocks[0].module.up.register_full_backward_hook(look)
        loss = model(torch.randn(3, WIDTH)).sum()
        look()
        loss.backward()
        dist.barrier()
        look()
    expected = [
        "is in the forward of blocks.1 (step 0)",
        "is in the forward of the root (step 0)",
        "is between steps (step 0)",
        "is in the backward of blocks.0 (step 0)",
        "is between steps (step 1)",
    ]
    assert seen == expected


WAITS = {
    "forward": r"all-gather of blocks\.1 \(step 1\)",
    "backward": r"(reduction of blocks\.1|all-gather for the backward of blocks\.0) \(step 1\)",
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@on_ranks(2, label="faults")
def test_the_lagging_rank_and_what_the_others_wait_for_are_named(
    rank: int, tmp_path: Path, direction: str
) -> None:
    told = tmp_path / "told"
    waits = rf"rank 0 waits in the {WAITS[direction]}"

    def lag(*_: object) -> None:
        if rank == 1:
            line = ""
            for _ in range(1500):
                line = flight_recorder.describe(flight_recorder.read(tmp_path))
                if re.search(waits, line):
                    break
                time.sleep(0.02)
            told.write_text(line)

    with flight_records(str(tmp_path)):
        model = build()
        model(torch.randn(3, WIDTH)).sum().backward()
        inner = model.module.blocks[1 if direction == "backward" else 0].module.down
        if direction == "forward":
            inner.register_forward_hook(lag)
        else:
            inner.register_full_backward_hook(lag)
        model(torch.randn(3, WIDTH)).sum().backward()
    assert re.search(waits, told.read_text()), told.read_text()
    at = "forward of blocks.0" if direction == "forward" else "backward of blocks.1"
    assert f"rank 1 is in the {at} (step 1)" in told.read_text()


@on_ranks(2, label="faults")
def test_a_failed_collective_says_of_which_unit_and_where_the_ranks_are(rank: int, tmp_path: Path) -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("the peer is gone")

    with flight_records(str(tmp_path)):
        model = build()
        model(torch.randn(3, WIDTH)).sum().backward()
        with mock.patch.object(dist, ALL_GATHER, lambda *_, **__: Lost()):
            with pytest.raises(RuntimeError, match="the peer is gone") as raised:
                model(torch.randn(3, WIDTH))
        with mock.patch.object(dist, REDUCE_SCATTER, side_effect=dist.DistBackendError("aborted")):
            with pytest.raises(
                dist.DistBackendError, match="aborted\\nrank .* waits in the reduction of Block at"
            ):
                model(torch.randn(3, WIDTH)).sum().backward()
        with mock.patch.object(dist, REDUCE_SCATTER, lambda *_, **__: Lost()):
            with pytest.raises(RuntimeError, match="waits in the reduction of Block at 'blocks.1'"):
                model(torch.randn(3, WIDTH)).sum().backward()
        model(torch.randn(3, WIDTH)).sum().backward()
        with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("reset by peer")):
            with pytest.raises(RuntimeError, match=f"reset by peer\\nrank {rank}: .* is clipping gradients"):
                model.clip_grad_norm_(1.0)
    text = f"rank {rank}, step 1: a collective failed or timed out while this rank waits in the all-gather of Net"
    assert text in str(raised.value)
    assert re.search(r"all-gather of the root \(step 1, its collective failed\)", str(raised.value))
    assert f"python -m fsdp_c.where {tmp_path}" in str(raised.value)


def summon(model: FSDP, **options: Any) -> None:
    with FSDP.summon_full_params(model, **options):
        pass


def save(model: FSDP, kind: StateDictType) -> None:
    with FSDP.state_dict_type(model, kind):
        model.state_dict()


GATHERED: dict[str, tuple[Any, str, Callable[[FSDP], Any], str]] = {  # by the collective that finds none
    "summon_full_params": (dist, ALL_GATHER, summon, "Net"),
    "gradients": (dist, ALL_GATHER, functools.partial(summon, with_grads=True), "Net"),
    "state_dict": (redistribution, "_all_gather_single", FSDP.state_dict, "Net and 2 units after it"),
    "sharded": (
        dist,
        "all_to_all_single",
        functools.partial(save, kind=StateDictType.SHARDED_STATE_DICT),
        "Net and 2 units after it",
    ),
    "iter_full_params": (
        redistribution,
        "_all_gather_single",
        lambda model: list(fsdp_c.iter_full_params(model)),
        "Net",
    ),
}


@on_ranks(2, label="faults")
def test_memory_that_runs_out_is_told_with_rank_unit_and_remedy(rank: int) -> None:
    """In torch's own error, which stays of its type and begins with its text."""
    model = build()
    model(torch.randn(3, WIDTH)).sum().backward()
    for name, doing in (
        (ALL_GATHER, "all-gather of Net"),
        (REDUCE_SCATTER, "reduction of Block at 'blocks.1'"),
    ):
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        with mock.patch.object(dist, name, side_effect=full):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                model(torch.randn(3, WIDTH)).sum().backward()
        first, second = str(raised.value).splitlines()
        assert raised.value is full and first == "CUDA out of memory. Tried to allocate 2.00 GiB"
        assert re.match(
            f"rank {rank}, step 1: memory ran out while this rank waits in the {doing}", second
        ), second
        assert "fsdp_c.plan()" in second and "collective failed" not in second


@pytest.mark.parametrize("name", GATHERED)
@on_ranks(2, label="faults")
def test_memory_that_runs_out_in_a_gather_beside_steps_is_told_with_rank_unit_and_remedy(
    rank: int, name: str
) -> None:
    """Once, however deep it was."""
    module, collective, body, unit = GATHERED[name]
    model = build()
    model(torch.randn(3, WIDTH)).sum().backward()
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with (
        mock.patch.object(module, collective, side_effect=full),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        body(model)
    first, second = str(raised.value).splitlines()
    assert raised.value is full and first == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert second.startswith(
        f"rank {rank}: memory ran out while this rank gathers {unit}. offload_to_cpu=True"
    )
    body(model)


@on_ranks(2, label="faults")
def test_without_the_variable_nothing_is_kept_and_an_unusable_folder_warns(rank: int, tmp_path: Path) -> None:
    build()(torch.randn(3, WIDTH))
    assert not list(tmp_path.glob("*.ledger"))
    file = tmp_path / f"file{rank}"
    file.write_text("")
    with flight_records(str(file)), pytest.warns(UserWarning, match=f"rank {rank}: no flight record in"):
        build()(torch.randn(3, WIDTH))


def test_the_command_groups_ranks_that_are_at_the_same_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waiting = [flight_recorder.Entry(rank, 6, 4, 2, "layers.8", False, "") for rank in (0, 1, 2, 5)]
    lagging = flight_recorder.Entry(3, 6, 4, 1, "layers.7", False, "the process has ended")
    with mock.patch.object(flight_recorder, "read", lambda folder: [*waiting, lagging]):
        assert where.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == (
        "rank 3 is in the forward of layers.7 (step 4, the process has ended), "
        "ranks 0 to 2, 5 wait in the all-gather of layers.8 (step 4), rank 4 kept no flight record"
    )


def test_the_command_says_what_is_wrong_with_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert where.main([str(tmp_path)]) == 1
    assert "holds no flight record" in capsys.readouterr().err
    (tmp_path / "rank00000.ledger").write_bytes(b"FSDPCLG1")
    assert where.main([str(tmp_path)]) == 1
    assert "is no flight record" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2**40), (0, -1), (4, 4), (-1, 4), (2**40, 2**41)])
def test_a_record_of_a_rank_that_cannot_be_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    path = tmp_path / "rank00000.ledger"
    path.write_bytes(
        struct.pack("=8s7q64s2q", b"FSDPCLG1", rank, world_size, 1, 0, 0, 0, 0, b"somewhere", 0, 0)
    )
    with pytest.raises(ValueError, match=f"{path} is no flight record, or a damaged one"):
        flight_recorder.read(tmp_path)


def test_ranks_without_a_record_are_told_in_runs_however_many_there_are(tmp_path: Path) -> None:
    for rank in (1, 4, 5):
        (tmp_path / f"rank{rank:05}.ledger").write_bytes(
            struct.pack("=8s7q64s2q", b"FSDPCLG1", rank, 2**31 - 1, 1, 0, 0, 0, 0, b"somewhere", 0, 0)
        )
    described = flight_recorder.describe(flight_recorder.read(tmp_path))
    assert described == (
        "ranks 1, 4 to 5 are between steps (step 0), ranks 0, 2 to 3, 6 to 2147483646 kept no flight record"
    )


def test_a_fifo_in_the_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank00000.ledger")
    with pytest.raises(OSError, match="Illegal seek"):
        flight_recorder.read(tmp_path)


FULL = """
import os, sys, warnings
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
import fsdp_c
from tests.collectives import init_fake_group
init_fake_group(0, 2)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    model = fsdp_c.FullyShardedDataParallel(
        nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(100))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=torch.device("cpu"),
    )
    for _ in range(2):
        model(torch.ones(2, 2)).sum().backward()
print([str(one.message) for one in warned if "flight record" in str(one.message)], sorted(os.listdir(sys.argv[1])))
"""
ON_FULL_DISK = """
mount -t tmpfs -o size=1m none "$1" && dd if=/dev/zero of="$1/fill" bs=4096 count="$2" 2>/dev/null || exit 77
shift 2
exec "$@"
"""


def test_training_goes_on_without_a_record_when_its_disk_is_full(tmp_path: Path) -> None:
    """Whatever number of pages is free: all of the file is there from the start, or a warning."""
    for num_free in (1, 128, 200):
        shell = ["unshare", "-rm", "sh", "-c", ON_FULL_DISK, "sh", str(tmp_path), str(256 - num_free)]
        done = subprocess.run(
            [*shell, sys.executable, "-c", FULL, str(tmp_path)],
            env={**os.environ, flight_recorder.VARIABLE: str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"no small disk can be mounted here: {done.stderr}")
        assert done.returncode == 0, (num_free, done.returncode, done.stderr)
        why = f"[Errno 28] No space left on device: '{tmp_path / 'rank00000.ledger'}'"
        warning = f"rank 0: no flight record in {tmp_path}: {why}"
        warned, files = ([], ["fill", "rank00000.ledger"]) if num_free == 200 else ([warning], ["fill"])
        assert done.stdout.strip() == f"{warned} {files}"


FORKED = """
import os, signal, sys
from fsdp_c import _C
_C.open_flight_recorder(sys.argv[1], 3, 8)
_C.add_recorder_name("layers.0")
place = _C.enter_recorder_phase(_C.RECORDER_SAVE)
def child():
    os.kill(os.getpid(), signal.SIGUSR1)
    assert _C.add_recorder_name("a child's") == -1
    _C.leave_recorder_phase(place)
    _C.enter_recorder_phase(_C.RECORDER_LOAD)
    _C.note_recorder_failure()
before = open(sys.argv[1], "rb").read()
pid = os.fork()
if pid == 0:
    child()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert open(sys.argv[1], "rb").read() == before
_C.leave_recorder_phase(place)
assert _C.add_recorder_name("layers.1") == 1
print(_C.read_flight_recorder(sys.argv[1])[3:7])
"""


def test_a_forked_child_leaves_the_record_of_its_parent_alone(tmp_path: Path) -> None:
    done = run_python("-c", FORKED, tmp_path / "rank00003.ledger")
    assert done.returncode == 0, done.stderr
    assert "fsdp_c: rank" not in done.stderr
    assert done.stdout.strip() == "(0, 0, 'layers.0', False)"


KILLED = """
import os, signal, sys
import fsdp_c
from fsdp_c import _C
_C.open_flight_recorder(sys.argv[1] + "/rank00000.ledger", 0, 1)
assert _C.add_recorder_name("x" * 300) == 0
_C.enter_recorder_phase(_C.RECORDER_SAVE)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_flight_record_survives_sigkill_and_sigusr1_prints_it(tmp_path: Path) -> None:
    done = run_python("-c", KILLED, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "fsdp_c: rank 0, step 0: is saving a checkpoint\n" in done.stderr
    assert places(tmp_path) == ["rank 0 is saving a checkpoint (step 0, the process has ended)"]


READ = """
import sys
from fsdp_c import _C
_C.open_flight_recorder(sys.argv[1], 3, 8)
_C.add_recorder_name("\u00e4" * 100)
print(ascii(_C.read_flight_recorder(sys.argv[1])[3:7]))
place = _C.enter_recorder_phase(_C.RECORDER_SAVE)
_C.note_recorder_failure()
_C.leave_recorder_phase(place)
print(_C.read_flight_recorder(sys.argv[1])[3:7])
"""


def test_a_name_cut_amid_a_character_is_read_and_a_failure_stays_when_its_place_is_left(
    tmp_path: Path,
) -> None:
    done = run_python("-c", READ, tmp_path / "rank00003.ledger")
    cut = r"\xe4" * 63 + r"\ufffd"
    assert done.stdout.splitlines() == [f"(0, 0, '{cut}', False)", "(0, 6, '', True)"], done.stderr
    assert places(tmp_path) == [
        "rank 3 is saving a checkpoint (step 0, its collective failed, the process has ended)"
    ]


def test_a_process_that_runs_is_stopped_or_has_ended_is_told_apart() -> None:
    process = subprocess.Popen(["sleep", "60"])
    seen = [rank_entries._process_state(process.pid)]
    for number, expected in (
        (signal.SIGSTOP, "the process is stopped"),
        (signal.SIGKILL, "the process has ended"),
    ):
        process.send_signal(number)
        for _ in range(200):
            if rank_entries._process_state(process.pid) == expected:
                break
            time.sleep(0.02)
        seen.append(rank_entries._process_state(process.pid))
    process.wait()
    assert seen == ["", "the process is stopped", "the process has ended"]
    assert rank_entries._process_state(process.pid) == "the process has ended"


@on_ranks(2, label="faults")
def test_a_load_that_fails_on_all_ranks_is_over_for_the_flight_recorder(rank: int, tmp_path: Path) -> None:
    with flight_records(str(tmp_path / "records")) as folder:
        model = build()
        with pytest.raises(FileNotFoundError):
            checkpoint.load(model, None, tmp_path / "nowhere")
        dist.barrier()
        assert places(folder)[rank] == f"rank {rank} is between steps (step 0)"


def summon(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with FSDP.summon_full_params(model):
        pass


ALONE: dict[str, Callable[[FSDP, torch.optim.Optimizer, Path], object]] = {
    "is in state_dict()": lambda model, optimizer, folder: model.state_dict(),
    "is in optim_state_dict()": lambda model, optimizer, folder: FSDP.optim_state_dict(model, optimizer),
    "is in summon_full_params()": summon,
    "is saving a checkpoint": lambda model, optimizer, folder: checkpoint.save(
        model, optimizer, folder / "saved"
    ),
}


@pytest.mark.parametrize("what", ALONE)
@on_ranks(2, label="faults")
def test_what_one_rank_calls_alone_is_named(rank: int, tmp_path: Path, what: str) -> None:
    with flight_records(str(tmp_path)) as folder:
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        deadline = time.monotonic() + 40
        while rank == 1 and what not in (found := flight_recorder.describe(flight_recorder.read(folder))):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        if rank == 1:
            assert found == f"rank 0 {what} (step 1), rank 1 is between steps (step 1)"
        ALONE[what](model, optimizer, tmp_path)
        dist.barrier()
        assert places(folder)[rank] == f"rank {rank} is between steps (step 1)"


# ----------------------------------------------------------------- ranks that wait for each other


class Told(logging.Handler):
    """What the flight recorder has logged, of which the other rank hears by a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        (self.folder / f"told{dist.get_rank()}").touch()

    def trained(self) -> tuple[FSDP, torch.optim.Optimizer]:
        """A model after its first step, in which a rank may be slow by itself: what that made is forgotten."""
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        dist.barrier()
        (self.folder / f"told{dist.get_rank()}").unlink(missing_ok=True)
        self.lines.clear()
        dist.barrier()
        return model, optimizer

    def wait_for(self, *ranks: int) -> None:
        """Until these were told."""
        deadline = time.monotonic() + 40
        while not all((self.folder / f"told{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, "nothing was told"
            time.sleep(0.01)


@contextmanager
def watched(folder: Path, records: Path | None, look_s: float = 0.1) -> Iterator[Told]:
    """``records``: where the flight records are, or None for the store."""
    told = Told(folder)
    flight_recorder.logger.addHandler(told)
    try:
        with mock.patch.object(flight_recorder, "_LOOK_S", look_s), flight_records(str(records or "")):
            yield told
    finally:
        flight_recorder.logger.removeHandler(told)


@pytest.mark.parametrize("what", ALONE)
@on_ranks(2, label="faults")
def test_ranks_of_which_one_calls_what_all_must_are_told_while_they_wait(
    rank: int, tmp_path: Path, what: str
) -> None:
    with watched(tmp_path, tmp_path / "records") as told:
        model, optimizer = told.trained()
        waited = tmp_path / "waited"
        if rank == 1:
            told.wait_for(0, 1)  # here in the place of a step that this rank would be in
            waited.touch()
        ALONE[what](model, optimizer, tmp_path)
        line = told.lines[0]
        assert waited.exists()
    assert re.match(rf"rank {rank} has not moved for [\d.]+ s: ", line)
    places = f"rank 0 {what} (step 1), rank 1 is between steps (step 1). "
    assert f"{places}What is collective is for all ranks to call" in line


@on_ranks(2, label="faults")
def test_ranks_with_unequal_numbers_of_batches_are_told_while_they_wait(rank: int, tmp_path: Path) -> None:
    with watched(tmp_path, tmp_path / "records") as told:
        model, _ = told.trained()
        if rank == 1:
            told.wait_for(0, 1)
        model(torch.ones(1, WIDTH)).sum().backward()
        line = told.lines[0]
    places = r"rank 0 waits in the all-gather of the root \(step 1\), rank 1 is between steps \(step 1\)"
    assert re.match(rf"rank {rank} has not moved for .* s: {places}\. .*fsdp_c\.join\(model, batches\)", line)


def wrap_and_send(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    FSDP(torch.nn.Linear(2, 2), sync_module_states=True, device_id=device())


OVER_THE_STORE = {
    **ALONE,
    "waits for all ranks to wrap with sync_module_states=True": wrap_and_send,
    "waits in the all-gather of the root": lambda model, *_: model(torch.ones(1, WIDTH)),
}


@pytest.mark.parametrize("what", OVER_THE_STORE)
@on_ranks(2, label="faults")
def test_without_a_folder_rank_0_is_told_over_the_store(rank: int, tmp_path: Path, what: str) -> None:
    with watched(tmp_path, None) as told:
        model, optimizer = told.trained()
        if rank == 1:
            told.wait_for(0)
        OVER_THE_STORE[what](model, optimizer, tmp_path)
    if rank == 0:
        (line,) = told.lines
        assert f"s: rank 0 {what} (step 1), rank 1 is between steps (step 1). What is" in line
    else:
        assert not told.lines


@on_ranks(2, label="faults")
def test_a_rank_that_moves_is_not_told_of_over_the_store(rank: int, tmp_path: Path) -> None:
    """It has told of the place before; and between steps a rank has some time."""
    with watched(tmp_path, None) as told:
        model, _ = told.trained()
        for _ in range(2):
            if rank == 1:
                time.sleep(0.3)
            model(torch.ones(1, WIDTH)).sum().backward()
        for _ in range(75):
            if rank == 1:
                with flight_recorder.phase(flight_recorder._C.RECORDER_LOAD):
                    time.sleep(0.02)  # less than from one look to the next
        model(torch.ones(1, WIDTH)).sum().backward()
    assert not told.lines


def test_ranks_in_different_places_are_told_sooner_than_those_between_steps() -> None:
    def collide(*places: tuple[int, int]) -> bool:
        return flight_recorder._collide(
            [flight_recorder.Entry(rank, 2, *place, "", False, "") for rank, place in enumerate(places)]
        )

    assert collide((3, 1), (3, 8)) and collide((3, 1), (4, 1)) and collide((3, 7), (3, 8))
    assert not collide((3, 1), (4, 0)) and not collide((3, 0), (3, 8)) and not collide((3, 1), (3, 4))


@on_ranks(2, label="faults")
def test_the_watch_may_be_left_out_and_ends_with_its_group(tmp_path: Path) -> None:
    close()
    before = flight_recorder._thread
    with mock.patch.dict(os.environ, FSDP_C_WATCH="0"):
        build()(torch.ones(1, WIDTH))
        assert not watching()
    no_group = mock.patch.object(rank_entries.StoreEntries, "_connection", side_effect=RuntimeError)
    with watched(tmp_path, None), no_group:
        build()(torch.ones(1, WIDTH))
        mine = flight_recorder._thread  # which may have ended already
        assert mine is not None and mine is not before
        mine.join(30)
        assert not mine.is_alive()


@on_ranks(2, label="faults")
def test_nothing_is_told_of_ranks_that_train_or_wait_together(tmp_path: Path) -> None:
    def pause(*_: object) -> None:
        time.sleep(2)  # of four looks: a rank may be slow for two

    with watched(tmp_path, tmp_path / "records", look_s=0.5) as told:
        model, _ = told.trained()
        pause()  # between steps
        hook = model.module.head.register_forward_hook(pause)  # amid one
        model(torch.ones(1, WIDTH)).sum().backward()
        hook.remove()
        with FSDP.summon_full_params(model):
            dist.barrier()
            pause()
        checkpoint.save(model, None, tmp_path / "saved")
    assert told.lines == []


@on_ranks(2, label="faults")
def test_the_thread_that_looks_ends_with_the_record_and_outlives_its_folder(tmp_path: Path) -> None:
    with watched(tmp_path, tmp_path / "records"):
        build()(torch.ones(1, WIDTH))
        mine = watching()
        assert len(mine) == 1
        dist.barrier()
        shutil.rmtree(tmp_path / "records", ignore_errors=True)
        time.sleep(0.3)
        assert mine[0].is_alive()
    assert not watching()


@on_ranks(2, label="faults")
def test_a_load_of_a_state_dict_is_a_phase(rank: int, tmp_path: Path) -> None:
    seen = []
    with flight_records(str(tmp_path)) as folder:
        model = build()
        model(torch.ones(1, WIDTH))
        values = model.state_dict()
        model.module.register_load_state_dict_post_hook(lambda *_: seen.append(places(folder)[rank]))
        model.load_state_dict(values)
    assert seen == [f"rank {rank} is in load_state_dict() (step 0)"]
