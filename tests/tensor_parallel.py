"""A small transformer-like model and its tensor parallel plans, on a 2 x 2 mesh of four ranks."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.ranks import device

TOKENS = 12
WIDTH = 6
HIDDEN = 10
LENGTH = 4
BATCH = 3


class Layer(nn.Module):
    """Pre-norm MLP with a residual."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.checkpointed = checkpointed

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self.checkpointed else self._mlp(x))


class Language(nn.Module):
    """Embedding, layers and head. Returns the logits of the next token."""

    def __init__(self, layers: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(checkpointed) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@functools.cache
def mesh() -> DeviceMesh:
    """Return this process' mesh of data parallel x tensor parallel ranks. Created once: its groups live as
    long as the ranks.
    """
    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def hybrid_mesh() -> DeviceMesh:
    """Return a mesh with two replicas of one data parallel rank, each a pair of tensor parallel ranks."""
    return init_device_mesh(device().type, (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))


def parallelized(model: Language, plan: str) -> Language:
    """Parallelize ``model`` by the plan "mlp" (layers only) or "sequence" (everything, with activations
    sharded between the layers).
    """
    return parallelize_module(model, mesh()["tp"], mlp_plan() if plan == "mlp" else sequence_plan())


def mlp_plan() -> dict[str, object]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def sequence_plan() -> dict[str, object]:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def tokens(seed: int) -> Tensor:
    return torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator(device()).manual_seed(seed))
