"""Rows of the surface that need ranks and belong to no other file: corners of construction, step and
summon."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding import common, materialization
from fsdp_c.sharding.traversal import Subtree
from tests.models import WIDTH, Net
from tests.parity.engine import Point, Run, Scenario, compare, implementation
from tests.parity.scenarios import clip_step
from tests.ranks import both_views, device, on_ranks
from tests.storage import HELD_BACK, settled_nbytes
from tests.training import PER_BLOCK, batch, plain


def wrap(module: nn.Module, which: str = "fsdp_c", **arguments: Any) -> Any:
    defaults = {"device_id": device(), "use_orig_params": True, "auto_wrap_policy": PER_BLOCK}
    return implementation(which)(module, **(defaults | arguments))


# ------------------------------------------------------------------ summon_full_params


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


# ------------------------------------------------------------------ clipping


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@both_views
@on_ranks(4)
def test_hybrid_gradients_are_clipped_as_in_torch(
    rank: int, world_size: int, use_orig_params: bool, norm_type: float
) -> None:
    """A-118: replicas hold equal gradients, so that the norm is over the shards alone."""
    from tests.distributed.test_hybrid import groups

    def build(run: Run) -> nn.Module:
        return run.wrap(Net(), auto_wrap_policy=PER_BLOCK, process_group=groups(2, 2))

    point = Point("hybrid_clip", "HYBRID_SHARD", use_orig_params)
    compare(point, Scenario(build, clip_step(norm_type)), rank, world_size)


# ------------------------------------------------------------------ views


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


# ------------------------------------------------------------------ memory


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


# ------------------------------------------------------------------ construction


@on_ranks(2)
def test_only_own_tensors_that_are_on_the_cpu_are_moved() -> None:
    """G-033: gradients with them; neither nested units nor ignored tensors. A dtype stands for the device,
    which ``Tensor.to`` takes as well.
    """
    with torch.device("cpu"):
        model = plain(blocks=2)
    model.blocks[0] = wrap(model.blocks[0], auto_wrap_policy=None)
    model.inp = nn.Linear(WIDTH, WIDTH, device="meta")
    model.register_buffer("own", torch.ones(1, device="cpu"))
    for param in model.head.parameters():
        param.grad = torch.zeros_like(param)
    tree = Subtree(model)
    params = [param for param in tree.params if param is not model.head.bias]
    materialization.move_to_device(tree, params, {model.blocks[1]}, torch.float64)
    moved = [name for name, param in model.named_parameters() if param.dtype == torch.float64]
    assert moved and not any("fsdp_wrapped" in name or name.startswith("inp") for name in moved)
    assert model.head.weight.grad.dtype == torch.float64
    assert (model.head.bias.dtype, model.head.bias.grad.dtype) == (torch.float32, torch.float32)
    assert {name for name, buffer in model.named_buffers() if buffer.dtype == torch.float64} == {"own"}


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "own"])
@on_ranks(2)
def test_meta_buffer_of_an_ignored_module_does_not_count(ignored: bool) -> None:
    """G-035: with one of its own on the meta device a unit is initialised, and param_init_fn called."""
    model = plain(blocks=1)
    model.blocks[0].scale = model.blocks[0].scale.to("meta")
    called: list[nn.Module] = []

    def param_init_fn(module: nn.Module) -> None:
        called.append(module)
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")

    arguments = {"ignored_modules": [model.blocks[0]]} if ignored else {}
    wrap(model, auto_wrap_policy=None, param_init_fn=param_init_fn, **arguments)
    assert bool(called) != ignored


# ------------------------------------------------------------------ what libraries write


@both_views
@on_ranks(2)
def test_parameters_upcast_before_the_first_forward_train_as_in_torch(
    rank: int, use_orig_params: bool
) -> None:
    """H-009: accelerate replaces the data of flat parameters, and says so to the handle."""
    found = []
    for which in ("torch", "fsdp_c"):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = wrap(plain().bfloat16(), which, use_orig_params=use_orig_params, mixed_precision=precision)
        for unit in type(model).fsdp_modules(model):
            if unit._has_params:
                unit._flat_param.data = unit._flat_param.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
        optimizer = torch.optim.SGD([unit._flat_param for unit in type(model).fsdp_modules(model)], lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(batch(rank)).float().square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(loss.detach())
        assert {unit._flat_param.dtype for unit in type(model).fsdp_modules(model)} == {torch.float32}
        found.append((losses, [unit._flat_param.detach() for unit in type(model).fsdp_modules(model)]))
    for expected, actual in zip(*found, strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("own", [True, False], ids=["with parameters", "without"])
@on_ranks(1)
def test_a_root_moves_the_inputs_to_where_its_tree_computes(own: bool) -> None:
    """D-020: also a root whose parameters all belong to inner units."""
    inner = wrap(nn.Linear(WIDTH, WIDTH))
    model = wrap(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), inner) if own else nn.Sequential(inner), auto_wrap_policy=None
    )
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(torch.ones(2, WIDTH, device="meta"))
