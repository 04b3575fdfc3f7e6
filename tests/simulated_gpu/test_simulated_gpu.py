"""Properties of the simulated GPU on which other tests rely: devices and fresh memory."""

from __future__ import annotations

import pytest
import torch

GPU = torch.device("cuda", 0)


def test_tensors_of_the_cpu_and_of_the_gpu_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        torch.ones(3, device=GPU) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.ones(3, device=GPU) + torch.ones(3, device="cuda:1")
    # a scalar on the CPU
    assert torch.equal(torch.ones(3, device=GPU) + torch.tensor(2.0), torch.full((3,), 3.0, device=GPU))


def test_fresh_and_freed_memory_is_full_of_nan() -> None:
    fresh = torch.empty(1000, device=GPU)
    assert bool(fresh.isnan().all())
    view = torch.zeros(1000, device=GPU)
    address, storage = view.data_ptr(), view.untyped_storage()
    storage.resize_(0)
    again = torch.empty(1000, device=GPU)
    assert again.data_ptr() == address and bool(again.isnan().all())
