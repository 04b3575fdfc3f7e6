"""Tensor parallelism inside FSDP: DTensor parameters on mesh["tp"], wrapped on mesh["dp"], four ranks.

Bitwise equality with torch's FSDP1 where that works, and an unsharded reference where it does not.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.compat.standins import dtensor_extensions as standins
from fsdp_c.optim import WholeParameters
from tests import tensor_parallel as tp
from tests.distributed.test_misuse_checks import installed
from tests.distributed.test_sharded_state_dict import assert_same_value
from tests.pairwise import pairwise
from tests.parity.engine import (
    STEPS,
    Point,
    Run,
    assert_record_is_worth_comparing,
    assert_same_record,
    implementation,
)
from tests.parity.scenarios import no_sync_step, plain_step
from tests.ranks import VIEWS, both_views, device, on_ranks
from tests.training import FULL, SHARDED

PER_LAYER = ModuleWrapPolicy({tp.Layer})
PLANS = ("mlp", "sequence")
both_plans = pytest.mark.parametrize("plan", PLANS)


def plain(seed: int = 3) -> tp.Language:
    torch.manual_seed(seed)
    return tp.Language()


def wrap(model: nn.Module, which: str = "fsdp_c", **arguments: Any) -> Any:
    defaults = {
        "device_mesh": tp.mesh()["dp"],
        "device_id": device(),
        "use_orig_params": True,
        "auto_wrap_policy": PER_LAYER,
    }
    return implementation(which)(model, **(defaults | arguments))


def parallel(plan: str = "mlp", which: str = "fsdp_c", seed: int = 3, **arguments: Any) -> Any:
    """Wrap ``plain(seed)``, parallelized by ``plan``."""
    return wrap(tp.parallelized(plain(seed), plan), which, **arguments)


def loss_of(model: nn.Module, data_rank: int, index: int = 0) -> Tensor:
    return model(tp.tokens(10 * index + data_rank)).float().square().mean()


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def full_params(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: full(param) for name, param in model.named_parameters()}


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, with_grads=True):
        return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def full_state(model: nn.Module, **config: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(**config)):
        return model.state_dict()


def assert_close(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert list(expected) == list(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_step(model: Any, reference: nn.Module, lr: float = 0.5) -> None:
    """Run a step of SGD with the present gradients on both models, and compare the parameters."""
    for one in (model, reference):
        torch.optim.SGD(one.parameters(), lr=lr).step()
    assert_close(dict(reference.named_parameters()), full_params(model))


def reference_backward(model: nn.Module, indices: tuple[int, ...] = (0,)) -> None:
    """The average gradient over the data parallel ranks, on the plain model."""
    for index in indices:
        sum(loss_of(model, data_rank, index) / 2 for data_rank in range(2)).backward()


def named_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


# ------------------------------------------------------------------ equal to torch, bit for bit


class ParallelRun(Run):
    """Batches of tokens, the same for all ranks of a tensor parallel group."""

    def batch(self, index: int = 0) -> Tensor:
        return tp.tokens(1000 * self.step + 10 * index + self.rank // 2)


def record(point: Point, plan: str, step: Callable[[Run], None], which: str, rank: int) -> Any:
    run = ParallelRun(point, implementation(which), rank, 4)
    arguments = {"device_mesh": tp.mesh()["dp"], "auto_wrap_policy": PER_LAYER}
    run.start(lambda run: run.wrap(tp.parallelized(tp.Language(), plan), **arguments))
    for run.step in range(1, STEPS // 2 + 1):
        step(run)
    with run.fsdp.summon_full_params(run.model):
        run.record_params("summoned")
    run.record_full_state_dict("end")
    return run.trace


def compare(point: Point, plan: str, step: Callable[[Run], None], rank: int) -> None:
    expected = record(point, plan, step, "torch", rank)
    assert_record_is_worth_comparing(expected)
    assert any("up.weight placements" in label for label in expected)
    assert_same_record(point, expected, record(point, plan, step, "fsdp_c", rank))


@pairwise(
    plan=PLANS,
    use_orig_params=VIEWS,
    strategy=["FULL_SHARD", "SHARD_GRAD_OP"],
    precision=["fp32", "bf16_reduce_fp32", "bf16"],
)
@on_ranks(4, timeout_s=120)
def test_training_equals_torch(
    rank: int, plan: str, use_orig_params: bool, strategy: str, precision: str
) -> None:
    compare(Point("tp", strategy, use_orig_params, precision), plan, plain_step, rank)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(4, timeout_s=120)
def test_no_sync_of_flat_parameters_equals_torch(rank: int, strategy: str) -> None:
    compare(Point("no_sync", strategy, use_orig_params=False), "sequence", no_sync_step, rank)


# ------------------------------------------------------------------ equal to the unsharded model


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@both_plans
@on_ranks(4)
def test_no_sync_of_original_parameters_is_right_where_torch_raises(
    rank: int, plan: str, strategy: str
) -> None:
    """torch puts a DTensor into the gradient of a plain parameter there."""
    model, reference = parallel(plan, sharding_strategy=ShardingStrategy[strategy]), plain()
    with model.no_sync():
        loss_of(model, rank // 2, 0).backward()
    loss_of(model, rank // 2, 1).backward()
    reference_backward(reference, (0, 1))
    assert_close(named_grads(reference), full_grads(model))


@both_views
@on_ranks(4)
def test_offloaded_units_train_as_the_plain_model(rank: int, use_orig_params: bool) -> None:
    model = parallel("sequence", cpu_offload=CPUOffload(offload_params=True), use_orig_params=use_orig_params)
    reference = plain()
    loss_of(model, rank // 2).backward()
    reference_backward(reference)
    assert_same_step(model, reference)


@on_ranks(4)
def test_frozen_parameter_stays_frozen(rank: int) -> None:
    """torch's FSDP1 trains frozen DTensors, because it makes all local tensors require gradients."""
    for which, expected in (("torch", True), ("fsdp_c", False)):
        module = tp.parallelized(plain(), "mlp")
        module.layers[0].up.requires_grad_(False)
        model = wrap(module, which)
        params = dict(model.named_parameters())
        frozen = [name for name in params if "layers.0" in name and "up." in name]
        assert [params[name].requires_grad for name in frozen] == [expected] * 2
    loss_of(model, rank // 2).backward()
    reference = plain()
    reference.layers[0].up.requires_grad_(False)
    reference_backward(reference)
    assert_close(named_grads(reference), full_grads(model))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(tp.WIDTH, tp.WIDTH, bias=False)
        self.b = nn.Linear(tp.WIDTH, tp.WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def tied() -> nn.Module:
    column = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("a", "b")}
    model = parallelize_module(Tied(), tp.mesh()["tp"], column)
    model.b.weight = model.a.weight
    return model


@both_views
@on_ranks(4)
def test_tied_parameter_stays_tied(rank: int, use_orig_params: bool) -> None:
    """torch's FSDP1 flattens a tied DTensor twice, and trains two parameters."""
    arguments = {"auto_wrap_policy": None, "use_orig_params": use_orig_params}
    assert wrap(tied(), "torch", **arguments)._flat_param._fqns == ["a.weight", "b.weight"]
    model, reference = wrap(tied(), **arguments), Tied()
    assert model._flat_param._fqns == ["a.weight"]
    data = torch.randn(2, 3, tp.WIDTH, generator=torch.Generator(device()).manual_seed(1))
    model(data[rank // 2]).square().mean().backward()
    reference(data).square().mean().backward()
    assert_same_step(model, reference)


@both_views
@on_ranks(4)
def test_replicas_of_tensor_parallel_shards_train_as_the_plain_model(
    rank: int, use_orig_params: bool
) -> None:
    """Three dimensions: two replicas, of one data parallel rank each, of tensor parallel pairs."""
    mesh, strategy = tp.hybrid_mesh(), ShardingStrategy.HYBRID_SHARD
    options = {"device_mesh": mesh["replicate", "shard"], "use_orig_params": use_orig_params}
    module = parallelize_module(plain(), mesh["tp"], tp.sequence_plan())
    model, reference = wrap(module, sharding_strategy=strategy, **options), plain()
    loss_of(model, rank // 2).backward()
    reference_backward(reference)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), expected)
    assert_same_step(model, reference, lr=50.0)


# ------------------------------------------------------------------ clipping


@pairwise(
    plan=PLANS,
    use_orig_params=VIEWS,
    strategy=["FULL_SHARD", "NO_SHARD"],
    norm_type=[2.0, 1.0, 3.0, math.inf],
)
@on_ranks(4)
def test_gradient_norm_is_that_of_the_plain_model(
    rank: int, plan: str, use_orig_params: bool, strategy: str, norm_type: float
) -> None:
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    model, reference = parallel(plan, **options), plain()
    loss_of(model, rank // 2).backward()
    reference_backward(reference)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    with installed():
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        torch.testing.assert_close(torch.nn.utils.get_total_norm(grads, norm_type), expected)
    torch.testing.assert_close(model.clip_grad_norm_(0.01, norm_type), expected)
    assert_same_step(model, reference, lr=50.0)


@both_views
@on_ranks(4)
def test_a_grad_scaler_skips_a_step_that_one_tensor_parallel_rank_overflows_in(
    rank: int, use_orig_params: bool
) -> None:
    model = parallel(use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with installed():
        scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
        scaler.scale(loss_of(model, rank // 2)).backward()
        if rank == 3:
            next(param.grad for param in model.parameters() if param.grad is not None).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0


# ------------------------------------------------------------------ full parameters and state dicts


@both_views
@on_ranks(4)
def test_summoned_parameters_are_dtensors_and_keep_edits(use_orig_params: bool) -> None:
    model = parallel(use_orig_params=use_orig_params)
    expected = {name: param.detach() + 1 for name, param in plain().named_parameters()}
    with FSDP.summon_full_params(model), torch.no_grad():
        up = model.layers[0].up.weight
        assert isinstance(up, DTensor) and isinstance(up, nn.Parameter)
        assert up.shape == (tp.HIDDEN, tp.WIDTH) and up.placements == (Shard(0),)
        for param in model.parameters():
            param.add_(1)
        replaced = model.layers[1].up.weight
        replaced.data = (replaced + 0).detach()
    assert_close(expected, full_params(model))


@on_ranks(4)
def test_summoned_gradients_are_dtensors_and_keep_edits(rank: int) -> None:
    model, reference = parallel(), plain()
    loss_of(model, rank // 2).backward()
    reference_backward(reference)
    with FSDP.summon_full_params(model, with_grads=True):
        assert model.layers[0].down.weight.grad.placements == (Shard(1),)
        for param in model.parameters():
            param.grad.mul_(2)
    assert_close({name: 2 * grad for name, grad in named_grads(reference).items()}, full_grads(model))


@both_views
@on_ranks(4)
def test_rank0_only_summons_on_the_first_data_parallel_rank(rank: int, use_orig_params: bool) -> None:
    model = parallel(use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        shown = [isinstance(param, DTensor) for param in model.parameters()]
    assert any(shown) == (rank // 2 == 0)


@pytest.mark.parametrize(
    "config", [{}, {"offload_to_cpu": True}, {"rank0_only": True}], ids=["", "offload", "rank0"]
)
@both_views
@on_ranks(4)
def test_full_state_dict_holds_dtensors_of_the_tensor_parallel_mesh(
    rank: int, use_orig_params: bool, config: dict[str, bool]
) -> None:
    """The values equal those of torch's FSDP1, which crashes with offload_to_cpu."""
    model = parallel(use_orig_params=use_orig_params)
    state = full_state(model, **config)
    if config.get("rank0_only") and rank // 2 != 0:
        assert state == {}
        return
    assert state["layers.0.up.weight"].placements == (Shard(0),)
    assert state["layers.0.up.weight"].device_mesh == tp.mesh()["tp"]
    assert not isinstance(state["head.weight"], DTensor)
    assert_close(plain().state_dict(), {name: full(value).to(device()) for name, value in state.items()})


@pytest.mark.parametrize("form", ["dtensors", "plain", "assigned"])
@both_views
@on_ranks(4)
def test_full_state_dict_loads_again(rank: int, use_orig_params: bool, form: str) -> None:
    """Plain tensors of full shape, saved by a run without tensor parallelism, load too; torch refuses them."""
    source = parallel("sequence", seed=4, use_orig_params=use_orig_params)
    state = full_state(source) if form != "plain" else plain(4).state_dict()
    model = parallel("sequence", use_orig_params=use_orig_params)
    model.load_state_dict(state, assign=form == "assigned")
    assert_close(plain(4).state_dict(), full_params(model))
    loss_of(model, rank // 2).backward()


@on_ranks(4)
def test_entry_of_local_shape_is_refused_and_nothing_is_loaded() -> None:
    model = parallel()
    state = plain(4).state_dict()
    state["layers.1.up.weight"] = state["layers.1.up.weight"][: tp.HIDDEN // 2]
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.1\.up\.weight"):
        model.load_state_dict(state)
    assert_close(dict(plain().named_parameters()), full_params(model))


# ------------------------------------------------------------------ construction


@both_views
@on_ranks(4)
def test_dtensors_in_the_forward_are_marked_as_flattened(rank: int, use_orig_params: bool) -> None:
    model, seen = parallel(use_orig_params=use_orig_params), []
    linear = model.layers[0].module.up
    linear.register_forward_pre_hook(lambda *_: seen.append(linear.weight))
    loss_of(model, rank // 2)
    assert isinstance(seen[0], DTensor) and seen[0]._fsdp_flattened and seen[0].requires_grad


@on_ranks(4)
def test_dtensor_without_an_extension_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"'up\.weight'.*is a DTensor.*pass device_mesh=mesh\['dp'\]"):
        parallel(device_mesh=None, process_group=tp.mesh()["dp"].get_group())


@on_ranks(4)
def test_sync_module_states_crosses_the_data_parallel_ranks(rank: int) -> None:
    module = tp.parallelized(plain(), "mlp")
    with torch.no_grad():
        for param in module.parameters():
            param.add_(rank // 2)
    assert_close(dict(plain().named_parameters()), full_params(wrap(module, sync_module_states=True)))


@on_ranks(4)
def test_meta_module_is_initialised_after_it_was_parallelized(rank: int) -> None:
    with torch.device("meta"):
        module = tp.Language()
    model = wrap(tp.parallelized(module, "sequence"))
    assert not any(param.is_meta for param in model.parameters())
    loss_of(model, rank // 2).backward()
    assert {tuple(grad.shape) for grad in full_grads(model).values()} == {
        tuple(param.shape) for param in plain().parameters()
    }


# ------------------------------------------------------------------ lifetime


@both_views
@on_ranks(4)
def test_model_is_freed_after_training(rank: int, use_orig_params: bool) -> None:
    model = parallel("sequence", use_orig_params=use_orig_params)
    loss_of(model, rank // 2).backward()
    loss_of(model, rank // 2)
    gone = [weakref.ref(model), weakref.ref(model._handle), weakref.ref(model.layers[0].module.up)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def sharded_state(model: Any) -> dict[str, Any]:
    with type(model).state_dict_type(model, SHARDED):
        return model.state_dict()


@both_views
@both_plans
@on_ranks(4)
def test_sharded_state_dict_equals_torchs_and_loads_again(plan: str, use_orig_params: bool) -> None:
    """Rows over both dimensions of the mesh."""
    states = []
    for which in ("torch", "fsdp_c"):
        states.append(sharded_state(parallel(plan, which, use_orig_params=use_orig_params)))
    torchs, ours = states
    assert list(torchs) == list(ours)
    for name, expected in torchs.items():
        assert isinstance(ours[name], DTensor) and ours[name].device_mesh == expected.device_mesh, name
        assert_same_value(name, expected, ours[name])
    other = parallel(plan, seed=9, use_orig_params=use_orig_params)
    for state in states:
        with FSDP.state_dict_type(other, SHARDED):
            other.load_state_dict(state)
        assert_close(plain().state_dict(), {name: full(value) for name, value in full_state(other).items()})


# ------------------------------------------------------------------ optimizer state

OPTIM_CONFIGS = {
    "full": (FULL, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)),
    "rank 0": (FULL, FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)),
    "sharded": (SHARDED, ShardedOptimStateDictConfig(offload_to_cpu=False)),
}


def step(model: Any, optimizer: torch.optim.Optimizer, data_rank: int, indices: range) -> None:
    for index in indices:
        loss_of(model, data_rank, index).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: int, plan: str, which: str = "fsdp_c", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = parallel(plan, which, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    step(model, optimizer, rank // 2, range(2))
    return model, optimizer


def reference() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    for index in range(2):
        reference_backward(model, (index,))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def optim_state(model: Any, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    kind, config = OPTIM_CONFIGS[kind]
    with type(model).state_dict_type(model, kind, None, config):
        return type(model).optim_state_dict(model, optimizer)


def load_optim_state(model: Any, optimizer: torch.optim.Optimizer, state: Any, kind: str) -> None:
    kind, config = OPTIM_CONFIGS[kind]
    with FSDP.state_dict_type(model, kind, None, config):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


def assert_is_reference(state: dict[str, Any]) -> None:
    model, optimizer = reference()
    assert sorted(state["state"]) == sorted(dict(model.named_parameters()))
    for name, param in model.named_parameters():
        for key, expected in optimizer.state[param].items():
            torch.testing.assert_close(full(state["state"][name][key]), expected, check_device=False)


@pairwise(
    plan=PLANS,
    use_orig_params=VIEWS,
    kind=tuple(OPTIM_CONFIGS),
    strategy=["FULL_SHARD", "NO_SHARD"],
)
@on_ranks(4)
def test_optimizer_state_is_the_plain_models_and_loads_again(
    rank: int, plan: str, use_orig_params: bool, kind: str, strategy: str
) -> None:
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "NO_SHARD" and kind == "sharded":
        return  # whole then, as "full" is
    model, optimizer = trained(rank, plan, **options)
    state = optim_state(model, optimizer, kind)
    if kind == "rank 0" and rank:
        assert state == {}
    else:
        assert_is_reference(state)
        up = state["state"]["layers.0.up.weight"]["exp_avg"]
        assert isinstance(up, DTensor) == (kind != "rank 0")
        if kind == "sharded":
            assert up.placements == sharded_state(model)["layers.0.up.weight"].placements
    other, other_optimizer = trained(rank, plan, **options)
    step(other, other_optimizer, rank // 2, range(5, 6))
    other.load_state_dict(full_state(model))
    load_optim_state(other, other_optimizer, state, kind)
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        step(each, its_optimizer, rank // 2, range(2, 4))
    expected = full_params(model)
    assert all(torch.equal(value, expected[name]) for name, value in full_params(other).items())


@both_views
@on_ranks(4)
def test_dcp_restores_optimizer_state_and_with_torch_it_is_another(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """Through get_state_dict and set_state_dict of torch.distributed.checkpoint. With flat parameters torch
    hangs."""
    restored = {}
    for which in ("torch", "fsdp_c") if use_orig_params else ("fsdp_c",):
        cls = implementation(which)
        with mock.patch("torch.distributed.checkpoint.state_dict.FSDP", cls):
            model, optimizer = trained(rank, "mlp", which, use_orig_params=use_orig_params)
            states = get_state_dict(model, optimizer)
            saved = {key: value.clone() for key, value in local_state(model, optimizer).items()}
            step(model, optimizer, rank // 2, range(2, 3))
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
            loaded = local_state(model, optimizer)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, all(torch.equal(value, loaded[key]) for key, value in saved.items()))
        restored[which] = all(everyone)
    assert restored == ({"torch": False, "fsdp_c": True} if use_orig_params else {"fsdp_c": True})


def local_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    return {
        (index, key): value
        for index, param in enumerate(model.parameters())
        for key, value in optimizer.state.get(param, {}).items()
    }


# ------------------------------------------------------------------ on a torch without FSDP1


@both_views
@on_ranks(4, timeout_s=120)
def test_our_dtensor_extension_equals_torchs(rank: int, use_orig_params: bool) -> None:
    with mock.patch("fsdp_c.sharding.construction.dtensor_extensions", lambda: standins.DTensorExtensions):
        assert isinstance(parallel()._fsdp_extension, standins.DTensorExtensions)
        compare(Point("tp", "FULL_SHARD", use_orig_params, "fp32"), "sequence", plain_step, rank)
        sharded = test_sharded_state_dict_equals_torchs_and_loads_again.rank_body
        sharded(plan="mlp", use_orig_params=use_orig_params)


@on_ranks(4)
def test_owners_of_whole_parameters_are_refused_where_no_rank_of_a_unit_has_them(
    rank: int, world_size: int
) -> None:
    model = parallel()
    with pytest.raises(
        ValueError, match="has tensor parallelism inside: no rank of the unit has its parameters"
    ):
        WholeParameters(model, torch.optim.SGD, lr=0.1)
