"""Random programs on models whose units mix dtypes, frozen, tied and integer parameters, and may be skipped
by a rank.

Each is compared, after every operation, with the plain model that sees the batches of all ranks, one after
the other.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as recomputed

import fsdp_c
from fsdp_c import BackwardPrefetch, ShardingStrategy, StateDictType
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import CustomPolicy, split_frozen
from tests.ranks import device, on_ranks

WIDTH = 6
DTYPES = (torch.float32, torch.float64)
SEEDS_OF_TWO = range(16)
SEEDS_OF_FOUR = range(100, 106)


class Layer(nn.Module):
    """A linear layer in a dtype of its own, which a rank may skip."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x.to(self.linear.weight.dtype))).to(x.dtype)


class Block(nn.Module):
    """Layers, and an order of the columns as an integer parameter."""

    def __init__(self, layers: list[Layer], skippable: set[int], checkpoint: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = nn.Parameter(torch.arange(WIDTH - 1, -1, -1), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.skippable, self.checkpoint = skippable, checkpoint

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        x = x[:, self.order] * self.scale
        for index, layer in enumerate(self.layers):
            if skips and index in self.skippable:
                continue
            x = recomputed(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return x


class Model(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        blocks = []
        for _ in range(choose.randint(2, 3)):
            layers = [Layer(choose.choice(DTYPES)) for _ in range(choose.randint(1, 3))]
            skippable = {index for index in range(len(layers)) if choose.random() < 0.3}
            blocks.append(Block(layers, skippable, choose.choice([None, None, "not reentrant"])))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)
        layers = [layer for block in blocks for layer in block.layers]
        for layer in layers:
            layer.linear.weight.requires_grad_(choose.random() < 0.6)
            layer.linear.bias.requires_grad_(choose.random() < 0.8)
        if choose.random() < 0.5:
            self._tie(choose, [layer for block in blocks for layer in block.layers if not block.skippable])

    @staticmethod
    def _tie(choose: random.Random, layers: list[Layer]) -> None:
        first = choose.choice(layers) if layers else None
        for other in layers:
            if first is not None and other.linear.weight.dtype == first.linear.weight.dtype:
                other.linear.weight = first.linear.weight

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, skips)
        return self.head(x)


class Program:
    """Everything that the seed decides."""

    def __init__(self, seed: int, world_size: int) -> None:
        self.world_size, self.seed = world_size, seed
        choose = random.Random(seed)
        self.wraps = choose.choice([{Block}, {Layer}, {Block, Layer}, set()])
        self.use_orig_params = choose.random() < 0.5
        self.split = choose.random() < 0.7
        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
        if world_size == 4:
            strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD]
        self.options: dict[str, Any] = {
            "sharding_strategy": choose.choice(strategies),
            "backward_prefetch": choose.choice([None, *BackwardPrefetch]),
            "forward_prefetch": choose.random() < 0.5,
        }
        names = ["step", "step", "accumulate", "evaluate", "edit", "reload", "freeze"]
        self.operations = ["step", *(choose.choice(names) for _ in range(5)), "step"]

    def plain(self) -> Model:
        torch.manual_seed(self.seed)
        with torch.device("cpu"):
            model = Model(random.Random(self.seed))
        return model.to(device())

    def wrapped(self) -> FSDP:
        model = self.plain()
        for block in model.blocks:
            for index in block.skippable:
                fsdp_c.optional(block.layers[index])
        options = dict(self.options)
        if options["sharding_strategy"] == ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = init_device_mesh(device().type, (2, 2))
        policy = CustomPolicy(lambda module: isinstance(module, tuple(self.wraps)))
        with split_frozen() if self.split else nullcontext():
            return FSDP(
                model,
                auto_wrap_policy=policy if self.wraps else None,
                use_orig_params=self.use_orig_params,
                device_id=device(),
                **options,
            )

    def skips(self, rank: int, step: int) -> bool:
        return (rank + step) % 3 == 0

    def batch(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(1000 * self.seed + 10 * step + rank)
        return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator, device="cpu").to(device())

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return model(self.batch(rank, step), self.skips(rank, step)).square().mean()


class Side:
    """One of the two models, and its optimizer."""

    def __init__(self, program: Program, model: nn.Module, ranks: list[int]) -> None:
        self.program, self.model, self.ranks = program, model, ranks
        # of the gradients: the plain model sums those of all ranks
        self.share = len(ranks) / program.world_size
        params = list(model.parameters())
        self.optimizer = torch.optim.SGD([param for param in params if param.is_floating_point()], lr=0.1)

    def backward(self, step: int) -> list[Tensor]:
        losses = [self.program.loss(self.model, rank, step) for rank in self.ranks]
        sum(losses).backward()
        return [loss.detach() for loss in losses]

    def update(self) -> None:
        if len(self.ranks) > 1:
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad /= len(self.ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, operation: str, step: int) -> list[Tensor]:
        return getattr(self, operation)(step)

    def step(self, step: int) -> list[Tensor]:
        losses = self.backward(step)
        self.update()
        return losses

    def accumulate(self, step: int) -> list[Tensor]:
        with self.model.no_sync() if isinstance(self.model, FSDP) else nullcontext():
            losses = self.backward(step)
        losses += self.backward(step + 50)
        self.update()
        return losses

    def evaluate(self, step: int) -> list[Tensor]:
        with torch.no_grad():
            return [self.program.loss(self.model, rank, step) for rank in self.ranks]

    def edit(self, step: int) -> list[Tensor]:
        sharded = isinstance(self.model, FSDP)
        with FSDP.summon_full_params(self.model) if sharded else nullcontext(), torch.no_grad():
            for name, param in self.model.named_parameters():
                if param.is_floating_point() and "bias" in name:
                    param.mul_(0.5)
        return []

    def reload(self, step: int) -> list[Tensor]:
        self.model.load_state_dict(self.model.state_dict())
        return []

    def freeze(self, step: int) -> list[Tensor]:
        """The head, or not."""
        for param in (
            self.model.module.head.parameters()
            if isinstance(self.model, FSDP)
            else self.model.head.parameters()
        ):
            param.requires_grad_(not param.requires_grad)
        return []

    def state(self) -> dict[str, Tensor]:
        if not isinstance(self.model, FSDP):
            return dict(self.model.state_dict())
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            return dict(self.model.state_dict())


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def run(seed: int, rank: int, world_size: int) -> None:
    program = Program(seed, world_size)
    ours = Side(program, program.wrapped(), [rank])
    plain = Side(program, program.plain(), list(range(world_size)))
    for step, operation in enumerate(program.operations):
        if operation == "freeze" and not program.use_orig_params:
            continue  # a flat parameter of the root is frozen as a whole
        found, expected = ours.run(operation, step), plain.run(operation, step)
        at = f"seed {seed}, operation {step}: {operation}"
        for loss, every in zip(found, expected[rank :: len(plain.ranks)], strict=True):
            assert_close(loss, every, f"{at}: loss")
        for name, value in plain.state().items():
            mine = ours.state()[name]
            assert mine.dtype == value.dtype, f"{at}: {name}"
            assert_close(mine, value, f"{at}: {name}")


@pytest.mark.parametrize("seed", SEEDS_OF_TWO)
@on_ranks(2)
def test_programs_train_as_the_plain_model(rank: int, world_size: int, seed: int) -> None:
    run(seed, rank, world_size)


@pytest.mark.parametrize("seed", SEEDS_OF_FOUR)
@on_ranks(4)
def test_programs_of_four_ranks_train_as_the_plain_model(rank: int, world_size: int, seed: int) -> None:
    run(seed, rank, world_size)
