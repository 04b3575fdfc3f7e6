"""fsdp_c.optim.WholeParameters: optimizers that need unsharded parameters, on shards, compared with the plain
model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from fsdp_c import CPUOffload, FullOptimStateDictConfig, ShardingStrategy, StateDictType, checkpoint, summary
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.optim import WholeParameters, whole_parameters
from fsdp_c.optim.whole_parameters import BUCKET_NBYTES
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.distributed.test_hybrid import groups
from tests.pairwise import pairwise
from tests.parity.engine import different_paths
from tests.ranks import both_views, device, on_ranks, pool
from tests.training import assert_same

WIDTH = 24
Named = list[tuple[str, nn.Parameter]]


class Layer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(inner) for inner in (7, 40, 24))
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def matrices_by_muon(named: Named) -> list[Optimizer]:
    """Optimize as the largest models do: Muon for matrices, AdamW for all other parameters."""
    matrices = [param for name, param in named if param.dim() == 2 and "head" not in name]
    others = [param for name, param in named if param.dim() != 2 or "head" in name]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def decayed_sgd(named: Named) -> Optimizer:
    groups = [
        {"params": [param for _, param in named if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for _, param in named if param.dim() <= 1]},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


class Factored(Optimizer):
    """Keeps the kinds of state that libraries' optimizers keep: lists as in SOAP, dicts, tuples, other
    dtypes, numbers. Parameters have dimensions.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group["lr"])

    def update(self, param: nn.Parameter, lr: float) -> None:
        state, grad = self.state[param], param.grad
        if not state:
            state["GG"] = [torch.zeros(size, size).to(grad) if size < 40 else [] for size in grad.shape]
            state["Q"] = None
            rows = grad.new_zeros(len(grad), dtype=torch.float64)
            state["nested"] = {"rows": rows, "count": 0, "seen": torch.zeros(())}
            state["number"] = torch.zeros(())
            state["average"] = torch.zeros_like(grad)
        for dim, factor in enumerate(state["GG"]):
            if len(factor):
                matrix = grad.movedim(dim, 0).reshape(len(factor), -1)
                factor.lerp_(matrix @ matrix.T, 0.1)
        state["Q"] = [factor.sum(0) if len(factor) else None for factor in state["GG"]]
        state["nested"]["rows"] += grad.reshape(len(grad), -1).double().square().sum(1)
        state["nested"]["count"] += 1
        state["nested"]["seen"] += 1
        state["number"] += 1
        state["average"].lerp_(grad, 0.5)
        scale = state["nested"]["rows"].sqrt() + state["nested"]["count"]
        param.sub_(lr * state["average"] / scale.to(grad).view(-1, *[1] * (grad.dim() - 1)))
        param.sub_(lr * sum(one.sum() for one in state["Q"] if one is not None) / state["number"])


FACTORIES: dict[str, Callable[[Named], Any]] = {
    "muon": matrices_by_muon,
    "sgd": decayed_sgd,
    "adafactor": lambda named: torch.optim.Adafactor([param for _, param in named], lr=0.01),
    "adamw": lambda named: torch.optim.AdamW([param for _, param in named], lr=0.01),
    "factored": lambda named: Factored([param for _, param in named if param.dim()], lr=0.01),
}


def plain_model() -> Model:
    torch.manual_seed(3)
    return Model().to(device())


def wrapped(module: nn.Module, **options: Any) -> FSDP:
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Layer}), "use_orig_params": True} | options
    return FSDP(copy.deepcopy(module), device_id=device(), **arguments)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(step)
    return torch.randn(6, WIDTH, generator=generator, device=device())


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        model(batch(step).to(dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def as_list(made: Any) -> list[Optimizer]:
    return [made] if isinstance(made, Optimizer) else list(made)


def hybrid() -> dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups(2, 2)}


def same_values(model: FSDP, plain: nn.Module, is_close: bool = False) -> None:
    """Assert bitwise equal values, or close ones: two ranks have the same batch, so that averaging their
    gradients does not round.
    """
    with FSDP.summon_full_params(model):
        for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            if is_close:
                torch.testing.assert_close(ours, theirs)
            else:
                assert torch.equal(ours, theirs), name


def trained_alike(
    factory: Callable[[Named], Any],
    steps: int = 3,
    plain: nn.Module | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    is_close: bool = False,
    **options: Any,
) -> tuple[nn.Module, FSDP, list[Optimizer], WholeParameters]:
    """Train a plain model and the same model wrapped. Assert equal parameters and return both with their
    optimizers.
    """
    plain = plain or plain_model()
    model = wrapped(plain, **options)
    expected = as_list(factory(list(plain.named_parameters())))
    optimizer = WholeParameters(model, factory, bucket_nbytes=bucket_nbytes)
    train(plain, expected, range(steps))
    train(model, [optimizer], range(steps))
    same_values(model, plain, is_close)
    return plain, model, expected, optimizer


STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


@pairwise(kind=tuple(FACTORIES), strategy=STRATEGIES, bucket_nbytes=[1, 4096, None])
@on_ranks(2)
def test_bits_are_those_of_the_plain_model(
    kind: str, strategy: ShardingStrategy, bucket_nbytes: int | None
) -> None:
    """With frozen parameters, accumulated gradients, and an optimizer that takes over the state of another."""
    plain, factory = plain_model(), FACTORIES[kind]
    plain.layers[1].up.requires_grad_(False)
    plain, model, expected, optimizer = trained_alike(
        factory, 2, plain, bucket_nbytes, sharding_strategy=strategy
    )
    saved = FSDP.optim_state_dict(model, optimizer)
    resumed = WholeParameters(model, factory, bucket_nbytes=bucket_nbytes)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
    for trained, optimizers in ((plain, expected), (model, [resumed])):
        train(trained, [], range(9, 10))
        train(trained, optimizers, range(2, 4))
    same_values(model, plain)


@on_ranks(2)
def test_large_parameters_and_what_no_unit_manages() -> None:
    """Tensors above 1 MiB are sent individually, without a copy into a buffer."""
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(WIDTH, 700), nn.Linear(700, 701), nn.Linear(701, WIDTH)).to(device())
    ours = copy.deepcopy(plain)
    model = FSDP(ours, ignored_states=[ours[2].weight], use_orig_params=True, device_id=device())
    expected = decayed_sgd(list(plain.named_parameters()))
    optimizer = WholeParameters(model, decayed_sgd)
    train(plain, [expected], range(3))
    train(model, [optimizer], range(3))
    same_values(model, plain)
    assert len(FSDP.optim_state_dict(model, optimizer)["state"]) == 6


@pytest.mark.parametrize("world", [3, 4])
@on_ranks(4)
def test_any_number_of_ranks(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    if rank < world:
        trained_alike(decayed_sgd, plain=plain_model().double(), is_close=True, process_group=group)


@on_ranks(4)
def test_replicas_divide_the_work(rank: int) -> None:
    *_, optimizer = trained_alike(matrices_by_muon, **hybrid())
    own = sum(len(inner.state) for inner in optimizer._inner)
    total = torch.tensor(own)
    dist.all_reduce(total)
    assert 0 < own < 10 and int(total) == len(list(plain_model().parameters()))


def costs_of(wholes: list[Any]) -> list[int]:
    """Return the work of each of four ranks, in multiplications per step."""
    return [sum(whole.cost for whole in wholes if whole.owner[0] == rank) for rank in range(4)]


@on_ranks(4)
def test_ranks_have_equal_work_and_work_in_each_bucket(world_size: int) -> None:
    """The work of each rank is within 1.2 of an equal share. A rank without work in a bucket would wait."""
    model = wrapped(nn.Sequential(*(Layer(inner) for inner in (32, 64, 96) * 8)))
    optimizer = WholeParameters(model, torch.optim.SGD, lr=0.1)
    costs = costs_of(optimizer._wholes)
    assert max(costs) <= 1.2 * sum(costs) / world_size
    owned = [whole for whole in optimizer._wholes if whole.is_own]
    mib = sum(whole.held.numel() for whole in owned) * 4 / 2**20
    share = max(costs) * world_size / sum(costs)
    first = repr(optimizer).splitlines()[0]
    assert first.startswith(f"4 ranks own {len(optimizer._wholes)} parameters of ")
    assert f"at most {share:.2f} of an equal share of the work; this one {len(owned)}, {mib:.2f} MiB" in first
    assert summary(model, optimizer).owners == (first,)
    assert f"optimizer: {first}" in " ".join(str(summary(model, optimizer)).split())
    assert "optimizer: " not in str(summary(model)) + str(
        summary(model, torch.optim.SGD(model.parameters(), lr=1))
    )
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, [whole.owner for whole in optimizer._wholes])
    assert all(one == told[0] for one in told)
    optimizer._bucket_nbytes = -(-sum(whole.nbytes for whole in optimizer._wholes) // 8)
    buckets = list(optimizer._buckets(optimizer._wholes))
    assert len(buckets) == 8
    for costs in map(costs_of, buckets):
        assert min(costs) > 0 and max(costs) < 2 * sum(costs) / world_size
    several = [len(list(optimizer._buckets(optimizer._wholes))) for optimizer._bucket_nbytes in (None, 1)]
    assert several[0] == 1 and several[1] == min(
        sum(whole.owner[0] == owner for whole in optimizer._wholes) for owner in range(world_size)
    )


@on_ranks(2)
def test_between_steps_a_rank_holds_state_of_its_own_alone() -> None:
    model = wrapped(plain_model())
    optimizer = WholeParameters(model, torch.optim.AdamW, lr=0.1)
    train(model, [optimizer], range(2))
    (inner,) = optimizer._inner
    assert {param for param in inner.state} == {whole.held for whole in optimizer._wholes if whole.is_own}
    for whole in optimizer._wholes:
        assert whole.held.untyped_storage().nbytes() == whole.held.itemsize and whole.held.grad is None


# ----------------------------------------------------------------- as optimizers are used


@on_ranks(2)
def test_schedules_scalers_and_clipping_are_those_of_the_plain_model() -> None:
    plain = plain_model()
    model = wrapped(plain)
    expected = decayed_sgd(list(plain.named_parameters()))
    optimizer = WholeParameters(model, decayed_sgd)
    for one, trained in ((expected, plain), (optimizer, model)):
        schedule = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)
        for step in range(3):
            trained(batch(step)).square().mean().backward()
            if trained is model:
                model.clip_grad_norm_(1e6)
            one.step()
            one.zero_grad(set_to_none=False)
            schedule.step()
    same_values(model, plain)
    rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, expected)]
    assert rates[0] == rates[1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]


@on_ranks(2)
def test_parameters_without_gradients_are_left_alone() -> None:
    plain, model, expected, optimizer = trained_alike(FACTORIES["adamw"], 2)
    for optimizers, trained in ((expected, plain), ([optimizer], model)):
        trained.layers[2].forward = lambda x: x
        train(trained, optimizers, range(2, 4))
    same_values(model, plain)


@on_ranks(2)
def test_a_closure_is_called_once_with_gradients() -> None:
    model = wrapped(plain_model())
    optimizer = WholeParameters(model, torch.optim.SGD, lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and calls == [1]


@on_ranks(2)
def test_offloaded_parameters() -> None:
    trained_alike(matrices_by_muon, cpu_offload=CPUOffload(True))


class Counting(torch.optim.SGD):
    """Counts its steps per group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)


@on_ranks(2)
def test_a_group_counts_steps_and_not_buckets() -> None:
    model = wrapped(plain_model())
    optimizer = WholeParameters(model, Counting, lr=0.1, bucket_nbytes=1)
    train(model, [optimizer], range(3))
    assert optimizer.param_groups[0]["k"] == 3


# ----------------------------------------------------------------- state


def same_state(saved: dict[str, Any], expected: list[Optimizer], plain: nn.Module) -> None:
    names = {param: name for name, param in plain.named_parameters()}
    for one in expected:
        for param, state in one.state.items():
            assert not different_paths(state, saved[names[param]], names[param])


def decayed_or_factored(named: Named) -> list[Optimizer]:
    """Return optimizers with state of the parameter's shape, and of other shapes."""
    factored = [param for name, param in named if "up" in name or "head" in name]
    decayed = [param for name, param in named if not ("up" in name or "head" in name)]
    return [torch.optim.SGD(decayed, lr=0.1, momentum=0.9), Factored(factored, lr=0.01)]


def body_save(rank: int, world_size: int, folder: str) -> None:
    model = wrapped(plain_model().double())
    optimizer = WholeParameters(model, decayed_or_factored)
    train(model, [optimizer], range(2))
    checkpoint.save(model, optimizer, folder)


def body_load(rank: int, world_size: int, folder: str) -> None:
    plain = plain_model().double()
    model = wrapped(plain, auto_wrap_policy=None)
    optimizer = WholeParameters(model, decayed_or_factored)
    optimizer.param_groups[0]["lr"] = 0.5
    checkpoint.load(model, optimizer, folder)
    saved = optimizer.state_dict()
    expected = decayed_or_factored(list(plain.named_parameters()))
    train(plain, expected, range(4))
    train(model, [optimizer], range(2, 4))
    same_values(model, plain, is_close=True)
    assert saved["param_groups"][0]["lr"] == 0.1 and expected[0].state


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2)])
def test_checkpoints_load_on_other_numbers_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    pool(saving).run(__name__, "body_save", {"folder": folder})
    pool(loading).run(__name__, "body_load", {"folder": folder})


@pytest.mark.parametrize("kind", ["adafactor", "factored"])
@on_ranks(2)
def test_checkpoints_go_to_the_plain_optimizer_and_back(kind: str) -> None:
    plain = plain_model()
    model = wrapped(plain)
    optimizer = WholeParameters(model, FACTORIES[kind])
    train(model, [optimizer], range(2))
    folder = folder_of_ranks()
    checkpoint.save(model, optimizer, f"{folder}/wrapped")
    other = plain_model()
    resumed = FACTORIES[kind](list(other.named_parameters()))
    checkpoint.load(other, resumed, f"{folder}/wrapped")
    saved = FSDP.optim_state_dict(model, optimizer)["state"]
    same_state(saved, [resumed], other)
    train(other, [resumed], range(2, 3))

    checkpoint.save(other, resumed, f"{folder}/plain")
    again = wrapped(plain, auto_wrap_policy=None)
    taken = WholeParameters(again, FACTORIES[kind])
    checkpoint.load(again, taken, f"{folder}/plain")
    same_state(FSDP.optim_state_dict(again, taken)["state"], [resumed], other)
    train(other, [resumed], range(3, 5))
    train(again, [taken], range(3, 5))
    same_values(again, other)


@on_ranks(4)
def test_state_of_replicas_owners_is_saved_and_loaded(rank: int) -> None:
    options = hybrid()
    plain, model, expected, optimizer = trained_alike(FACTORIES["factored"], 2, **options)
    folder = folder_of_ranks()
    checkpoint.save(model, optimizer, f"{folder}/checkpoint")
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        for loads in (False, True):
            other = wrapped(plain, **options)
            resumed = WholeParameters(other, FACTORIES["factored"])
            if loads:
                checkpoint.load(other, resumed, f"{folder}/checkpoint")
            else:
                for one in (model, other):
                    FSDP.set_state_dict_type(one, kind)
                saved = FSDP.optim_state_dict(model, optimizer)
                resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, saved))
            FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
            same_state(FSDP.optim_state_dict(other, resumed)["state"], expected, plain)


@on_ranks(2)
def test_dcp_saves_and_loads_sharded_state() -> None:
    """Nothing is all-gathered: a tensor of another shape is a single shard, on its owner."""
    torch.manual_seed(3)
    plain = nn.Sequential(Layer(7), Layer(24), nn.Linear(WIDTH, 5)).to(device())
    model = wrapped(plain)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = WholeParameters(model, FACTORIES["factored"])
    train(model, [optimizer], range(2))
    saved = FSDP.optim_state_dict(model, optimizer)
    held = [leaf for leaf in tree_flatten(saved["state"])[0] if isinstance(leaf, ShardedTensor)]
    own = sum(leaf.local_shards()[0].tensor.nbytes for leaf in held if leaf.local_shards())
    total = torch.tensor(own)
    dist.all_reduce(total)
    assert int(total) == sum(leaf.size().numel() * leaf.dtype.itemsize for leaf in held)
    folder = folder_of_ranks()
    dcp.save({"optim": saved, "model": model.state_dict()}, checkpoint_id=folder)

    other = wrapped(plain, auto_wrap_policy=None)
    FSDP.set_state_dict_type(other, StateDictType.SHARDED_STATE_DICT)
    resumed = WholeParameters(other, FACTORIES["factored"])
    train(other, [resumed], range(7, 8))
    target = {"optim": FSDP.optim_state_dict(other, resumed), "model": other.state_dict()}
    dcp.load(target, checkpoint_id=folder)
    other.load_state_dict(target["model"])
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, target["optim"]))
    train(model, [optimizer], range(2, 4))
    train(other, [resumed], range(2, 4))
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType.FULL_STATE_DICT)
    assert_same(model.state_dict(), other.state_dict())


@on_ranks(2)
def test_dcp_makes_no_step_of_its_own_where_there_is_state() -> None:
    """get_optimizer_state_dict() runs a step of a new optimizer, to create its state."""
    plain, model, expected, optimizer = trained_alike(matrices_by_muon, 2)
    _init_optim_state(optimizer)
    saved = FSDP.optim_state_dict(model, optimizer)
    same_state(saved["state"], expected, plain)
    resumed = WholeParameters(model, matrices_by_muon)
    _init_optim_state(resumed)
    same_values(model, plain)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
    _init_optim_state(resumed)
    same_state(FSDP.optim_state_dict(model, resumed)["state"], expected, plain)


@pytest.mark.parametrize("rank0_only", [True, False])
@on_ranks(2)
def test_state_moves_to_other_owners(rank: int, rank0_only: bool) -> None:
    """State is loaded from rank 0 only, or from the shards of a different wrapping's owners."""
    plain = plain_model()
    model = wrapped(plain)
    optimizer = WholeParameters(model, FACTORIES["factored"])
    train(model, [optimizer], range(2))
    other = FSDP(plain, use_orig_params=True, device_id=device())
    resumed = swapped_owners(other)
    for one in (model, other):
        if rank0_only:
            kind, config = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True)
            FSDP.set_state_dict_type(one, kind, optim_state_dict_config=config)
        else:
            FSDP.set_state_dict_type(one, StateDictType.SHARDED_STATE_DICT)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert bool(saved) == (rank == 0 or not rank0_only)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, saved))
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType.FULL_STATE_DICT)
    expected, found = FSDP.optim_state_dict(model, optimizer), FSDP.optim_state_dict(other, resumed)
    assert expected["state"] and not different_paths(expected["state"], found["state"])
    train(other, [resumed], range(2, 3))


def swapped_owners(model: FSDP) -> WholeParameters:
    """Return an optimizer in which each of two ranks owns the other's parameters."""
    choose = whole_parameters._choose_owners

    def swapped(wholes: Any) -> None:
        choose(wholes)
        for whole in wholes:
            whole.owner = (1 - whole.owner[0], 0)

    with mock.patch.object(whole_parameters, "_choose_owners", swapped):
        return WholeParameters(model, FACTORIES["factored"])


# ----------------------------------------------------------------- mistakes


@on_ranks(2)
def test_what_cannot_be_is_refused_in_words() -> None:
    model = wrapped(plain_model())
    with pytest.raises(ValueError, match="LBFGS takes all parameters as one vector"):
        WholeParameters(model, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="SGD holds parameters that the function was not given"):
        WholeParameters(model, lambda named: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="bucket_nbytes must be at least 1"):
        WholeParameters(model, torch.optim.SGD, bucket_nbytes=0)
    with pytest.raises(IndexError, match="has no FullyShardedDataParallel in it"):
        WholeParameters(plain_model(), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"flat ones: wrap it with .*use_orig_params=True"):
        WholeParameters(wrapped(plain_model(), use_orig_params=False), torch.optim.SGD, lr=0.1)
    optimizer = WholeParameters(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="construct it again"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@on_ranks(2)
def test_unreduced_gradients_of_one_rank_are_an_error_on_all(rank: int) -> None:
    model = wrapped(plain_model())
    optimizer = WholeParameters(model, torch.optim.SGD, lr=0.1)
    with model.no_sync():
        model(batch(0)).sum().backward()
    if rank == 0:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"the gradient of .* run a backward outside of no_sync"):
        optimizer.step()


class RaisesOnce(torch.optim.SGD):
    """Raises in its first step, on rank 1."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if dist.get_rank() == 1 and self.steps == 1:
            raise ArithmeticError("no inverse")
        super().step(closure)


@pytest.mark.parametrize("bucket_nbytes", [None, 4096])
@on_ranks(2)
def test_an_optimizer_that_raises_on_one_rank_is_an_error_on_all(bucket_nbytes: int | None) -> None:
    plain = plain_model()
    model = wrapped(plain)
    optimizer = WholeParameters(model, RaisesOnce, lr=0.1, bucket_nbytes=bucket_nbytes)
    with pytest.raises(RuntimeError) as raised:
        train(model, [optimizer], range(1))
    assert "the optimizer of rank 1 raised ArithmeticError: no inverse" in str(raised.value)
    assert "resume from a checkpoint" in str(raised.value)
    if bucket_nbytes is None:  # the only bucket was not sent back yet
        same_values(model, plain)
    train(model, [optimizer], range(1, 2))


@on_ranks(2)
def test_state_of_another_owner_is_refused_on_all_ranks() -> None:
    model = wrapped(plain_model())
    optimizer = WholeParameters(model, FACTORIES["factored"])
    train(model, [optimizer], range(1))
    resumed = swapped_owners(model)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="the optimizer of rank 0 raised ValueError: its state dict lacks"):
        train(model, [resumed], range(1))


@both_views
@on_ranks(2)
def test_muon_of_shards_names_whole_parameters(use_orig_params: bool) -> None:
    """Muon's own errors contain shapes only; errors for plain parameters are unchanged."""
    model = FSDP(nn.Linear(3, 3), use_orig_params=use_orig_params, device_id=device())
    matrices = [param for param in model.parameters() if param.dim() == 2]
    for params, words in (
        (model.parameters(), "only supports 2D parameters"),
        (matrices, "empty parameter list"),
    ):
        with pytest.raises(ValueError, match=rf"(?s){words}.*\n.*fsdp_c.optim.WholeParameters\(model, Muon,"):
            torch.optim.Muon(params)
    for kind in (nn.Linear(3, 3).parameters, lambda: [nn.Parameter(torch.ones(3))]):
        with pytest.raises(ValueError, match="^Muon only supports 2D parameters") as error:
            torch.optim.Muon(kind())
        assert "WholeParameters" not in str(error.value)
    assert torch.optim.Muon([nn.Linear(3, 3).weight]).param_groups
