"""Checkpoints one after the other, each of one number throughout: what tests that kill the saver read back."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from fsdp_c import checkpoint


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """Every parameter and every tensor of the optimizer's state becomes ``version``."""
    for param in model.parameters():
        param.fill_(version)
        for value in optimizer.state[param].values():
            value.fill_(version)


def save_versions(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, first: int, report: int) -> None:
    """One save after the other, telling before and after each through the file descriptor ``report``."""
    for version in range(first, first + 1000):
        fill(model, optimizer, version)
        os.write(report, f"begin {version}\n".encode())
        checkpoint.save(model, optimizer, path, extra={"version": version})
        os.write(report, f"done {version}\n".encode())
