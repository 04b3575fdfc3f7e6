"""Models for the tests of Fabric and of Lightning's Trainer, and the strategy without its check for a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.clients.support import ON_CPU, assert_same_parameters, train_reference

WIDTH = 5
GLOBAL_BATCH = 12  # divides evenly among 2, 3 and 4 ranks
STEPS = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    """A model whose modules with parameters have reset_parameters, so that it can be built on the meta
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.inp(x)))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self(inputs), targets)


def mlp(seed: int = 0) -> Mlp:
    """Return a model with the same values on every device: on a GPU, Lightning would draw them there."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        drawn = Mlp()
    model = Mlp()
    if not model.head.weight.is_meta:
        model.load_state_dict(drawn.state_dict())
    return model


def manually_wrapped(model: Mlp) -> nn.Module:
    """Wrap each layer and the whole model with ``wrap`` inside the strategy's context."""
    from torch.distributed.fsdp.wrap import wrap

    model.layers = nn.Sequential(*(wrap(layer) for layer in model.layers))
    return wrap(model)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=generator), torch.randn(
        GLOBAL_BATCH, WIDTH, generator=generator
    )


def rank_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    return inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]


def whole_loss(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return F.mse_loss(model(inputs), targets)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def assert_trained_as_unsharded(
    losses: list[float], parameters: dict[str, Tensor], steps: Iterable[int], **options: Any
) -> None:
    """Compare with the unsharded model, trained on the batches of ``steps``."""
    plain = mlp()
    expected = train_reference(plain, whole_loss, steps, optimizer=adam(plain), **options)
    assert losses == pytest.approx(expected, rel=1e-5), f"{losses}, not {expected}"
    assert_same_parameters(parameters, plain.state_dict())


def on_cpu(strategy: type) -> type:
    """Return a subclass of the strategy on CPUs: the library checks for a GPU only if the type is exactly its
    own.
    """
    return type(f"Cpu{strategy.__name__}", (strategy,), {}) if ON_CPU else strategy
