"""Typical models with torch's optimizers on a GPU. fsdp_c trains them to bitwise the same result as torch's
FSDP1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel
from tests.cuda.test_parity import GPU, TIMEOUT_S, over, same
from tests.ranks import on_ranks

TOKENS, WIDTH, HEADS, LENGTH = 31, 16, 2, 7
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class OwnAttention(nn.Module):
    """Attention written with ``@`` of batched matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.mixed(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        scores = (query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return x + self.out((F.dropout(scores, 0.1, self.training) @ value).transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """Causal attention by torch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.mixed(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        attended = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4).unbind(), is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


class Convolutions(nn.Module):
    """Convolutions over the length, and a batch norm, whose buffers are compared too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 2 * WIDTH, batch_first=True),
    "encoder, norm first, gelu": partial(
        nn.TransformerEncoderLayer,
        WIDTH,
        HEADS,
        2 * WIDTH,
        activation="gelu",
        norm_first=True,
        batch_first=True,
    ),
    "own attention": OwnAttention,
    "fused attention": FusedAttention,
    "convolutions": Convolutions,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "SGD": partial(torch.optim.SGD, momentum=0.9),
}


class Language(nn.Module):
    """Embedding, layers, and a head that shares the embedding's weight."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(fsdp: type, rank: int, layer: str, optimizer: str, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(5)
    model: Any = Language(LAYERS[layer])
    policy = ModuleWrapPolicy({type(model.layers[0])})
    model = fsdp(model, auto_wrap_policy=policy, device_id=GPU, use_orig_params=True, **options)
    steps = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
    torch.cuda.manual_seed(17 + rank)  # seed of dropout
    seen = []
    for step in range(4):
        tokens = torch.randint(
            TOKENS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + rank)
        )
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].to(GPU).flatten(), label_smoothing=0.1
        )
        loss.backward()
        seen += [loss.detach().cpu(), model.clip_grad_norm_(1.0).cpu()]
        steps.step()
        steps.zero_grad()
        seen += [param.detach().cpu().clone() for param in model.parameters()]
    model.eval()
    with torch.no_grad():
        seen.append(model(tokens[:, :-1]).float().cpu())
    return seen + [value.cpu() for _, value in sorted(model.state_dict().items())]


def assert_trains_as_upstream(rank: int, layer: str, optimizer: str, **options: Any) -> None:
    with over("nccl") as group:
        expected, actual = (
            train(fsdp, rank, layer, optimizer, options | group)
            for fsdp in (Upstream, FullyShardedDataParallel)
        )
    assert len(expected) == len(actual)
    assert [place for place, pair in enumerate(zip(expected, actual, strict=True)) if not same(*pair)] == []


@pytest.mark.parametrize("layer", LAYERS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_models_train_as_with_torchs_fsdp(rank: int, layer: str) -> None:
    assert_trains_as_upstream(rank, layer, "foreach")


@pytest.mark.parametrize("layer", ["encoder", "own attention", "fused attention"])
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_models_train_as_with_torchs_fsdp_in_bfloat16(rank: int, layer: str) -> None:
    assert_trains_as_upstream(rank, layer, "foreach", mixed_precision=BF16)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_optimizers_step_on_shards_as_with_torchs_fsdp(rank: int, optimizer: str) -> None:
    assert_trains_as_upstream(rank, "encoder", optimizer)
