"""A byte-level GPT in plain PyTorch, without sharding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token per byte value


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. Checkpoints are interchangeable between models of equal sizes."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Pre-norm attention and MLP. Input and output: (batch, time, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attend(self.norm_attention(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Return causal attention of all heads, before the output projection."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, time, width)
        )


class GPT(nn.Module):
    """Map bytes (batch, time) to logits (batch, time, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Initialize for unit variance through a block, smaller outputs into the residual stream, and logits
        near zero.
        """
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention_out, module.mlp_out):
                nn.init.normal_(linear.weight, std=(linear.in_features * 2 * self.config.layers) ** -0.5)
        if module is self:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Return ``prompt`` followed by ``length`` sampled bytes. The model must not be wrapped."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(list(prompt), device=device)[None]
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1].float().cpu()
        choice = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None].to(device)], dim=1)
    return bytes(tokens[0].tolist())
