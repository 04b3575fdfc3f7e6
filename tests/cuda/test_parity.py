"""Training on a GPU, bitwise equal to torch's FSDP1: losses, gradients and parameters of every step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as UpstreamScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel
from fsdp_c.sharded_grad_scaler import ShardedGradScaler
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.models import WIDTH, Block, Net
from tests.parity.engine import same_bits
from tests.ranks import on_ranks
from tests.simulated_gpu import races

STEPS = 6
TIMEOUT_S = 180.0  # the first test on a rank creates its CUDA context and loads cuBLAS
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
REDUCE_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecision(param_dtype=torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "flat": {"use_orig_params": False},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": BF16},
    "bf16, reduced in fp32": {"mixed_precision": REDUCE_FP32},
    "fp16, with a scaler": {"mixed_precision": FP16},
    "forward prefetch, no limit": {"forward_prefetch": True, "limit_all_gathers": False},
    "prefetch after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "offload": {"cpu_offload": CPUOffload(True)},
}
SCALERS = {Upstream: UpstreamScaler, FullyShardedDataParallel: ShardedGradScaler}


def scaler_for(fsdp: type, options: dict[str, Any]) -> Any:
    """Return a gradient scaler, enabled for fp16. Its initial scale makes the first steps overflow and later
    ones not.
    """
    group = options.get("process_group") or dist.group.WORLD
    is_fp16 = options.get("mixed_precision") is FP16
    return SCALERS[fsdp](
        GPU.type, init_scale=2.0**26, growth_interval=2, process_group=group, enabled=is_fp16
    )


def train(
    fsdp: type,
    rank: int,
    no_sync: bool,
    checkpoint: bool,
    options: dict[str, Any],
    inputs_on: torch.device = CPU,
) -> list[Tensor]:
    """Train and return all results that a user can see, on the CPU."""
    torch.manual_seed(11)
    model: Any = fsdp(
        Net(5, checkpoint_mode="nonreentrant" if checkpoint else None),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        **({"device_id": GPU, "use_orig_params": True} | options),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = scaler_for(fsdp, options)
    seen: list[Tensor] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        if no_sync:
            with model.no_sync():
                scaler.scale(loss_of(model, generator, inputs_on)).backward()
        loss = loss_of(model, generator, inputs_on)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.detach().cpu(), model.clip_grad_norm_(0.5, (2.0, math.inf, 1.0)[step % 3]).cpu()]
        seen += [param.grad.cpu().clone() for param in model.parameters() if param.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [param.detach().cpu().clone() for param in model.parameters()]
    whole = model.state_dict()
    return seen + [value.cpu() for _, value in sorted(whole.items())]


def loss_of(model: Any, generator: torch.Generator, inputs_on: torch.device) -> Tensor:
    """Return the loss of a batch, by default on the CPU, which the root moves to the GPU. Dropout draws from the
    device's generator.
    """
    batch = torch.randn(4, WIDTH, generator=generator).to(inputs_on)
    return F.dropout(model(batch), 0.1).float().square().mean()


def assert_parity(rank: int, name: str, **how: Any) -> None:
    options = OPTIONS[name] | how.pop("options", {})
    with uploads_after_what_was_computed():
        expected = train(Upstream, rank, options=options, **how)
    races.forget()
    actual = train(FullyShardedDataParallel, rank, options=options, **how)
    assert len(expected) == len(actual)
    different = [
        place for place, pair in enumerate(zip(expected, actual, strict=True)) if not same_bits(*pair)
    ]
    assert not different, f"{len(different)} of {len(expected)}, the first at {different[0]}"


@contextlib.contextmanager
def uploads_after_what_was_computed() -> Iterator[None]:
    """Synchronize before uploads. With NO_SHARD and CPU offload torch's FSDP1 uploads parameters into memory
    that kernels may still use.
    """
    upload = FlatParamHandle.flat_param_to

    def wait_and_upload(handle: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        upload(handle, *args, **kwargs)

    with mock.patch.object(FlatParamHandle, "flat_param_to", wait_and_upload):
        yield


def over_nccl() -> dict[str, Any]:
    """Use one GPU, and return the arguments that make a model use NCCL."""
    torch.cuda.set_device(GPU)
    return {"process_group": nccl_group()}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(1, TIMEOUT_S, label="nccl")
def test_one_rank_trains_as_torch_does(rank: int, name: str) -> None:
    assert_parity(rank, name, no_sync=False, checkpoint=False, options=over_nccl())


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_two_ranks_train_as_torch_does(rank: int, name: str) -> None:
    assert_parity(rank, name, no_sync=False, checkpoint=False, options=over_nccl())


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "bf16, reduced in fp32"])
@on_ranks(4, TIMEOUT_S, label="nccl")
def test_four_ranks_accumulate_and_checkpoint_as_torch_does(rank: int, name: str) -> None:
    assert_parity(rank, name, no_sync=True, checkpoint=True, options=over_nccl())


@pytest.mark.parametrize("name", ["FULL_SHARD", "bf16, reduced in fp32"])
@on_ranks(4, TIMEOUT_S, label="nccl")
def test_four_ranks_shard_and_replicate_as_torch_does(rank: int, name: str) -> None:
    over_nccl()
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    shard, replicate = (
        dist.new_subgroups_by_enumeration(ranks, backend="nccl")[0] for ranks in (rows, columns)
    )
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": (shard, replicate)}
    assert_parity(rank, name, no_sync=True, checkpoint=False, options=hybrid)
