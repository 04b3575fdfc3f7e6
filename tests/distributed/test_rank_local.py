"""torch's total norms and GradScaler on sharded gradients: the whole model's under
install(), else one warning."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import ShardedGradScaler
from fsdp_c.compat.upstream import torch_version
from tests.distributed.test_misuse_checks import backward, installed, nothing_told, wrapped
from tests.models import WIDTH, Net
from tests.pairwise import pairwise
from tests.ranks import VIEWS, both_views, device, on_ranks
from tests.training import average_gradients, batch


def averaged(net: nn.Module, rank: int) -> nn.Module:
    """``net`` with the gradients of all ranks' batches, averaged by hand."""
    backward(net, rank)
    average_gradients(net)
    return net


def grads_of(params: Any) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def of_all_ranks(value: Tensor | float) -> list[float]:
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, float(value))
    return values


def plain_net() -> Net:
    torch.manual_seed(5)
    return Net().to(device())


# ----------------------------------------------------------------- total norms


@pytest.mark.parametrize("kind", [TorchFSDP, FSDP])
@both_views
@on_ranks(2)
def test_get_total_norm_without_install_is_local_and_warned_of_once(
    rank: int, use_orig_params: bool, kind: Any
) -> None:
    model = wrapped(kind, use_orig_params=use_orig_params)
    backward(model, rank)
    warned = pytest.warns(
        UserWarning, match=rf"rank {rank}, unit Net: .*get_total_norm.*model.clip_grad_norm_"
    )
    with warned if kind is FSDP else contextlib.nullcontext():
        norms = of_all_ranks(torch.nn.utils.get_total_norm(grads_of(model.parameters())))
    assert norms[0] != norms[1]
    with nothing_told():
        torch.nn.utils.get_total_norm(grads_of(model.parameters()))
        torch.nn.utils.get_total_norm([torch.ones(3)])


@on_ranks(2)
def test_get_total_norm_of_unsharded_gradients_is_not_warned_of(rank: int) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    backward(model, rank)
    with nothing_told():
        norm = torch.nn.utils.get_total_norm(grads_of(model.parameters()))
        assert len(set(of_all_ranks(norm))) == 1
        model = wrapped(use_orig_params=True)
        backward(model, rank)
        with FSDP.summon_full_params(model, with_grads=True):
            assert math.isclose(
                torch.nn.utils.get_total_norm(grads_of(model.parameters())), norm, rel_tol=1e-5
            )


@pairwise(
    strategy=["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"], norm_type=[2.0, math.inf, 3], use_orig_params=VIEWS
)
@on_ranks(2)
def test_norms_and_clipping_after_install_are_the_plain_modules(
    rank: int, use_orig_params: bool, norm_type: float, strategy: str
) -> None:
    net = averaged(plain_net(), rank)
    expected = torch.nn.utils.get_total_norm(grads_of(net.parameters()), norm_type)
    assert expected > 0.05
    clip_grads_with_norm_(net.parameters(), 0.05, expected)
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    model, clipped, by_torch = (wrapped(**options) for _ in range(3))
    for one in (model, clipped, by_torch):
        backward(one, rank)
    with installed(), nothing_told():
        for foreach in (None, True, False):
            norm = torch.nn.utils.get_total_norm(grads_of(model.parameters()), norm_type, True, foreach)
            torch.testing.assert_close(norm, expected)
            assert len(set(of_all_ranks(norm))) == 1
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        assert torch.equal(clipped.clip_grad_norm_(0.05, norm_type), norm)
        clip = torch.nn.utils.clip_grad_norm_
        assert torch.equal(clip(by_torch.parameters(), 0.05, norm_type, error_if_nonfinite=True), norm)
    assert torch.nn.utils.clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"
    for one in (model, by_torch):
        assert all(map(torch.equal, grads_of(one.parameters()), grads_of(clipped.parameters())))
    if not use_orig_params:
        return
    with FSDP.summon_full_params(model, with_grads=True):
        whole = grads_of(model.parameters())
        assert len(whole) == len(grads_of(net.parameters()))
        for one, other in zip(whole, grads_of(net.parameters()), strict=True):
            torch.testing.assert_close(one, other)


@both_views
@on_ranks(2)
def test_norms_and_clipping_after_install_of_units_and_other_gradients(
    rank: int, use_orig_params: bool
) -> None:
    """Of one unit, of another model, of an ignored module and of a plain one, also as views of gradients."""
    plain = [averaged(plain_net(), rank) for _ in range(2)]
    plain.append(averaged(nn.Linear(WIDTH, 2, device=device()), 3))
    nets = [plain_net() for _ in range(2)]
    models = [
        wrapped(net=nets[0], use_orig_params=use_orig_params, ignored_states=[nets[0].head]),
        wrapped(net=nets[1], use_orig_params=use_orig_params),
    ]
    for model in models:
        backward(model, rank)
    for ours, theirs in zip(nets[0].head.parameters(), plain[0].head.parameters(), strict=True):
        ours.grad = theirs.grad.clone()
    expected = get_total_norm(
        [
            grad
            for one in (plain[0].blocks[1], plain[0].head, plain[1], plain[2])
            for grad in grads_of(one.parameters())
        ]
    )
    ours = (nets[0].blocks[1], nets[0].head, models[1], plain[2])
    chosen = [param for one in ours for param in one.parameters() if param.grad is not None]
    others = [grad.clone() for grad in grads_of(nets[0].blocks[0].parameters())]
    with installed(), nothing_told():
        views = (param.grad.detach() for param in chosen)
        torch.testing.assert_close(torch.nn.utils.get_total_norm(views), expected)
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(iter(chosen), 0.05), expected)
        assert float(torch.nn.utils.get_total_norm(grads_of(chosen))) == pytest.approx(0.05, abs=1e-5)
        assert all(map(torch.equal, others, grads_of(nets[0].blocks[0].parameters())))
        if rank == 0:  # these gradients belong to no unit, so the call is not collective
            of_plain = grads_of(plain[2].parameters())
            assert torch.nn.utils.get_total_norm(of_plain) == get_total_norm(of_plain)
            torch.nn.utils.get_total_norm(grads_of(nets[0].head.parameters()))
        chosen[-1].grad.fill_(math.nan)
        match = "The total norm of order 2.0 for gradients .* is non-finite"
        with pytest.raises(RuntimeError, match=match):
            torch.nn.utils.get_total_norm(grads_of(chosen), error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match=match):
            torch.nn.utils.clip_grad_norm_(chosen, 1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match="norm_type must be above 0, not -inf"):
            torch.nn.utils.get_total_norm(grads_of(chosen), -math.inf)
        with pytest.raises(ValueError, match="norm_type must be above 0, not 0.0"):
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0, 0)


@on_ranks(2)
def test_get_total_norm_of_part_of_a_unit_is_refused(rank: int) -> None:
    """Rank 0 alone has the unit's first parameter: rank 1 has no gradient of it, and need not call."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 7 * WIDTH))
    model = wrapped(net=net, use_orig_params=True)
    first = [model.module[0].weight]
    backward(model, rank)
    grads = [grad for grad in grads_of(first) if grad.numel()]
    assert len(grads) == 1 - rank
    with installed():
        if rank == 0:
            match = (
                r"rank 0, unit Sequential: .* with gradients of \['0.weight'\] without the rest of the unit"
            )
            with pytest.raises(RuntimeError, match=match):
                torch.nn.utils.get_total_norm(grads)
        norms = of_all_ranks(torch.nn.utils.clip_grad_norm_(first, math.inf))
    assert norms[0] == norms[1] > 0


@on_ranks(4)
def test_get_total_norm_where_a_rank_has_no_gradients(rank: int) -> None:
    net = averaged(plain_net(), rank)
    model = wrapped(use_orig_params=True)
    backward(model, rank)
    for one, other in ((model, net), (model.module.blocks[1], net.blocks[1])):
        expected = get_total_norm(grads_of(other.parameters()))
        with installed(), nothing_told():
            torch.testing.assert_close(torch.nn.utils.get_total_norm(grads_of(one.parameters())), expected)
    tiny = wrapped(net=nn.Linear(1, 1), use_orig_params=True)
    tiny(torch.ones(1, 1, device=device())).sum().backward()
    grads = grads_of(tiny.parameters())
    with installed(), pytest.raises(RuntimeError, match="whole units") if grads else contextlib.nullcontext():
        torch.nn.utils.get_total_norm(grads)


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch 2.10 compiles neither function")
@pytest.mark.parametrize("is_installed", [True, False])
@both_views
@on_ranks(2)
def test_compiled_functions_clip_and_differentiate_beside_units(
    rank: int, use_orig_params: bool, is_installed: bool
) -> None:
    """Plain modules are clipped in one graph with unchanged values, units by the global norm under install()."""

    def clip(params: list[nn.Parameter]) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, 0.05)

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0].detach()

    model, plain, twin = wrapped(use_orig_params=use_orig_params), plain_net(), plain_net()
    for module in (plain, twin, model):
        backward(module, rank)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    torch.compiler.reset()
    with installed() if is_installed else contextlib.nullcontext():
        found = torch.compile(clip, fullgraph=True, backend="aot_eager")(list(plain.parameters()))
        x = torch.ones(3, requires_grad=True)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            compiled = torch.compile(slope, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(found, expected) and torch.equal(compiled, torch.full((3,), 2.0))
        assert all(map(torch.equal, grads_of(plain.parameters()), grads_of(twin.parameters())))
        signature = inspect.signature(torch.autograd.grad)
        assert list(signature.parameters)[:2] == ["outputs", "inputs"]
        if is_installed:
            whole = torch.nn.utils.get_total_norm(grads_of(model.parameters()))
            norm = torch.compile(torch.nn.utils.get_total_norm, backend="aot_eager")(
                grads_of(model.parameters())
            )
            assert torch.equal(norm, whole)
            assert torch.equal(torch.compile(clip, backend="aot_eager")(list(model.parameters())), whole)


# ----------------------------------------------------------------- GradScaler


class Derived(GradScaler):
    """A subclass like those of libraries."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)


def scales(model: nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Return the scales of four steps. The second step overflows in a gradient of rank 0 alone."""
    found = []
    for step in range(4):
        scaler.scale(model(batch(rank, step)).square().mean()).backward()
        if step == 1 and rank == 0:
            next(grad for grad in grads_of(model.parameters()) if grad.numel()).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


sgd = functools.partial(torch.optim.SGD, lr=0.01)
fused = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
scalers = pytest.mark.parametrize(
    ("scaler", "optimizer"), [(GradScaler, sgd), (Derived, fused)], ids=["sgd", "derived, fused"]
)


def made(kind: Any = GradScaler) -> Any:
    return kind(device().type, init_scale=1024.0, growth_interval=1)


@scalers
@both_views
@on_ranks(2)
def test_grad_scaler_without_install_is_local_and_warned_of_once(
    rank: int, use_orig_params: bool, scaler: Any, optimizer: Any
) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    match = rf"rank {rank}, unit .*: {scaler.__name__} looks for inf.*ShardedGradScaler"
    with pytest.warns(UserWarning, match=match) as record:
        found = scales(model, made(scaler), optimizer(model.parameters()), rank)
    assert len(record) == 1 and record[0].filename == __file__
    assert len(set(of_all_ranks(found[-1]))) == 2


@scalers
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@both_views
@on_ranks(2)
def test_grad_scaler_after_install_has_one_scale_on_all_ranks(
    rank: int, use_orig_params: bool, strategy: str, scaler: Any, optimizer: Any
) -> None:
    found = []
    for kind in (scaler, ShardedGradScaler):
        model = wrapped(use_orig_params=use_orig_params, sharding_strategy=ShardingStrategy[strategy])
        with installed(), nothing_told():
            found.append(scales(model, made(kind), optimizer(model.parameters()), rank))
    assert found[0] == found[1] == [2048.0, 1024.0, 2048.0, 4096.0]
    assert GradScaler._unscale_grads_.__module__ == "torch.amp.grad_scaler"


@on_ranks(2)
def test_grad_scaler_after_install_with_a_rank_without_gradients(rank: int) -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 7 * WIDTH))
    model = wrapped(net=net, use_orig_params=True)
    params = [model.module[0].weight]  # on rank 0 only
    with installed(), nothing_told():
        assert scales(model, made(), sgd(params), rank) == [2048.0, 1024.0, 2048.0, 4096.0]


@on_ranks(2)
def test_grad_scaler_of_unsharded_or_plain_modules_is_not_warned_of(rank: int) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    backward(wrapped(), rank)
    for module in (model, nn.Linear(WIDTH, 2, device=device())):
        with nothing_told():
            assert scales(module, made(), sgd(module.parameters()), 1)[-1] == 16384.0
    if rank == 0:  # nothing is sent
        with installed():
            scales(module, made(), sgd(module.parameters()), 1)
