"""What the simulated GPU promises: the rules of devices, streams, memory, random numbers and groups of
torch.cuda."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.ranks import on_ranks

GPU = torch.device("cuda", 0)


def test_tensors_of_the_cpu_and_of_the_gpu_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        torch.ones(3, device=GPU) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.ones(3, device=GPU) + torch.ones(3, device="cuda:1")
    # a number
    assert torch.equal(torch.ones(3, device=GPU) + torch.tensor(2.0), torch.full((3,), 3.0, device=GPU))


def test_fresh_and_freed_memory_is_full_of_nan() -> None:
    fresh = torch.empty(1000, device=GPU)
    assert bool(fresh.isnan().all())
    view = torch.zeros(1000, device=GPU)
    address, storage = view.data_ptr(), view.untyped_storage()
    storage.resize_(0)
    again = torch.empty(1000, device=GPU)
    assert again.data_ptr() == address and bool(again.isnan().all())


def test_a_pool_keeps_its_memory_while_it_lives_whoever_empties_the_cache() -> None:
    gc.collect()  # of what tests before have left nothing goes meanwhile
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.empty(2**25, dtype=torch.uint8, device=GPU)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + 2**25
    del pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_block_goes_to_its_own_stream_alone() -> None:
    other = torch.cuda.Stream()
    address = torch.empty(1000, device=GPU).data_ptr()
    with torch.cuda.stream(other):
        assert torch.empty(1000, device=GPU).data_ptr() != address
    assert torch.empty(1000, device=GPU).data_ptr() == address


def test_a_recorded_block_comes_back_when_its_user_is_through() -> None:
    other = torch.cuda.Stream()
    block = torch.zeros(1000, device=GPU)
    address = block.data_ptr()
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        block.add_(1)
        block.record_stream(other)
    del block
    assert torch.empty(1000, device=GPU).data_ptr() != address
    other.synchronize()
    assert torch.empty(1000, device=GPU).data_ptr() == address


def test_random_numbers_come_from_the_generator_of_the_device() -> None:
    torch.cuda.manual_seed(3)
    first = torch.randn(5, device=GPU)
    torch.manual_seed(4)
    torch.cuda.manual_seed(3)
    torch.randn(5)  # the CPU's own
    assert torch.equal(torch.randn(5, device=GPU), first)
    state = torch.cuda.get_rng_state()
    dropped = F.dropout(torch.ones(100, device=GPU), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(100, device=GPU), 0.5), dropped)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(5, device=GPU, generator=torch.Generator())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_compute_as_on_the_cpu(kind: type[nn.RNNBase], bias: bool) -> None:
    """They take a kernel of their own on a GPU."""
    torch.manual_seed(0)
    module, x = kind(5, 4, num_layers=2, bias=bias), torch.randn(3, 2, 5)
    results = []
    for device in ("cpu", "cuda"):
        given = x.detach().to(device).requires_grad_()
        module = module.to(device)
        module.zero_grad()
        output, state = module(given)
        (output.square().sum() + sum(each.sum() for each in state)).backward()
        results.append(
            [each.detach().cpu() for each in (output, given.grad, *(p.grad for p in module.parameters()))]
        )
    for of_cpu, of_gpu in zip(*results, strict=True):
        torch.testing.assert_close(of_cpu, of_gpu)


def test_the_host_may_not_wait_in_the_debug_mode_of_torch() -> None:
    tensor = torch.ones(3, device=GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            tensor.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_ranks(2, label="nccl")
def test_collectives_of_all_kinds(rank: int, world_size: int) -> None:
    group = nccl_group()
    own = torch.arange(4.0, device=GPU) + 10 * rank
    parts = [torch.empty(4, device=GPU) for _ in range(world_size)]
    dist.all_gather(parts, own, group=group)
    assert torch.stack(parts).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    half = torch.empty(2, device=GPU)
    dist.reduce_scatter_tensor(half, own, op=dist.ReduceOp.AVG, group=group)
    assert half.tolist() == ([5, 6] if rank == 0 else [7, 8])
    largest = own.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    assert largest.tolist() == [10, 11, 12, 13]
    received = [torch.empty(2, device=GPU) for _ in range(world_size)]
    dist.all_to_all(received, list(own.chunk(2)), group=group)
    assert [one.tolist() for one in received] == ([[0, 1], [10, 11]] if rank == 0 else [[2, 3], [12, 13]])
    dist.broadcast(own, 1, group=group)
    assert own.tolist() == [10, 11, 12, 13]
    if rank == 0:
        dist.send(own * 2, 1, group=group)
    else:
        dist.recv(own, 0, group=group)
        assert own.tolist() == [20, 22, 24, 26]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier(group=group)
