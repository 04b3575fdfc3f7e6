"""Views of freed parameters, in modules or kept from a forward: operations that need their values raise an error
that names the parameter, never read garbage and never crash.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.ranks import both_views, device, on_ranks
from tests.training import wrap

WIDTH = 8
# the last is the error of the simulated GPU for a freed storage
GONE = "gone with it|data pointer of Storage|values of scale are not gathered|storage was freed"


class Scaled(nn.Module):
    """Keeps its parameters of the last forward, and tensors derived from them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((2, 1), 0.5))
        self.kept: dict[str, Tensor] = {}
        self.derived: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.scale) is Tensor or isinstance(self.scale, nn.Parameter)
        self.kept = {"scale": self.scale, "inner.weight": self.inner.weight}
        self.derived = {
            "slice": self.scale[1:],
            "data": self.scale.data,
            "detached": self.inner.weight.detach(),
            "transposed": self.inner.weight.t(),
        }
        return self.inner(x) * self.scale.sum()


# reads and writes of the values of a tensor of two dimensions
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "exp": lambda t: t.exp(),
    "linear": lambda t: nn.functional.linear(torch.ones(3, t.size(1), device=device()), t),
    "stack in a dict": lambda t: torch.stack(tensors=[t, t]),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "data.clamp_": lambda t: t.data.clamp_(0, 1),
    "detach": lambda t: t.detach().add_(1),
    "copy from": lambda t: torch.ones(t.shape, device=device()).copy_(t),
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().cpu().numpy(),
    "asarray": lambda t: np.asarray(t.detach().cpu()),
    "repr": repr,
    "assign to an index": lambda t: t.__setitem__(0, 1.0),
    "bool": lambda t: bool(t[0, 0]),
    "iterate": lambda t: [row.sum() for row in t],
    "copy": lambda t: copy.copy(t).sum(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "data_ptr": lambda t: t.data_ptr(),
    "dlpack": lambda t: t.detach().__dlpack__(),
    "share_memory_": lambda t: t.detach().cpu().share_memory_(),
}
ONLY_BY_NAME: dict[str, Callable[[Tensor], Any]] = {  # harmless on a tensor whose storage is freed
    "data": lambda t: t.data,
    "detach alone": lambda t: t.detach(),
    "set data": lambda t: setattr(t, "data", torch.ones(2, 1)),
    "requires_grad_": lambda t: t.requires_grad_(),
}


def build(use_orig_params: bool, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    torch.manual_seed(3)
    return wrap(Scaled(), strategy=strategy, use_orig_params=use_orig_params, **options)


def batch(rank: int) -> Tensor:
    return torch.full((3, WIDTH), 0.1 + rank, device=device())


def attributes(model: Any) -> dict[str, Tensor]:
    return {"scale": model.module.scale, "inner.weight": model.module.inner.weight}


def assert_refused(views: dict[str, Tensor], rank: int) -> None:
    assert views
    for name, view in views.items():
        for operation in [*OPERATIONS.values(), *ONLY_BY_NAME.values()]:
            with pytest.raises(RuntimeError) as found:
                operation(view)
            message = str(found.value)
            for part in (f"rank {rank}, unit Scaled", f"values of {name} are", "summon_full_params(module)"):
                assert part in message
            assert "use_orig_params=True" in message


def assert_raising(tensors: dict[str, Tensor]) -> None:
    assert tensors
    for tensor in tensors.values():
        for operation in OPERATIONS.values():
            with pytest.raises((RuntimeError, BufferError)):
                operation(tensor)


@on_ranks(2)
def test_attributes_before_a_forward_or_after_one_without_gradients_are_refused(rank: int) -> None:
    model = build(False)
    assert_refused(attributes(model), rank)
    with torch.no_grad():
        model(batch(rank))
    assert_refused(attributes(model), rank)


@pytest.mark.parametrize("case", ["FULL_SHARD", "SHARD_GRAD_OP", "bf16"])
@both_views
@on_ranks(2)
def test_kept_views_are_refused_by_name_and_tensors_derived_from_them_raise(
    rank: int, use_orig_params: bool, case: str
) -> None:
    options = {"mixed_precision": MixedPrecision(torch.bfloat16)} if case == "bf16" else {"strategy": case}
    model = build(use_orig_params, **options)
    for _ in range(2):
        model(batch(rank)).sum().backward()
        assert_refused(model.module.kept, rank)
        if case != "bf16":
            assert_raising(model.module.derived)
        if not use_orig_params:
            assert_refused(attributes(model), rank)
        with FSDP.summon_full_params(model):
            assert model.module.scale.tolist() == [[0.5], [0.5]]


@on_ranks(2)
def test_metadata_of_freed_views_stays_readable(rank: int) -> None:
    model = build(False)
    for _ in range(2):
        scale = model.module.scale
        assert (scale.shape, scale.size(), scale.dtype) == (
            torch.Size([2, 1]),
            torch.Size([2, 1]),
            torch.float32,
        )
        assert (scale.numel(), scale.dim(), scale.stride(), len(scale)) == (2, 2, (1, 1), 2)
        assert scale.device == device() and scale.grad is None and scale.is_contiguous()
        assert isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter)
        assert hasattr(scale, "shape") and not hasattr(scale, "no_such_attribute")
        assert torch.is_floating_point(scale) and scale.untyped_storage().size() == 0
        scale.grad = None
        assert scale in {scale} and scale is model.module.scale
        assert "Linear(in_features=8" in repr(model)
        assert set(model.module.state_dict()) and model.module.inner.to(device()) is model.module.inner
        model(batch(rank)).sum().backward()
        assert scale.requires_grad


@both_views
@on_ranks(2)
def test_views_are_plain_tensors_in_forwards_and_whole_in_summon_full_params(
    rank: int, use_orig_params: bool
) -> None:
    model = build(use_orig_params)
    types = []
    for _ in range(3):
        output = model(batch(rank))
        output.register_hook(lambda _: types.append([type(view) for view in model.module.kept.values()]))
        output.sum().backward()
        with FSDP.summon_full_params(model), torch.no_grad():
            model.module.scale.clamp_(0.25, 1)
    assert types == [[Tensor, Tensor]] * 3


@on_ranks(2)
def test_views_of_a_freed_model_or_of_replaced_views_raise(rank: int) -> None:
    model = build(False)
    model(batch(rank)).sum().backward()
    scale = model.module.scale
    model.zero_grad()
    model._flat_param.data = model._flat_param.data.double()
    model(batch(rank).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"freed with it or have moved. To use it"):
        scale.sum()
    assert_refused(attributes(model), rank)
    scale = model.module.scale
    del model
    with pytest.raises(RuntimeError, match=GONE):
        scale.sum()


@both_views
@on_ranks(2)
def test_shards_between_steps_stay_readable(rank: int, use_orig_params: bool) -> None:
    model = build(use_orig_params, "FULL_SHARD" if use_orig_params else "NO_SHARD")
    model(batch(rank)).sum().backward()
    values = model.module.scale.detach().flatten().tolist()
    assert values == [0.5] * len(values)
    with torch.no_grad():
        model.module.scale.mul_(2)
    with FSDP.summon_full_params(model):
        assert model.module.scale.tolist() == [[1.0], [1.0]]
