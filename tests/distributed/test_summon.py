"""summon_full_params: values, edits, gradients and errors, beside torch's FSDP1 and the unwrapped model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_c.training import unshard_params
from tests.distributed.test_state_dict import full_state_dict, plain, train, wrap
from tests.models import WIDTH, Block
from tests.parity.engine import different_paths, implementation, same_bits, snapshot
from tests.ranks import all_strategies, both_views, device, on_ranks
from tests.storage import settled_nbytes
from tests.training import assert_same, batch


def gathered_nbytes(model: Any) -> int:
    """Unsharded parameter storage of this model alone."""
    return sum(handle.unsharded_nbytes for handle in model._all_handles)


def shown(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def summon(model: Any, **options: Any) -> Any:
    return implementation("fsdp_c").summon_full_params(model, **options)


@all_strategies
@both_views
@on_ranks(2)
def test_parameters_that_are_moved_and_moved_back_train_on(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    """verl moves the model to the CPU, reads its state dict and moves it back."""
    model, expected = (wrap(plain(), use_orig_params, sharding_strategy=strategy) for _ in range(2))
    with summon(model, writeback=False):
        moved = model.module.double().state_dict()
        assert_same(plain().double().state_dict(), moved)
        model.module.float()
    assert_same(full_state_dict(expected), full_state_dict(model))
    train(model, rank)
    train(expected, rank)
    assert_same(full_state_dict(expected), full_state_dict(model))


@both_views
@on_ranks(2)
def test_offload_to_cpu_summons_on_the_cpu_and_keeps_edits(use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params)
    with pytest.warns(UserWarning, match="rank0_only=True"), summon(model, offload_to_cpu=True):
        assert_same(dict(plain().named_parameters()), shown(model))
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        with torch.no_grad():
            model.module.inp.bias.fill_(3)
    assert_same(plain().state_dict() | {"inp.bias": torch.full((WIDTH,), 3.0)}, full_state_dict(model))


@pytest.mark.parametrize("writeback", [True, False])
@both_views
@on_ranks(2)
def test_copies_of_an_offload_carry_their_edits_back(use_orig_params: bool, writeback: bool) -> None:
    from fsdp_c.training import unshard_params

    model = wrap(plain(), use_orig_params, auto_wrap_policy=None)
    model._lazy_init()
    model._handle.summon_enter(writeback)
    with unshard_params._offloaded(model._handle, writeback):
        assert gathered_nbytes(model) == 0
        assert model.module.inp.bias.device.type == "cpu"
        assert same_bits(model.module.inp.bias, plain().inp.bias)
        with torch.no_grad():
            model.module.inp.bias.fill_(3)
    model._handle.summon_exit()
    bias = torch.full((WIDTH,), 3.0) if writeback else plain().inp.bias.detach()
    assert_same(plain().state_dict() | {"inp.bias": bias}, full_state_dict(model))


@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_full_gradients_and_edits_of_them_equal_torchs(rank: int, strategy: str, writeback: bool) -> None:
    seen = []
    for which in ("torch", "fsdp_c"):
        model = wrap(plain(extra=True), True, which, sharding_strategy=strategy)
        model(torch.arange(2.0 * WIDTH).view(2, WIDTH) * (rank + 1)).sum().backward()
        with type(model).summon_full_params(model, with_grads=True, writeback=writeback), torch.no_grad():
            grads = {name: param.grad for name, param in model.named_parameters()}
            record = {f"inside {name}": grad.clone() for name, grad in grads.items() if grad is not None}
            for grad in grads.values():
                if grad is not None:
                    grad.mul_(3)
        after = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        seen.append(record | after)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        seen[-1].update(full_state_dict(model))
    assert len(seen[0]) > 10
    assert_same(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_ranks_without_a_gradient_are_counted_in_integers(dtype: torch.dtype) -> None:
    """bfloat16 cannot count above 256, and then gives gradients to ranks that have none."""
    model = wrap(plain().to(dtype))
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        with summon(model, with_grads=True, writeback=False):
            assert all(param.grad is None for param in model.parameters())
    counts = {call.args[0].dtype for call in all_reduce.call_args_list}
    assert counts and not any(each.is_floating_point for each in counts), counts


@on_ranks(2)
def test_rank0_only_summons_full_gradients_on_rank_0_alone(rank: int) -> None:
    model = wrap(plain())
    model(torch.ones(2, WIDTH)).sum().backward()
    sharded = snapshot([param.grad for param in model.parameters()])
    with summon(model, with_grads=True, rank0_only=True, writeback=False):
        if rank == 0:
            assert all(param.grad.shape == param.shape for param in model.parameters())
        else:
            assert all(param.dim() == 1 for param in model.parameters())
    assert not different_paths(sharded, [param.grad for param in model.parameters()])


@both_views
@on_ranks(2)
def test_summon_without_recurse_unshards_only_the_unit_itself(use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params)
    with summon(model, recurse=False):
        assert model.module.inp.weight.shape == (WIDTH, WIDTH)
        assert all(param.dim() == 1 for param in model.module.blocks.parameters())
    holder = nn.Sequential(model)
    with summon(holder, recurse=False):
        assert all(param.dim() == 1 for param in model.parameters())
    with summon(holder):
        assert model.module.blocks[0].up.weight.shape == plain().blocks[0].up.weight.shape


@both_views
@on_ranks(2)
def test_exception_in_the_body_leaves_the_parameters_sharded(rank: int, use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params)
    with pytest.raises(ZeroDivisionError), summon(model):
        raise ZeroDivisionError
    assert all(param.dim() == 1 for param in model.parameters())
    train(model, rank)


@both_views
@on_ranks(2)
def test_units_left_gathered_by_a_forward_stay_so(use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params, sharding_strategy="SHARD_GRAD_OP")
    output = model(torch.ones(2, WIDTH))
    gathered = gathered_nbytes(model)
    with summon(model):
        pass
    assert gathered_nbytes(model) == gathered > 0
    output.sum().backward()
    reference = wrap(plain(), use_orig_params, sharding_strategy="SHARD_GRAD_OP")
    reference(torch.ones(2, WIDTH)).sum().backward()
    found, expected = ([param.grad for param in one.parameters()] for one in (model, reference))
    assert any(grad is not None for grad in found) and not different_paths(expected, found)


@on_ranks(2)
def test_module_without_units_is_left_alone() -> None:
    block = Block()
    with summon(block):
        assert_same(dict(block.named_parameters()), shown(block))


# ----------------------------------------------------------------- forwards inside


@on_ranks(2)
def test_summon_waits_for_the_device_once_per_unit() -> None:
    """It waits on entry. The all-gather is waited for before modules get the parameters."""
    model = wrap(plain())
    with mock.patch.object(unshard_params, "synchronize", wraps=unshard_params.synchronize) as synchronize:
        with summon(model):
            entered = synchronize.call_count
            assert all(not unit._handle.needs_unshard() for unit in type(model).fsdp_modules(model))
        assert (entered, synchronize.call_count) == (len(type(model).fsdp_modules(model)), entered)
    assert [call.args for call in synchronize.call_args_list] == [(device(),)] * entered


@pytest.mark.parametrize("recurse", [True, False])
@both_views
@on_ranks(2)
def test_forward_inside_summon_uses_the_summoned_parameters(
    rank: int, use_orig_params: bool, recurse: bool
) -> None:
    """Torch runs it and fails at the end of the context, about sizes. transformers generates so."""
    before = settled_nbytes()
    model, reference = wrap(plain(), use_orig_params), plain()
    model(batch(rank)).square().mean().backward()
    with summon(model, recurse=recurse), torch.no_grad():
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
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model, reference = wrap(plain(), use_orig_params, mixed_precision=precision), plain()
    with summon(model, rank0_only=True, writeback=False), torch.no_grad():
        if rank == 0:
            assert torch.equal(model(batch(rank)), reference(batch(rank)))


@both_views
@on_ranks(2)
def test_forward_inside_summon_with_gradients_enabled_is_refused(rank: int, use_orig_params: bool) -> None:
    """Summoned parameters are freed at the end of the context, and stay unsharded until then."""
    model = wrap(plain(), use_orig_params)
    model(batch(rank)).square().mean().backward()
    with summon(model):
        with pytest.raises(RuntimeError, match="rank.*Net.*SUMMON_FULL_PARAMS.*FORWARD.*no_grad"):
            model(batch(rank))
        assert_same(shown(plain()), shown(model))
    model(batch(rank)).square().mean().backward()
