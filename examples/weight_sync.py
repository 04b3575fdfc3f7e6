"""Weights of a sharded trainer, sent to whoever generates: what frameworks for reinforcement learning do.

torchrun --nproc-per-node 2 examples/weight_sync.py
"""

import torch
import torch.distributed as dist
from torch import nn

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import ModuleWrapPolicy


def build_model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(32, 10))


def sync(trainer, generator):
    """The next unit is gathered beside what is done with this one: besides shards and generator two are
    held."""
    # vLLM: generator.load_weights([(name, weight)]), or a broadcast to its ranks
    weights = generator.state_dict()
    for name, weight in fsdp_c.iter_full_params(trainer):
        weights[name].copy_(weight)


dist.init_process_group("gloo")
device = torch.device("cpu")  # on GPUs: "nccl", and torch.device("cuda", LOCAL_RANK)
trainer = FSDP(
    build_model(), auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}), device_id=device
)
generator = build_model().to(device).eval()
optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
prompts = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)

for step in range(4):
    with torch.no_grad():
        actions = generator(prompts).argmax(-1)  # a rollout, by the weights of the last step
    loss = nn.functional.cross_entropy(trainer(prompts).flatten(0, 1), actions.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sync(trainer, generator)
    with torch.no_grad():
        difference = (trainer(prompts) - generator(prompts)).abs().max().item()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}, trainer and generator differ by {difference}")
dist.destroy_process_group()
