"""Forwards inside summon_full_params: without gradients they run, and others are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding import common
from tests.parity.engine import implementation
from tests.ranks import both_views, device, on_ranks
from tests.storage import settled_nbytes
from tests.training import PER_BLOCK, batch, plain


def wrap(module: nn.Module, which: str = "fsdp_c", **arguments: Any) -> Any:
    defaults = {"device_id": device(), "use_orig_params": True, "auto_wrap_policy": PER_BLOCK}
    return implementation(which)(module, **(defaults | arguments))


@on_ranks(2)
def test_summon_waits_for_the_device_once_per_unit() -> None:
    """A-098: on entry. The gathering itself is waited for before the parameters are shown."""
    model = wrap(plain())
    with mock.patch.object(common, "synchronize", wraps=common.synchronize) as synchronize:
        with FSDP.summon_full_params(model):
            entered = synchronize.call_count
            assert all(not unit._handle.needs_unshard() for unit in FSDP.fsdp_modules(model))
        assert (entered, synchronize.call_count) == (len(FSDP.fsdp_modules(model)), entered)
    assert [call.args for call in synchronize.call_args_list] == [(device(),)] * entered


@pytest.mark.parametrize("recurse", [True, False])
@both_views
@on_ranks(2)
def test_forward_inside_summon_computes_with_the_parameters_that_are_shown(
    rank: int, use_orig_params: bool, recurse: bool
) -> None:
    """A-100: torch runs it and fails at the end of the context, about sizes. transformers generates so."""
    before = settled_nbytes()
    model, reference = wrap(plain(), use_orig_params=use_orig_params), plain()
    model(batch(rank)).square().mean().backward()
    with FSDP.summon_full_params(model, recurse), torch.no_grad():
        model.module.head.weight.zero_()
        reference.head.weight.zero_()
        for forward in (model, model.module, model):
            assert torch.equal(forward(batch(rank)), reference(batch(rank)))
    assert settled_nbytes() == before
    assert torch.equal(model(batch(rank)), reference(batch(rank)))


@both_views
@on_ranks(2)
def test_forward_inside_summon_is_in_full_precision_and_needs_no_other_rank(
    rank: int, use_orig_params: bool
) -> None:
    """A-100, A-091, A-094."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model, reference = wrap(plain(), use_orig_params=use_orig_params, mixed_precision=precision), plain()
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False), torch.no_grad():
        if rank == 0:
            assert torch.equal(model(batch(rank)), reference(batch(rank)))


@both_views
@on_ranks(2)
def test_forward_inside_summon_that_a_backward_could_follow_is_refused(
    rank: int, use_orig_params: bool
) -> None:
    """A-100: what is shown there is freed at the end of the context; and the parameters stay whole until
    then."""
    model = wrap(plain(), use_orig_params=use_orig_params)
    expected = {name: param.detach().clone() for name, param in plain().named_parameters()}
    model(batch(rank)).square().mean().backward()
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="rank.*Net.*SUMMON_FULL_PARAMS.*FORWARD.*no_grad"):
            model(batch(rank))
        assert all(torch.equal(param, expected[name]) for name, param in model.named_parameters())
    model(batch(rank)).square().mean().backward()
