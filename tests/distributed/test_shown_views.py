"""What modules show in a forward: views with history, set past or by their classes, over copies that are freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH
from tests.parity.engine import implementation
from tests.ranks import both_views, device, on_ranks
from tests.storage import HELD_BACK, settled_nbytes
from tests.training import PER_BLOCK, batch, plain


def wrap(module: nn.Module, which: str = "fsdp_c", **arguments: Any) -> Any:
    defaults = {"device_id": device(), "use_orig_params": True, "auto_wrap_policy": PER_BLOCK}
    return implementation(which)(module, **(defaults | arguments))


class TurnsGradOn(nn.Module):
    """Computes with history whatever it is called under."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.layer(x)


@both_views
@on_ranks(2)
def test_views_have_history_in_a_forward_without_gradients(use_orig_params: bool) -> None:
    """C-071."""
    for which in ("torch", "fsdp_c"):
        model = wrap(TurnsGradOn(), which, use_orig_params=use_orig_params, auto_wrap_policy=None)
        layer = model.module.layer
        seen: list[Tensor] = []
        layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(module.weight))
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        assert seen[0].grad_fn is not None and seen[0].requires_grad, which


@both_views
@on_ranks(2)
def test_unit_prefetched_in_a_forward_without_gradients_trains(rank: int, use_orig_params: bool) -> None:
    """C-071: reentrant checkpointing runs the blocks under no_grad first, and gathers the next one ahead
    there."""
    models = [wrap(plain(), use_orig_params=use_orig_params, forward_prefetch=True) for _ in range(2)]
    grads = []
    for model, recompute in zip(models, (False, True), strict=True):
        for _ in range(2):
            x = batch(rank).requires_grad_()
            output = checkpoint(model, x, use_reentrant=True) if recompute else model(x)
            output.square().mean().backward()
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    assert grads[0] and len(grads[0]) == len(grads[1])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


class Watching(nn.Linear):
    """Keeps what is set on it, as torch's RNNs keep a list of their weights."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            vars(self)["mine"] = self.weight


@both_views
@on_ranks(2)
def test_classes_that_watch_their_attributes_see_every_change(use_orig_params: bool) -> None:
    """C-077: by setattr where a class overrides it; otherwise past it, which nobody can tell from outside."""
    module = nn.Sequential(Watching(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = wrap(module, use_orig_params=use_orig_params, auto_wrap_policy=None)
    watching, other = module
    seen: list[tuple[bool, torch.Size]] = []
    hook = lambda *_: seen.append((watching.mine is watching.weight, watching.weight.shape))  # noqa: E731
    watching.register_forward_pre_hook(hook)
    model(torch.ones(2, WIDTH)).sum().backward()
    with FSDP.summon_full_params(model):
        hook()
        assert isinstance(watching.mine, nn.Parameter)
    assert seen == [(True, (WIDTH, WIDTH))] * 2
    assert watching.mine is watching.weight
    assert isinstance(other.weight, nn.Parameter) == use_orig_params
    assert ("weight" in other._parameters) != ("weight" in vars(other))


@both_views
@on_ranks(2)
def test_low_precision_copy_of_an_unsharded_unit_is_freed(rank: int, use_orig_params: bool) -> None:
    """C-094: NO_SHARD under mixed precision computes in a copy, which goes after forward and after
    backward."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrap(
        plain(),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=low,
        auto_wrap_policy=None,
    )
    before = settled_nbytes()
    inside: list[int] = []
    model.module.head.register_forward_hook(lambda *_: inside.append(_C.live_unsharded_nbytes() - before))
    output = model(batch(rank))
    assert inside == [2 * model._handle.layout.padded_numel]
    assert _C.live_unsharded_nbytes() == before + HELD_BACK * inside[0]
    output.float().square().mean().backward()
    assert _C.live_unsharded_nbytes() == before
    full_precision = wrap(plain(), sharding_strategy=ShardingStrategy.NO_SHARD)
    full_precision(batch(rank))
    assert _C.live_unsharded_nbytes() == before


@both_views
@on_ranks(2)
def test_module_in_the_dtype_of_computation_has_no_low_precision_copy(
    rank: int, use_orig_params: bool
) -> None:
    """C-019: it computes in the shard itself where nothing is sharded."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrap(
        plain().bfloat16(),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=low,
        auto_wrap_policy=None,
    )
    shard = model._flat_param.untyped_storage().data_ptr()
    inside: list[bool] = []
    head = model.module.head
    head.register_forward_hook(lambda *_: inside.append(head.weight.untyped_storage().data_ptr() == shard))
    model(batch(rank)).float().square().mean().backward()
    assert inside == [True] and model._flat_param.untyped_storage().data_ptr() == shard
