"""What the simulated GPU promises: the rules of devices, streams, memory, random numbers and groups of
torch.cuda."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

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
