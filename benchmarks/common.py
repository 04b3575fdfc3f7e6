"""Code shared by the benchmarks: implementations, a process group whose collectives do nothing, a tiny model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch  # noqa: E402  (reads the variables above)
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore  # noqa: E402

from tests.collectives import ALL_GATHER  # noqa: E402

IMPLEMENTATIONS = ("torch.fsdp1", "torch.fsdp2", "fsdp_c")


class NoopGroup(dist.ProcessGroup):
    """Rank 0 of a process group whose collectives pass torch's c10d dispatch and do nothing.

    The collectives of torch's fake backend have no effect either, but its all-gathers and reduce-scatters
    copy on the CPU, once per rank. This group calls the fake backend's broadcast instead, which touches no
    data: the dispatch is measured, the copies are not. Outputs are uninitialized.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)
        backend = FakeProcessGroup._create_internal(0, world_size)
        for device_type in ("cpu", "cuda"):
            self._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, backend)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.broadcast(inputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.broadcast([input])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        return self.broadcast(inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self.broadcast(outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.broadcast([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        return self.broadcast(outputs)

    # names of the same collectives in newer versions of torch
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def init_noop_group(world_size: int) -> None:
    """Make a NoopGroup the default process group."""
    if "NOOP" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "noop", lambda store, rank, size, timeout: NoopGroup(size), devices=["cpu", "cuda"]
        )
    dist.init_process_group("noop", rank=0, world_size=world_size, store=FakeStore())


class Block(nn.Module):
    """Linear layers, one after the other, with ``params`` parameters in all (two per layer)."""

    def __init__(self, params: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(params // 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    """A head and ``blocks`` Blocks: ``blocks + 1`` units if each Block is wrapped."""

    def __init__(self, blocks: int, params: int, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(params, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def without_reduction(implementation: str, model: Any) -> Iterator[None]:
    """Keep gradients unsharded in the body."""
    if implementation == "torch.fsdp2":
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def fsdp_class(implementation: str) -> type:
    """Return the FullyShardedDataParallel class of torch.fsdp1 or fsdp_c."""
    if implementation == "fsdp_c":
        from fsdp_c import FullyShardedDataParallel

        return FullyShardedDataParallel
    from torch.distributed.fsdp import FullyShardedDataParallel as Upstream

    return Upstream


def wrap(
    implementation: str,
    model: nn.Module,
    strategy: str,
    use_orig_params: bool,
    mixed_precision: bool,
    device: str = "cpu",
) -> nn.Module:
    """Shard a Stack on ``device``, one unit per Block. ``mixed_precision``: bf16 parameters, fp32 reduction."""
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed_precision else {}
    if implementation == "torch.fsdp2":
        mesh = dist.device_mesh.init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
        for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
            policy = MixedPrecisionPolicy(**precision)
            fully_shard(module, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD", mp_policy=policy)
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp_class(implementation)(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(**precision) if mixed_precision else None,
            use_orig_params=use_orig_params,
            device_id=torch.device(device),
        )


def give_fsdp1_its_cuda_gather() -> None:
    """Let torch's FSDP1 all-gather into one tensor on the CPU as on CUDA, where its CPU path fills a list of
    world_size chunks.

    The replacement makes the checks and the call of FSDP1's CUDA branch.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle, _p_assert

    def gather(self: Any, full: Tensor) -> Tensor:
        shard = self.flat_param.data
        wanted = shard.numel() * self.world_size
        _p_assert(hasattr(self, "process_group") and hasattr(self, "world_size"), "the handle has no group")
        _p_assert(full.numel() == wanted, f"{full.numel()} elements, {wanted} wanted")
        group = self._fake_process_group if self._use_fake_all_gather else self.process_group
        getattr(dist, ALL_GATHER)(full, shard, group)
        return full

    FlatParamHandle._all_gather_flat_param = gather  # type: ignore[method-assign]
