"""An object with a rank and a size is accepted as a process group. Other missing methods raise when needed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import ShardedGradScaler, ShardingStrategy
from fsdp_c.compat.upstream import torch_version
from tests.ranks import both_views

CPU = torch.device("cpu")


class Double:
    """Says rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


class Summing(Double):
    """A group of one rank, whose all-reduce changes nothing."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return None


def wrap(group: Any, fsdp: type = FSDP, **arguments: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = ModuleWrapPolicy({nn.Linear})
    return fsdp(module, process_group=group, auto_wrap_policy=policy, device_id=CPU, **arguments)


def gradients(model: nn.Module) -> torch.Tensor:
    model(torch.ones(2, 4)).sum().backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


@both_views
def test_double_of_one_rank_is_wrapped_run_and_trained_without_any_group(use_orig_params: bool) -> None:
    model = wrap(Summing(0, 1), use_orig_params=use_orig_params)
    assert (model.rank, model.world_size) == (0, 1) and not dist.is_initialized()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert torch.equal(gradients(model), gradients(plain))


def test_double_of_several_ranks_shards_as_torch_shards() -> None:
    for rank in range(3):
        theirs, ours = (wrap(Double(rank, 3), fsdp) for fsdp in (Upstream, FSDP))
        for their_unit, our_unit in zip(Upstream.fsdp_modules(theirs), FSDP.fsdp_modules(ours), strict=True):
            if their_unit._flat_param is not None:
                assert torch.equal(their_unit._flat_param, our_unit._flat_param)


def test_collective_that_a_double_lacks_is_named_when_it_is_asked_for() -> None:
    with pytest.raises(
        TypeError, match=r"rank 1: its process group .*Double.* cannot all-gather: .*_allgather_base"
    ):
        wrap(Double(1, 3))(torch.ones(2, 4))
    model = wrap(Double(0, 1))
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(TypeError, match=r"rank 0: the process group .*Double.* has no method allreduce\(\)"):
        loss.backward()


def test_raw_backend_is_a_group(tmp_path: Any) -> None:
    backend = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)
    assert not isinstance(backend, dist.ProcessGroup)
    assert torch.equal(gradients(wrap(backend)), gradients(wrap(Summing(0, 1))))


class InPython(dist.ProcessGroup):
    """A group without a backend, as torch's group of threads. It transfers nothing."""

    calls: ClassVar[list[str]] = []

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        self.calls.append("all-gather")

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> None:
        self.calls.append("reduce-scatter")


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch calls older names")
def test_methods_that_a_group_in_python_overrides_are_called() -> None:
    gradients(wrap(InPython(0, 2)))
    assert (
        InPython.calls == ["all-gather"] * 5 + ["reduce-scatter"] * 2
    )  # the first compares the ranks' plans


def test_scaler_takes_a_double() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=Double(0, 1))
    assert scaler.scale(torch.ones(1)).item() == 2.0


def test_pair_of_doubles_is_no_hybrid_group() -> None:
    """Hybrid strategies require torch's process groups, as in torch's FSDP1."""
    with pytest.raises(ValueError, match="tuple of two process groups"):
        wrap((Double(0, 2), Double(0, 2)), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_wrapping_without_a_process_group_names_init_process_group() -> None:
    assert not dist.is_initialized()
    module = nn.Linear(3, 3)
    words = r"init_process_group\(\) before wrapping, in a script started with torchrun"
    with pytest.raises(ValueError, match=words):
        FSDP(module)
    assert type(module.weight) is nn.Parameter
