"""examples/train_lm.py with a rank that dies or stops: ``torchrun faulty_lm.py ACTION PHASE NOTES flags of
train_lm.py``.

In the first attempt rank 1 receives SIGKILL or SIGSTOP in the given phase, by hooks of this script. Later
attempts run undisturbed. The folder NOTES receives the ids of the processes and the time of the fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import train_lm  # noqa: E402

from tests.collectives import REDUCE_SCATTER  # noqa: E402

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEP = 3  # steps done before the fault; a save with the fault comes after more than these
TIMEOUT = timedelta(seconds=5)
LAYERS = 2


class Fault:
    """A signal that this process sends to itself, once, at one point of its training."""

    def __init__(self, action: str, phase: str, notes: Path) -> None:
        self.signal, self.phase, self.notes = SIGNALS[action], phase, notes
        self.trainer: Any = None
        self.reductions = 0

    def strike(self) -> None:
        (self.notes / "fault.tmp").write_text(str(time.time()))
        (self.notes / "fault.tmp").rename(self.notes / "fault")
        os.kill(os.getpid(), self.signal)

    def strike_in(self, phase: str) -> None:
        if self.phase == phase and self.trainer.progress.step == STEP:
            self.strike()

    def watch(self, trainer: Any) -> None:
        """Register hooks where a forward and a backward begin, on reductions, and on files of checkpoints."""
        self.trainer = trainer
        blocks = [block.module for block in trainer.model.module.blocks]
        blocks[0].mlp_in.register_forward_pre_hook(lambda *_: self.strike_in("forward"))
        blocks[-1].mlp_in.register_full_backward_hook(lambda *_: self.strike_in("backward"))
        reduce_scatter = getattr(dist, REDUCE_SCATTER)

        def counted(*args: Any, **options: Any) -> Any:
            self.on_reduction()
            return reduce_scatter(*args, **options)

        setattr(dist, REDUCE_SCATTER, counted)
        sys.addaudithook(self.on_event)

    def on_reduction(self) -> None:
        self.reductions += 1
        # reduction of the first block, the last one before the root's
        if self.reductions % (LAYERS + 1) == LAYERS:
            self.strike_in("reduce")

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).endswith(".distcp"):
            return
        saves = self.phase == "save" and self.trainer.progress.step > STEP
        if (self.phase == "load" and arguments[1] == "r") or (saves and arguments[1] == "x"):
            self.strike()


def main() -> int:
    action, phase, notes = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    del sys.argv[1:4]
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (notes / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    strikes = rank == 1 and attempt == 0
    # torchrun's signal, which would end a survivor before its message
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    made, start_ranks = train_lm.Trainer.__init__, train_lm.start_ranks

    def make(trainer: Any, *arguments: Any) -> None:
        made(trainer, *arguments)
        if strikes:
            Fault(action, phase, notes).watch(trainer)

    def start(device: str) -> Any:
        ranks = start_ranks(device)
        if attempt == 0 and action == "stop":
            _set_pg_timeout(TIMEOUT)  # only from here on: processes start at different times
        return ranks

    train_lm.Trainer.__init__, train_lm.start_ranks = make, start
    train_lm.draw_losses = lambda *_: None
    return train_lm.main()


if __name__ == "__main__":
    sys.exit(main())
