"""An ordinary training script for torch's FSDP1. The script itself needs no change for fsdp_c.

torchrun --nproc-per-node 2 examples/plain_torchrun.py               # torch's FSDP1
torchrun --nproc-per-node 2 -m fsdp_c examples/plain_torchrun.py     # fsdp_c, the same losses
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

WIDTH, LENGTH, BATCH, CLASSES = 32, 8, 4, 10


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true", help="compute and reduce in bfloat16")
    return parser.parse_args()


def build_model() -> nn.Module:
    torch.manual_seed(0)  # equal initial weights on every rank
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, CLASSES))


def wrap(model: nn.Module, device: torch.device, bf16: bool) -> FSDP:
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if bf16
        else None,
        device_id=device,
        use_orig_params=True,
    )


def train(model: FSDP, args: argparse.Namespace, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(args.steps):
        inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(device)
        targets = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item()!r}, gradient norm {norm.item()!r}", flush=True)


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(wrap(build_model(), device, args.bf16), args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
