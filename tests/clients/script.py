"""Script of test_script.py: trains with accelerate, without any mention of fsdp_c, and prints the results."""

import json
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


def main(folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        use_orig_params=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), Block(5, 5), Block(5, 5), nn.Linear(5, 1))
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert type(model) is FSDP
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(
            step * accelerator.num_processes + accelerator.process_index
        )
        inputs = torch.randn(4, 3, generator=generator)
        loss = F.mse_loss(model(inputs), torch.ones(4, 1, device=accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        found = {"losses": losses, "class": FSDP.__module__, "arguments": sys.argv[1:]}
        with open(os.path.join(folder, "found.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
