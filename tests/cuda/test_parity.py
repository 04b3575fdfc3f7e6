"""Training on a GPU, bit for bit torch's FSDP1: losses, gradients and parameters of every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import FullyShardedDataParallel
from tests.cuda.gloo_on_cuda import through_the_cpu
from tests.models import WIDTH, Block, Net
from tests.ranks import on_ranks

STEPS = 6
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
REDUCE_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "flat": {"use_orig_params": False},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": BF16},
    "bf16, reduced in fp32": {"mixed_precision": REDUCE_FP32},
    "forward prefetch, no limit": {"forward_prefetch": True, "limit_all_gathers": False},
    "prefetch after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "offload": {"cpu_offload": CPUOffload(True)},
}


def train(fsdp: type, rank: int, no_sync: bool, checkpoint: bool, options: dict[str, Any]) -> list[Tensor]:
    """Everything a user can see, on the CPU."""
    torch.manual_seed(11)
    model: Any = fsdp(
        Net(5, checkpoint_mode="nonreentrant" if checkpoint else None),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cuda", 0),
        **({"use_orig_params": True} | options),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen: list[Tensor] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        if no_sync:
            with model.no_sync():
                model(torch.randn(4, WIDTH, generator=generator).cuda()).float().square().mean().backward()
        loss = model(torch.randn(4, WIDTH, generator=generator).cuda()).float().square().mean()
        loss.backward()
        seen += [loss.detach().cpu(), model.clip_grad_norm_(0.5).cpu()]
        seen += [param.grad.cpu().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().cpu().clone() for param in model.parameters()]
    whole = model.state_dict()
    return seen + [value.cpu() for _, value in sorted(whole.items())]


def assert_parity(rank: int, name: str, **how: bool) -> None:
    torch.cuda.set_device(0)
    expected, actual = (
        train(fsdp, rank, options=OPTIONS[name], **how) for fsdp in (Upstream, FullyShardedDataParallel)
    )
    assert len(expected) == len(actual)
    different = [place for place, pair in enumerate(zip(expected, actual, strict=True)) if not torch.equal(*pair)]
    assert not different, f"{len(different)} of {len(expected)}, the first at {different[0]}"


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(1)
def test_one_rank_trains_as_torch_does(rank: int, world_size: int, name: str) -> None:
    with through_the_cpu():
        assert_parity(rank, name, no_sync=False, checkpoint=False)


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_two_ranks_on_one_gpu_train_as_torch_does(rank: int, world_size: int, name: str) -> None:
    with through_the_cpu():
        assert_parity(rank, name, no_sync=False, checkpoint=False)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "bf16, reduced in fp32"])
@on_ranks(4)
def test_four_ranks_accumulate_and_checkpoint_as_torch_does(rank: int, world_size: int, name: str) -> None:
    with through_the_cpu():
        assert_parity(rank, name, no_sync=True, checkpoint=True)


# ---- what only a GPU shows


def large(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))
    return FullyShardedDataParallel(
        layers,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cuda", 0),
        **options,
    )


@pytest.fixture
def one_of_four() -> Iterator[None]:
    """The first of ranks whose collectives send nothing: memory and time are as with others, numbers are not."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def step(model: nn.Module) -> None:
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    model.zero_grad()


@pytest.mark.usefixtures("one_of_four")
def test_a_step_takes_no_memory_from_the_driver_after_the_first() -> None:
    model = large()
    for _ in range(2):
        step(model)
    before = torch.cuda.memory_stats()
    for _ in range(5):
        step(model)
    after = torch.cuda.memory_stats()
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert after["reserved_bytes.all.peak"] == before["reserved_bytes.all.peak"]


@pytest.mark.usefixtures("one_of_four")
def test_peak_memory_does_not_depend_on_timing() -> None:
    """The same whether the host runs far ahead of the device or waits for it after every unit."""
    peaks = []
    for slow in (False, True):
        model = large()
        for module in model.modules() if slow else ():
            module.register_forward_hook(lambda *_: torch.cuda.synchronize())
        step(model)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step(model)
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del model
    assert peaks[0] == peaks[1]


@pytest.mark.usefixtures("one_of_four")
def test_a_step_never_waits_for_the_device() -> None:
    model = large(limit_all_gathers=False)
    step(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients(model: nn.Module, delay: int) -> list[Tensor]:
    """With the device made late, an order that events do not keep shows as other numbers."""
    torch.manual_seed(0)
    found = []
    for index in range(4):
        torch.cuda._sleep(index * delay)
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        found += [param.grad.cpu() for param in model.parameters() if param.grad is not None]
        model.zero_grad()
    return found


@on_ranks(2)
def test_results_do_not_depend_on_timing(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    with through_the_cpu():
        model = large()
        assert all(map(torch.equal, gradients(model, 0), gradients(model, 3_000_000)))
