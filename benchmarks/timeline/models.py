"""The models of benchmarks.timeline and their wrapping by each implementation. Runs in a process of the
simulated GPU.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
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
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.common import fsdp_class
from benchmarks.lora import with_adapters
from fsdp_c.wrap import split_frozen

if TYPE_CHECKING:
    from benchmarks.timeline.row import Row
    from benchmarks.timeline.shapes import Model


LARGE = 48 * 2**30  # bytes of parameters above which a model is built unit by unit


class Block(nn.Module):
    """Attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.head_width = width // shape.heads
        kv_width = self.head_width * (shape.kv_heads or shape.heads)
        self.in_fp32 = shape.in_fp32
        self.attention_norm, self.feed_forward_norm = norm(shape), norm(shape)
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.feed_forward = Experts(shape) if shape.experts else FeedForward(width, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        projected = (layer(normed) for layer in (self.query, self.key, self.value))
        query, key, value = (in_heads(each, self.head_width) for each in projected)
        rotate = rotated_in_fp32 if self.in_fp32 else rotated
        query, key = (rotate(each, cosine, sine) for each in (query, key))
        mixed = attention(query, *(as_many_heads(each, query.shape[1]) for each in (key, value)))
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ComposedNorm(nn.RMSNorm):
    """RMSNorm composed of operators, as torchtitan and torch computed it before CUDA had a fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


def norm(shape: Model) -> nn.Module:
    return (ComposedNorm if shape.in_fp32 else nn.RMSNorm)(shape.width)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of experts in which each token is routed to two. The routing is not computed: every expert
    gets equally many tokens.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape.width, shape.hidden) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        sent = tokens.index_select(0, order // 2).chunk(len(self.experts))
        done = torch.cat([expert(part) for expert, part in zip(self.experts, sent, strict=True)])
        weighted = done * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, weighted).view_as(x)


class MptBlock(nn.Module):
    """Attention and a feed-forward network, with layer norms and one projection for query, key and value."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        width = shape.width
        self.head_width = width // shape.heads
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(self.attention_norm(x)).chunk(3, -1)
        mixed = attention(*(in_heads(each, self.head_width) for each in projected))
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


def in_heads(x: Tensor, head_width: int) -> Tensor:
    return x.unflatten(-1, (-1, head_width)).transpose(1, 2)


def as_many_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention, by the GPU's flash attention kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]  # type: ignore[no-any-return]


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def rotated_in_fp32(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of elements as complex numbers in fp32, as torchtitan does."""
    turns = torch.complex(cosine[:, ::2].float(), sine[:, ::2].float())
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(nn.Module):
    """A language model whose forward returns the loss."""

    def __init__(self, shape: Model, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm, self.head = norm(shape), nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(sequence, shape.width // shape.heads))
        self.in_fp32 = shape.in_fp32

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        dtype = torch.float32 if self.in_fp32 else x.dtype
        cosine, sine = self.cosine.to(dtype), self.sine.to(dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).to(dtype), targets.flatten())


class Mpt(nn.Module):
    """An MPT whose forward returns the loss. Its head shares the embedding's weight."""

    def __init__(self, shape: Model, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(sequence, shape.width)
        self.blocks = nn.ModuleList(MptBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # in fp32, as under autocast


def build(row: Row, shape: Model, sequence: int, machine: dict[str, Any]) -> tuple[nn.Module, int]:
    """Return the wrapped model and its total number of parameters. A large model is built and sharded unit by
    unit.
    """
    is_large = shape.nbytes > LARGE and row.implementation != "alone"
    with torch.device("meta" if is_large else "cuda"):
        model = (Mpt if shape.family == "mpt" else Llama)(shape, sequence)
        if row.adapters:
            with_adapters(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if row.recompute:
        recompute(model, row.recompute)
    if row.implementation == "alone":
        return model.to(torch.bfloat16), parameters
    mesh = mesh_of_nodes(machine) if row.strategy == "HYBRID_SHARD" else None
    if row.implementation == "torch.fsdp2":
        return fsdp2(row, model, mesh), parameters
    if row.implementation == "fsdp_c":
        # The model of time charges the host per profiler range. torch's FSDPs always open ranges, but name
        # them only while a profiler is on.
        torch.autograd.profiler._is_profiler_enabled = True
    splits = split_frozen() if row.adapters and row.implementation == "fsdp_c" else nullcontext()
    with splits:
        wrapped: Any = fsdp1(row, model, device_mesh=mesh)
    if row.implementation == "fsdp_c":
        order = wrapped._exec_order_data
        order._forward_prefetch_limit = order._backward_prefetch_limit = row.ahead
    return wrapped, parameters


def recompute(model: nn.Module, what: str) -> None:
    """Recompute activations of blocks in backward: "full", "operators" (all but attention and every other
    product, torchtitan's "selective op"), or a number n for every nth block.
    """
    options = {"context_fn": keeping_products} if what == "operators" else {}
    every = int(what) if what.isdigit() else 1
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        if number % every == 0:
            model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False, **options)  # type: ignore[index]


def keeping_products() -> Any:
    counted = {False: 0, True: 0}  # calls in the forward, and in its recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operator == torch.ops.aten._scaled_dot_product_flash_attention.default
        if operator == torch.ops.aten.mm.default:
            counted[context.is_recompute] += 1
            keeps = counted[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def mesh_of_nodes(machine: dict[str, Any]) -> DeviceMesh:
    """Return a mesh that replicates across nodes and shards within them."""
    per_node = machine["gpus_per_node"]
    nodes = dist.get_world_size() // per_node
    return init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard"))


def reduced_in(row: Row) -> torch.dtype:
    return torch.bfloat16 if row.reduce_in_bf16 else torch.float32


def fsdp1(row: Row, model: nn.Module, **ranks: Any) -> nn.Module:
    """Wrap with torch's FSDP1 or fsdp_c, over a ``device_mesh`` or ``process_group``."""
    blocks = set(model.blocks)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp_class(row.implementation)(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
            sharding_strategy=ShardingStrategy[row.strategy],
            device_id=torch.device("cuda", torch.cuda.current_device()),
            use_orig_params=True,
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
            mixed_precision=MixedPrecision(torch.bfloat16, reduced_in(row)),
            backward_prefetch=BackwardPrefetch[row.backward_prefetch],
            forward_prefetch=row.forward_prefetch,
            cpu_offload=CPUOffload(row.offload),
            **ranks,
        )


def fsdp2(row: Row, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduced_in(row))
    reshards = row.strategy != "SHARD_GRAD_OP"
    offload = CPUOffloadPolicy() if row.offload else OffloadPolicy()
    settings = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in model.blocks:  # type: ignore[union-attr]
        is_kept = row.keep_last and block is model.blocks[-1]  # type: ignore[index]
        fully_shard(block, reshard_after_forward=reshards and not is_kept, **settings)
    wrapped = fully_shard(model, reshard_after_forward=reshards, **settings)
    is_made = next(model.parameters()).device.type != "meta"
    return wrapped if is_made else wrapped.to_empty(device="cpu" if row.offload else "cuda")
