"""The models of benchmarks.timeline, and how each implementation wraps them. For a process of the simulated
GPU."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from benchmarks.common import fsdp_class
from fsdp_c.wrap import reshard_after_forward

if TYPE_CHECKING:
    from benchmarks.model_shapes import Model
    from benchmarks.timeline_row import Row


class Block(nn.Module):
    """Attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        projected = (layer(normed) for layer in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        query, key = (rotated(each, cosine, sine) for each in (query, key))
        mixed = attention(query, key, value)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        normed = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal, by the kernel that a GPU has for it."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]  # type: ignore[no-any-return]


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Llama(nn.Module):
    """A language model; its forward gives the loss."""

    def __init__(self, shape: Model, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(sequence, shape.width // shape.heads))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(row: Row, shape: Model, sequence: int, machine: dict[str, Any]) -> tuple[nn.Module, int]:
    """The wrapped model, and how many parameters it has in all."""
    with torch.device("cuda"):
        model = Llama(shape, sequence)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if row.implementation == "alone":
        return model.to(torch.bfloat16), parameters
    mesh = mesh_of_nodes(machine) if row.strategy == "HYBRID_SHARD" else None
    if row.implementation == "torch.fsdp2":
        return fsdp2(row, model, mesh, machine), parameters
    if row.implementation == "fsdp_c":
        # The host is charged by ranges, which it names for a profiler that is on, and torch's FSDPs always.
        torch.autograd.profiler._is_profiler_enabled = True
    with reshard_after_forward(mesh_of_nodes(machine)["shard"]) if reshards_to_node(row) else nullcontext():
        wrapped: Any = fsdp1(row, model, device_mesh=mesh)
    if row.implementation == "fsdp_c":
        order = wrapped._exec_order_data
        order._forward_prefetch_limit = order._backward_prefetch_limit = row.ahead
    return wrapped, parameters


def mesh_of_nodes(machine: dict[str, Any]) -> DeviceMesh:
    """Replicas across nodes, shards within."""
    per_node = machine["gpus_per_node"]
    nodes = dist.get_world_size() // per_node
    return init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard"))


def reshards_to_node(row: Row) -> bool:
    return row.implementation == "fsdp_c" and row.to_node


def fsdp1(row: Row, model: nn.Module, **ranks: Any) -> nn.Module:
    """torch's FSDP1, or fsdp_c, over a ``device_mesh`` or ``process_group``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp_class(row.implementation)(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[row.strategy],
            device_id=torch.device("cuda", 0),
            use_orig_params=True,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
            backward_prefetch=BackwardPrefetch[row.backward_prefetch],
            forward_prefetch=row.forward_prefetch,
            cpu_offload=CPUOffload(row.offload),
            **ranks,
        )


def fsdp2(row: Row, model: nn.Module, mesh: DeviceMesh | None, machine: dict[str, Any]) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reshards = machine["gpus_per_node"] if row.to_node else row.strategy != "SHARD_GRAD_OP"
    offload = CPUOffloadPolicy() if row.offload else OffloadPolicy()
    settings = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, reshard_after_forward=reshards, **settings)
    return fully_shard(model, reshard_after_forward=reshards, **settings)
