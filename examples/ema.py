"""Exponential moving average (EMA) of sharded parameters, used for evaluation and saved in checkpoints.

torchrun --nproc-per-node 2 examples/ema.py             # trains, and saves into runs/ema
torchrun --nproc-per-node 3 examples/ema.py --resume    # goes on, on any number of ranks
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.wrap import ModuleWrapPolicy

WIDTH, ROWS, HELD_OUT = 32, 12, 1 << 20


class Average:
    """The exponential average of this rank's shards. Call ``update`` after each step, on every rank."""

    def __init__(self, model: FSDP, decay: float = 0.9) -> None:
        self.params, self.decay = list(model.parameters()), decay
        self.average = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.average, self.params, 1 - self.decay)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Swap the average into the model for the body, to evaluate or save it. Wait for background saves
        inside the body.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, average in zip(self.params, self.average, strict=True):
            trained = param.clone()
            param.copy_(average)
            average.copy_(trained)


def loss_of(model: nn.Module, seed: int, device: torch.device) -> Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    own = rows[dist.get_rank() :: dist.get_world_size()].to(device)
    return (model(own) - own.roll(1, 1)).square().mean()


@torch.no_grad()
def held_out(model: nn.Module, device: torch.device) -> float:
    loss = loss_of(model, HELD_OUT, device)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/ema"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # equal initial weights on every rank
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(net, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if args.resume:
        checkpoint.load(model, None, args.out / "average")
    average, step = Average(model), 0
    if args.resume:
        step = checkpoint.load(model, optimizer, args.out / "trained")["step"]
    for _ in range(args.steps):
        loss_of(model, step, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        step += 1
    trained = held_out(model, device)
    with average.shown():
        averaged = held_out(model, device)
        checkpoint.save(model, None, args.out / "average")
    checkpoint.save(model, optimizer, args.out / "trained", extra={"step": step})
    if dist.get_rank() == 0:
        print(f"step {step}: held-out loss {trained!r}, with the average {averaged!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
