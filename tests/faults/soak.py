"""Long training under random faults, compared with the same training undisturbed: ``make soak``.

Two ranks under torchrun train a small model. Between and in their steps come exceptions in hooks,
evaluations, state dicts, saves, resumes from the newest checkpoint with everything built anew, and kills,
after which torchrun restarts both ranks. Every loss must be that of the undisturbed run, bit for bit; memory
and file descriptors of a process must stay what they were when it had warmed up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fsdp_c import _C, checkpoint
from tests.checkpoints import differences as checkpoint_differences
from tests.faults.points import Points, Trouble
from tests.models import WIDTH, Block, Net

ROOT = Path(__file__).resolve().parents[2]
EVENTS = {"exception": 0.08, "evaluation": 0.04, "state dict": 0.02, "save": 0.04, "resume": 0.01}
ERRORS = (Trouble, KeyboardInterrupt, MemoryError)
POINTS = 80  # of a step there are 70; the others are the end of its backward
WARM_UP, EVERY = 150, 25  # rounds before a process is measured, and between measurements
RSS_GROWTH_NBYTES = 2 << 20


# ----------------------------------------------------------------- a rank


class Run:
    """One rank's training up to ``steps``, in the folder ``out``. ``kills``: the steps at which attempts
    end."""

    def __init__(
        self, out: Path, steps: int, seed: int, kills: Sequence[int], attempt: int, disturbed: bool
    ) -> None:
        self.out, self.steps, self.attempt = out, steps, attempt
        self.rank = dist.get_rank()
        self.random = random.Random(seed * 1000 + attempt)  # the same on both ranks
        self.kill_at = kills[attempt] if disturbed and attempt < len(kills) else -1
        self.events = EVENTS if disturbed else {"save": EVENTS["save"]}
        self.disturbed = disturbed
        self.step = self.rounds = 0
        self.build()
        if self.newest.exists():
            self.load()

    @property
    def newest(self) -> Path:
        return self.out / "checkpoint"

    def build(self) -> None:
        torch.manual_seed(5)
        self.model = fsdp_c.FullyShardedDataParallel(
            Net(blocks=2),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.points = Points()
        if self.disturbed:
            for name, module in self.model.named_modules():
                self.points.watch_module(name or "the root", module)
            self.optimizer.register_step_pre_hook(self.before_optimizer_step)

    def before_optimizer_step(self, *_: Any) -> None:
        self.points.reach("before the optimizer's step")

    def load(self) -> None:
        self.step = checkpoint.load(self.model, self.optimizer, self.newest)["step"]

    def train(self) -> None:
        while self.step < self.steps:
            self.round()
            self.rounds += 1
            if self.rounds >= WARM_UP and self.rounds % EVERY == 0:
                self.note(f"memory-{self.attempt}-{self.rank}", " ".join(map(str, measured())))
        checkpoint.save(self.model, self.optimizer, self.out / "end", extra={"step": self.step})

    def round(self) -> None:
        """What the dice say, then a step."""
        drawn = self.random.random()
        for event, chance in self.events.items():
            if 0 <= drawn < chance:
                self.meet(event)
            drawn -= chance
        if self.step == self.kill_at:
            self.meet("kill")
        with self.points.raising_at(-1):
            loss = self.forward_and_backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.note("losses", f"{self.step} {loss.hex()}")
        self.step += 1

    def meet(self, event: str) -> None:
        if self.rank == 0:
            self.note("events", event)
        getattr(self, event.replace(" ", "_"))()

    def note(self, file: str, text: str) -> None:
        with (self.out / file).open("a") as lines:
            lines.write(text + "\n")

    def batch(self) -> torch.Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2 * self.step + self.rank))

    def forward_and_backward(self) -> float:
        loss = self.model(self.batch()).square().mean()
        loss.backward()
        return loss.item()

    def step_until(self, point: int, error: Callable[[str], BaseException]) -> None:
        """A step that raises at ``point``, or before the optimizer's part."""
        with self.points.raising_at(point, error):
            self.forward_and_backward()
            self.points.armed = len(self.points.names)
            self.before_optimizer_step()

    # ------------------------------------------------------------- events

    def exception(self) -> None:
        point, error = self.random.randrange(POINTS), self.random.choice(ERRORS)
        with contextlib.suppress(error):
            self.step_until(point, error)
        self.optimizer.zero_grad()

    def kill(self) -> None:
        """The end of one rank; the other goes on, until it meets a collective."""
        point, victim = self.random.randrange(POINTS), self.random.randrange(2)
        if self.rank == victim:
            self.step_until(point, die)

    def evaluation(self) -> None:
        self.model.eval()
        with torch.no_grad(), self.points.raising_at(-1):
            self.model(self.batch())
        self.model.train()

    def state_dict(self) -> None:
        self.model.state_dict()
        with fsdp_c.FullyShardedDataParallel.summon_full_params(self.model):
            pass

    def save(self) -> None:
        checkpoint.save(self.model, self.optimizer, self.newest, extra={"step": self.step})

    def resume(self) -> None:
        if self.newest.exists():
            del self.model, self.optimizer, self.points
            self.build()
            self.load()


def die(place: str) -> BaseException:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(place)


def measured() -> tuple[int, int, int]:
    """Bytes resident, bytes of unsharded parameters, open file descriptors."""
    gc.collect()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return rss, _C.live_unsharded_nbytes(), len(os.listdir("/proc/self/fd"))


# ----------------------------------------------------------------- both ranks


class Process(NamedTuple):
    """What the measurements of one process say, from when it had warmed up to its end."""

    rounds: int
    first_rss: int
    last_rss: int
    live: set[int]
    descriptors: set[int]


def kill_steps(steps: int, kills: int, seed: int) -> list[int]:
    """One step of each part of the training but the first."""
    part, dice = steps // (kills + 1), random.Random(seed)
    return [part * number + dice.randrange(part) for number in range(1, kills + 1)]


def losses(out: Path) -> dict[int, set[str]]:
    """By step, all that were computed for it."""
    found: dict[int, set[str]] = {}
    for line in (out / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def processes(out: Path) -> dict[str, Process]:
    found = {}
    for file in sorted(out.glob("memory-*")):
        rss, live, descriptors = zip(
            *(map(int, line.split()) for line in file.read_text().splitlines()), strict=True
        )
        rounds = WARM_UP + EVERY * (len(rss) - 1)
        found[file.name.removeprefix("memory-")] = Process(
            rounds, rss[0], rss[-1], set(live), set(descriptors)
        )
    return found


def differences(undisturbed: Path, disturbed: Path, steps: int) -> list[str]:
    """What is not as it should be."""
    wanted, got = losses(undisturbed), losses(disturbed)
    found = [
        f"step {step}: losses {got.get(step)}, undisturbed {wanted[step]}"
        for step in wanted
        if got.get(step) != wanted[step]
    ]
    if sorted(wanted) != list(range(steps)):
        found.append(f"the undisturbed run has losses of {len(wanted)} steps")
    if differing := checkpoint_differences(undisturbed / "end", disturbed / "end"):
        found.append(f"the last checkpoints differ: {differing}")
    for name, process in processes(disturbed).items():
        if process.last_rss - process.first_rss > RSS_GROWTH_NBYTES:
            found.append(
                f"process {name}: {process.last_rss - process.first_rss} bytes more resident than once "
                "warmed up"
            )
        if process.live != {0} or len(process.descriptors) != 1:
            found.append(
                f"process {name}: unsharded bytes {process.live}, file descriptors {process.descriptors}"
            )
    return found


def torchrun(out: Path, steps: int, seed: int, kills: int, disturbed: bool) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {kills} -m tests.faults.soak"
    role = "disturbed" if disturbed else "undisturbed"
    flags = f"--steps {steps} --seed {seed} --kills {kills} --rank {role}"
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (out / "stderr").open("w") as stderr:
        command = [sys.executable, *launcher.split(), *flags.split(), "--out", str(out)]
        done = subprocess.run(command, stderr=stderr, env=os.environ | environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"torchrun failed:\n{(out / 'stderr').read_text()[-4000:]}")


def be_a_rank(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills = kill_steps(args.steps, args.kills, args.seed)
    Run(args.out, args.steps, args.seed, kills, attempt, args.rank == "disturbed").train()
    dist.destroy_process_group()


def soak(args: argparse.Namespace) -> int:
    started = time.monotonic()
    outs = [args.out / "undisturbed", args.out / "disturbed"]
    for out in outs:
        torchrun(out.resolve(), args.steps, args.seed, args.kills, disturbed=out is outs[1])
    events = Counter((outs[1] / "events").read_text().splitlines())
    trained = len((outs[1] / "losses").read_text().splitlines())
    print(
        f"{args.steps} steps, {trained} with those that were repeated, in {time.monotonic() - started:.0f} s"
    )
    print(", ".join(f"{count} x {event}" for event, count in sorted(events.items())))
    print(
        "| process (attempt-rank) | rounds | resident MiB, warm | at the end | file descriptors | unsharded "
        "bytes |"
    )
    print("|---|---|---|---|---|---|")
    for name, process in processes(outs[1]).items():
        rss = [f"{nbytes / 2**20:.1f}" for nbytes in (process.first_rss, process.last_rss)]
        columns = [name, process.rounds, *rss, *map(sorted, (process.descriptors, process.live))]
        print(f"| {' | '.join(map(str, columns))} |")
    found = differences(*outs, args.steps)
    print("\n".join(found) or "every loss and the last checkpoint equal those of the undisturbed run")
    return bool(found) or events["kill"] != args.kills


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train under random faults and compare with an undisturbed run."
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--rank", choices=("disturbed", "undisturbed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    return soak(args) if args.rank is None else be_a_rank(args) or 0


if __name__ == "__main__":
    sys.exit(main())
