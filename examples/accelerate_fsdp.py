"""Accelerate, with FSDP configured in its config file. The script itself needs no change for fsdp_c.

accelerate launch --config_file examples/accelerate_fsdp.yaml -m fsdp_c examples/accelerate_fsdp.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(32, 10))
data = TensorDataset(torch.randn(64, 8, 32), torch.randint(10, (64, 8)))
model = accelerator.prepare(model)  # before the optimizer, which must get the sharded parameters
optimizer, loader = accelerator.prepare(
    torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=8)
)

for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item()!r}")
accelerator.end_training()
