"""How a process ends: with its own result, soon, whether or not the script has destroyed its process groups.

Everything here is about whole processes, so each test starts some; see [Note: the end of a process] in
csrc/collective/collective.h.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.processes import run_ranks

LIMIT_S = 240

SCRIPT = """
import atexit, datetime, os, signal, sys, time, weakref
import torch
import torch.distributed as dist
from torch import nn

rank, file, what = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
cpu = torch.device("cpu")


def is_of_gloo(thread):
    with open(f"/proc/self/task/{thread}/comm") as name:
        return "gloo" in name.read()


def gloo_threads():
    return [int(thread) for thread in os.listdir("/proc/self/task") if is_of_gloo(thread)]


def report():  # registered before fsdp_c is imported, so called after what fsdp_c does at the end
    print("group is gone:", group() is None, flush=True)
    print("threads of gloo:", len(gloo_threads()), flush=True)
    try:
        model(torch.ones(2, 8))
        print("forward works", flush=True)
        time.sleep(3)  # nothing comes after this that lets the threads drop the tensors of this forward
    except RuntimeError as error:
        print(f"forward raises: {error}")


def step():
    model(torch.ones(2, 8)).square().mean().backward()


if "silent" not in what:
    atexit.register(report)
torch.set_num_threads(1)
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-rank]})
limit = datetime.timedelta(seconds=200)
from fsdp_c import FullyShardedDataParallel as FSDP  # imported later torch.distributed.fsdp would keep the group itself

dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2, timeout=limit)

group = weakref.ref(dist.distributed_c10d._get_default_group())
if "hold" in what:
    kept = dist.group.WORLD
model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8), device_id=cpu), nn.Linear(8, 4)), device_id=cpu)
step()
if "fail" in what:  # from here on: the ranks may begin at different times
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    if rank == 1:
        for _ in range(100):
            time.sleep(0 if os.path.exists(file + "-failed") else 0.1)
        os._exit(0)
if "slow" in what:  # it still holds the last tensors when the script is over
    for thread in gloo_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
try:
    step()
except RuntimeError:
    open(file + "-failed", "w").close()
    raise
finally:
    if "keep" not in what:
        dist.destroy_process_group()
if "fork" in what:
    child = os.fork()
    if child == 0:
        atexit.unregister(report)
        sys.exit(0)
    signal.alarm(200)
    print("child:", os.waitpid(child, 0)[1])
"""


Ends = list[subprocess.CompletedProcess[str]]


def run(folder: Path, *what: str) -> Ends:
    """Run SCRIPT on two ranks to the end."""
    folder.mkdir(exist_ok=True)
    return run_ranks([["-c", SCRIPT, rank, folder / "store", *what] for rank in range(2)], LIMIT_S)


def assert_ended_well(ends: Ends) -> None:
    for rank, end in enumerate(ends):
        assert end.returncode == 0, f"rank {rank}: {end}"


@pytest.mark.parametrize("what", [(), ("slow",)], ids=["", "slow"])
@pytest.mark.timeout(LIMIT_S + 30)
def test_destroyed_groups_end_their_threads_before_the_interpreter_ends(
    tmp_path: Path, what: tuple[str, ...]
) -> None:
    ends = run(tmp_path, *what)
    assert_ended_well(ends)
    for end in ends:
        assert "group is gone: True" in end.stdout
        assert "threads of gloo: 0" in end.stdout
        assert "forward raises: " in end.stdout
        assert "the process is ending and its process groups were destroyed" in end.stdout


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(("what", "said"), [("keep", "forward works"), ("fork", "child: 0")])
def test_kept_groups_and_forked_children_hold_nothing_up(tmp_path: Path, what: str, said: str) -> None:
    """Groups serve to the end. A child does not wait for threads that it has not."""
    ends = run(tmp_path, what)
    assert_ended_well(ends)
    for end in ends:
        assert said in end.stdout


@pytest.mark.timeout(3 * LIMIT_S)
def test_threads_of_groups_that_are_kept_do_not_abort_the_process(tmp_path: Path) -> None:
    for attempt, by in enumerate(("keep", "hold")):  # kept by torch.distributed, or by the script only
        assert_ended_well(run(tmp_path / str(attempt), by, "silent", "slow"))


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_rank_whose_collective_failed_ends_with_its_own_error(tmp_path: Path) -> None:
    first, _ = run(tmp_path, "fail")
    assert first.returncode == 1, first
    assert "RuntimeError" in first.stderr
    assert "group is gone: False" in first.stdout  # not destroyed, because the destructor could wait
