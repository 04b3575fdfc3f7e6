"""Models of fake tensors, which have no memory, can be wrapped and stepped: any size on one machine."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel
from fsdp_c.compat.upstream import torch_version
from tests.collectives import fake_ranks
from tests.ranks import both_views

_group = fake_ranks(0, 64, scope="function")

PRECISIONS = {"fp32": None, "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def stepped(cls: Any, use_orig_params: bool, precision: str) -> list[Any]:
    """Return the shapes and dtypes after two steps."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(
            nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 64))),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            use_orig_params=use_orig_params,
            mixed_precision=PRECISIONS[precision],
            device_id=torch.device("cpu"),
        )
        found: list[Any] = []
        for _ in range(2):
            output = model(torch.randn(2, 64))
            output.sum().backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            assert all(isinstance(grad, FakeTensor) for grad in grads)
            found += [(tuple(each.shape), each.dtype) for each in (output, *model.parameters(), *grads)]
            model.zero_grad()
        return found


@pytest.mark.parametrize("precision", PRECISIONS)
@both_views
@pytest.mark.skipif(torch_version() < (2, 11), reason="torch 2.10's collectives do not take fake tensors")
def test_steps_of_fake_tensors_have_torchs_shapes(use_orig_params: bool, precision: str) -> None:
    expected = stepped(Upstream, use_orig_params, precision)
    assert stepped(FullyShardedDataParallel, use_orig_params, precision) == expected


@both_views
def test_a_first_forward_of_real_parameters_under_the_mode_is_refused(use_orig_params: bool) -> None:
    """Without the check, code would use the forward's fake outputs as if they had memory."""
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    model = FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with pytest.raises(
            RuntimeError, match="rank 0, unit Sequential: its parameters are real, .* real forward"
        ):
            model(torch.ones(2, 64))
    model(torch.ones(2, 64)).sum().backward()
    if torch_version() >= (2, 11):  # torch 2.10's collectives do not take fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            assert isinstance(model(torch.ones(2, 64)), FakeTensor)
    model(torch.ones(2, 64)).sum().backward()
    assert all(type(param.grad) is torch.Tensor for param in model.parameters() if param.numel())


@both_views
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: FakeTensorMode(allow_non_fake_inputs=True)])
def test_a_model_may_be_collected_inside_a_compilation(
    use_orig_params: bool, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    module = nn.Sequential(
        FullyShardedDataParallel(nn.Linear(64, 32), use_orig_params=use_orig_params), nn.Linear(32, 64)
    )
    model = FullyShardedDataParallel(module, use_orig_params=use_orig_params)
    total = model(torch.ones(2, 64)).sum()
    gone = weakref.ref(model)
    with mode():
        del module, model
        gc.collect()
    assert gone() is None and not ignored, ignored
    total.backward()
