"""Tiny models of the tests: odd sizes, so that every flat parameter needs padding on 2 and 4 ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.settings import WIDTH

HIDDEN = WIDTH + 2


class Block(nn.Module):
    """Pre-norm MLP with a residual, a floating and an integer buffer.

    ``tied`` adds two square layers that share their weight, ``extra`` a layer that forward never calls.
    ``checkpoint_mode`` recomputes the MLP in backward: "reentrant" or "nonreentrant".
    """

    def __init__(
        self, *, tied: bool = False, extra: bool = False, checkpoint_mode: str | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.extra = nn.Linear(WIDTH, 3) if extra else None
        self.square = nn.Linear(WIDTH, WIDTH) if tied else None
        self.square_again = nn.Linear(WIDTH, WIDTH) if tied else None
        if tied:
            self.square_again.weight = self.square.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.checkpoint_mode = checkpoint_mode

    def _mlp(self, x: Tensor) -> Tensor:
        hidden = self.down(F.gelu(self.up(self.norm(x))))
        if self.square is not None:
            hidden = self.square_again(torch.tanh(self.square(hidden)))
        return hidden * self.scale.to(hidden.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint_mode is None:
            return x + self._mlp(x)
        return x + checkpoint(self._mlp, x, use_reentrant=self.checkpoint_mode == "reentrant")


class Net(nn.Module):
    """First layer, blocks, head. Options add features for the scenarios.

    ``skip`` names blocks that forward leaves out. ``float_between`` returns to fp32 after each block, so that
    a block casts its own inputs. ``around`` checkpoints whole blocks. ``tied_head`` shares the first layer's
    weight with the last.
    """

    def __init__(
        self,
        blocks: int = 3,
        *,
        around: str | None = None,
        float_between: bool = False,
        tied_head: bool = False,
        **block_options: object,
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**block_options) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied_head:
            self.head.weight = self.inp.weight
        self.around = around
        self.float_between = float_between
        self.skip: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index in self.skip:
                continue
            x = (
                block(x)
                if self.around is None
                else checkpoint(block, x, use_reentrant=self.around == "reentrant")
            )
            if self.float_between:
                x = x.float()
        return self.head(x.to(self.head.weight.dtype) if self.float_between else x)


class Conv(Net):
    """A convolutional model with non-contiguous parameters; one of them has strides that count as contiguous."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.last = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.wide = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)


class EqualBlocks(nn.Module):
    """Blocks of equal size, to count memory. The root owns one layer of the same size."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x
