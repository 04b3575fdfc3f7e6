"""Deliberate differences from torch's FSDP1: the results of torch and of fsdp_c for most rows of the tables
in docs/migrating.md.

If torch kills the process, the docstring says so and only the result of fsdp_c is tested.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullOptimStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_outputs import Returns
from tests.models import WIDTH
from tests.ranks import STRATEGIES, all_strategies, both_views, device, on_ranks
from tests.simulated_gpu import races
from tests.training import PER_BLOCK, batch, plain, sharded, wrap

BOTH = ("torch", "fsdp_c")
NO_ACCELERATOR = (
    "Cannot access accelerator device|Found no NVIDIA driver"  # a CPU build or a CUDA build of torch
)


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients_or_error(step: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    try:
        return step()
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)


# ----------------------------------------------------------------- programs beside the plain module


def is_plain(model: nn.Module) -> bool:
    return not hasattr(type(model), "summon_full_params")


def net_of(model: nn.Module) -> Any:
    return model if is_plain(model) else model.module


def data(model: nn.Module, index: int = 0) -> Tensor:
    """This rank's batch; for the plain model the batches of all ranks together."""
    if not is_plain(model):
        return batch(dist.get_rank(), index)
    return torch.cat([batch(rank, index) for rank in range(dist.get_world_size())])


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    return model(data(model, index)).square().mean()


def evaluated(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch(0))]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def stepped(model: nn.Module, *losses: Tensor) -> list[Tensor]:
    """Outputs after one step by the gradients of ``losses``, each with a backward of its own."""
    for loss in losses:
        loss.backward()
    sgd(model).step()
    return evaluated(model)


def synced(model: Any, on: bool) -> Any:
    return contextlib.nullcontext() if on or is_plain(model) else model.no_sync()


def summoned(model: Any) -> Any:
    return contextlib.nullcontext() if is_plain(model) else type(model).summon_full_params(model)


def train_once(model: Any) -> list[Tensor]:
    return stepped(model, loss_of(model))


def evaluate_before_and_after_a_step(model: Any) -> list[Tensor]:
    optimizer = sgd(model, 0.5)
    loss_of(model).backward()
    evaluated(model)
    optimizer.step()
    return evaluated(model)


def step_after_a_forward_without_backward(model: Any) -> list[Tensor]:
    optimizer = sgd(model, 0.5)
    loss_of(model).backward()
    loss_of(model)
    optimizer.step()
    return [model(batch(0)).detach()]


def evaluate_without_a_prefetched_block(model: Any) -> list[Tensor]:
    optimizer = sgd(model, 0.5)
    for index in range(3):
        loss_of(model, index).backward()
        net_of(model).skip = frozenset({1})
        evaluated(model)
        net_of(model).skip = frozenset()
        optimizer.step()
        optimizer.zero_grad()
    return evaluated(model)


def write_to_a_view(model: Any) -> list[Tensor]:
    output = model(data(model))
    with torch.no_grad():
        model.bias.fill_(3.0)
    output.sum().backward()
    return evaluated(model)


def write_after_no_sync(model: Any) -> list[Tensor]:
    with synced(model, False):
        loss_of(model).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return [model(batch(0)).detach()]


def train_a_unit_alone(model: Any) -> list[Tensor]:
    """Torch adds the gradients that the unit's own backward has left to those of the next step."""
    loss_of(model).backward()
    model.zero_grad()
    net_of(model).blocks[0](data(model, 1)).square().sum().backward()
    model.zero_grad()
    return stepped(model, loss_of(model))


def backward_twice(model: Any, first_synced: bool = True) -> list[Tensor]:
    """Where nothing is freed, torch does not reduce the second gradient."""
    loss = loss_of(model)
    with synced(model, first_synced):
        loss.backward(retain_graph=True)
    return stepped(model, loss)


def zero_grad_before_the_backward(model: Any, set_to_none: bool) -> list[Tensor]:
    """Torch's model shows views in place of parameters there, so that gradients add up over the steps."""
    optimizer = sgd(model, 0.01)
    for index in range(3):
        loss = loss_of(model, index)
        model.zero_grad(set_to_none)
        loss.backward()
        optimizer.step()
    return evaluated(model)


def zero_gradients_of_no_sync_in_place(model: Any) -> list[Tensor]:
    """Torch adds the gradient that was reduced before no_sync to the next one."""
    optimizer = sgd(model)
    for index in range(3):
        loss_of(model, 1).backward()
        with synced(model, False):
            loss_of(model, 2).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluated(model)


def freeze_a_parameter_with_a_gradient(model: Any) -> list[Tensor]:
    """Torch drops the gradient in the next backward."""
    optimizer = sgd(model)
    loss_of(model).backward()
    net_of(model).blocks[0].up.weight.requires_grad_(False)
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    return evaluated(model)


def load_with_assign(model: Any) -> list[Tensor]:
    """Torch goes on with the parameters of before. The plain module loads without assign, as its optimizer
    would train nothing any more."""
    optimizer = sgd(model, 0.01)
    state = {name: torch.full_like(param, 0.05) for name, param in plain().named_parameters()}
    if is_plain(model):
        model.load_state_dict(state, strict=False)
    else:
        with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(model.state_dict() | state, assign=True)
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    return evaluated(model)


def set_data_in_summon_full_params(model: Any) -> list[Tensor]:
    with summoned(model):
        for param in model.parameters():
            param.data = torch.full_like(param, 0.05)
    return evaluated(model)


def set_data_of_flat_parameters(model: Any) -> list[Tensor]:
    """Torch uses the data for one all-gather, and its own shard after that."""
    loss_of(model).backward()
    for param in model.parameters() if is_plain(model) else [model._flat_param]:
        param.data = torch.full_like(param, 0.5)
    output = model(batch(0))
    output.sum().backward()
    return [output.detach(), *evaluated(model)]


def cast_after_a_forward(model: Any) -> list[Tensor]:
    """In mixed precision torch's next forward brings back the values from before the cast."""
    evaluated(model)
    model.to(torch.bfloat16)
    with torch.no_grad():
        model(batch(0).bfloat16())
    return [value.float() for value in model.state_dict().values()]


def infer_before_training(model: Any) -> list[Tensor]:
    optimizer = sgd(model)
    with torch.inference_mode():
        model(batch(0))
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    return evaluated(model)


def arrays_in_summon_full_params(model: Any) -> list[Tensor]:
    if device().type != "cpu":
        pytest.skip("numpy shares the memory of a CPU alone")
    with summoned(model):
        arrays = [param.detach().numpy() for param in model.parameters()]
    return [torch.tensor([array.sum() for array in arrays]), *evaluated(model)]


class Unknown:
    """An object that holds a tensor, of a class that is not registered anywhere."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class AroundUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Returns(Unknown), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).value)


class AllCheckpointed(nn.Sequential):
    """Each layer is in a reentrant checkpoint, and a checkpoint around the first two."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        reentrant = functools.partial(checkpoint, use_reentrant=True)
        x = x if x.requires_grad else x.detach().requires_grad_()
        x = reentrant(lambda x: reentrant(self[1], torch.tanh(reentrant(self[0], x))), x)
        return reentrant(self[2], torch.tanh(x))


class CalledWithOthers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": 2 * self.layer.weight, "bias": 1 + self.layer.bias}
        return functional_call(self.layer, weights, (x,))


class Scaled(nn.Linear):
    """With a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def one_layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def sliced_layer() -> nn.Linear:
    """With gaps between the rows of its weight."""
    layer = one_layer()
    layer.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)[:, WIDTH : 2 * WIDTH])
    return layer


DIFFERENT = None  # torch gives other values
RAISES = ""  # torch raises, whatever it says
STORAGE = "storage of size 0"
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
BOTH_VIEWS = (True, False)


class Program(NamedTuple):
    """A program that torch's FSDP1 gets wrong, and fsdp_c right: as the plain module."""

    run: Callable[[Any], list[Tensor]]
    torchs: str | dict[str, str | None] | None  # words of its error, or DIFFERENT; perhaps by strategy
    module: Callable[[], nn.Module] = plain
    strategies: tuple[str, ...] = ("FULL_SHARD",)
    views: tuple[bool, ...] = (True,)  # values of use_orig_params
    arguments: dict[str, Any] = {"auto_wrap_policy": PER_BLOCK}  # noqa: RUF012  # never changed


def of_strategies(full: str | None, grad_op: str | None, whole: str | None) -> dict[str, str | None]:
    return dict(zip(STRATEGIES, (full, grad_op, whole), strict=True))


PROGRAMS = {
    "evaluation after a step": Program(
        evaluate_before_and_after_a_step, DIFFERENT, one_layer, SHARDED, arguments={}
    ),
    "step after a forward without backward": Program(
        step_after_a_forward_without_backward, DIFFERENT, one_layer, SHARDED, BOTH_VIEWS, {}
    ),
    "evaluation without a prefetched block": Program(
        evaluate_without_a_prefetched_block,
        DIFFERENT,
        arguments={"auto_wrap_policy": PER_BLOCK, "forward_prefetch": True},
    ),
    "write to a view": Program(write_to_a_view, DIFFERENT, one_layer, ("SHARD_GRAD_OP",), arguments={}),
    "write after no_sync": Program(
        write_after_no_sync, DIFFERENT, one_layer, ("SHARD_GRAD_OP",), BOTH_VIEWS, {}
    ),
    "unit trained alone": Program(train_a_unit_alone, DIFFERENT),
    "two backwards": Program(
        backward_twice, of_strategies(STORAGE, STORAGE, DIFFERENT), strategies=STRATEGIES
    ),
    "two backwards, the first in no_sync": Program(
        lambda model: backward_twice(model, False),
        of_strategies(STORAGE, "_saved_grad_shard", DIFFERENT),
        strategies=STRATEGIES,
    ),
    "two forwards through a reentrant checkpoint": Program(
        lambda model: stepped(model, loss_of(model) + loss_of(model, 1)),
        of_strategies(RAISES, RAISES, DIFFERENT),
        lambda: plain(checkpoint_mode="reentrant"),
        STRATEGIES,
    ),
    "reentrant checkpoints around parts of a unit": Program(
        train_once, RAISES, lambda: plain(around="reentrant"), arguments={}
    ),
    "all of a unit in reentrant checkpoints": Program(
        lambda model: stepped(model, loss_of(model, 1), model(data(model).requires_grad_()).square().mean()),
        RAISES,
        AllCheckpointed,
        SHARDED,
        BOTH_VIEWS,
        {},
    ),
    "gradient of the input of a frozen model": Program(
        lambda model: [torch.autograd.grad(model(x := batch(0).requires_grad_()).sum(), x)[0]],
        "A leaf node was passed",
        lambda: one_layer().requires_grad_(False),
        STRATEGIES,
        BOTH_VIEWS,
        {},
    ),
    "zero_grad to None before the backward": Program(
        lambda model: zero_grad_before_the_backward(model, True), DIFFERENT, strategies=("SHARD_GRAD_OP",)
    ),
    "zero_grad to zero before the backward": Program(
        lambda model: zero_grad_before_the_backward(model, False), DIFFERENT, strategies=("SHARD_GRAD_OP",)
    ),
    "gradients of no_sync zeroed in place": Program(
        zero_gradients_of_no_sync_in_place, DIFFERENT, views=BOTH_VIEWS
    ),
    "frozen parameter with a gradient": Program(
        freeze_a_parameter_with_a_gradient, DIFFERENT, strategies=STRATEGIES
    ),
    "load with assign": Program(load_with_assign, DIFFERENT, strategies=STRATEGIES, views=BOTH_VIEWS),
    "data set in summon_full_params": Program(
        set_data_in_summon_full_params, DIFFERENT, strategies=STRATEGIES, views=BOTH_VIEWS
    ),
    "data of a flat parameter": Program(
        set_data_of_flat_parameters, DIFFERENT, one_layer, views=(False,), arguments={}
    ),
    "cast after a forward": Program(
        cast_after_a_forward, "must have the same dtype", one_layer, SHARDED, BOTH_VIEWS, {}
    ),
    "cast after a forward in mixed precision": Program(
        cast_after_a_forward,
        DIFFERENT,
        one_layer,
        STRATEGIES,
        BOTH_VIEWS,
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    ),
    "inference before training": Program(infer_before_training, "The `grad_fn` is needed", views=BOTH_VIEWS),
    "three forwards, then their backwards": Program(
        lambda model: stepped(model, *[loss_of(model, index) for index in range(3)]),
        "out of bounds for storage",
        views=BOTH_VIEWS,
    ),
    "arrays in summon_full_params": Program(arrays_in_summon_full_params, "not resizable", views=BOTH_VIEWS),
    "tensor in an unknown object": Program(
        lambda model: stepped(model, model(data(model).requires_grad_()).square().mean()),
        "storage",
        AroundUnknown,
        arguments={"auto_wrap_policy": ModuleWrapPolicy({Returns})},
    ),
    "functional_call in a forward": Program(evaluated, DIFFERENT, CalledWithOthers, arguments={}),
    "parameter with gaps in memory": Program(
        evaluated, "out of bounds for storage", sliced_layer, arguments={}
    ),
    "parameter without dimensions": Program(
        evaluated, "Change scale to a 1D tensor with numel equal to 1", Scaled, views=BOTH_VIEWS, arguments={}
    ),
}
CASES = [
    pytest.param(name, strategy, view, id=f"{name}-{strategy}-{'orig' if view else 'flat'}")
    for name, program in PROGRAMS.items()
    for strategy in program.strategies
    for view in program.views
]


@pytest.mark.parametrize(("name", "strategy", "use_orig_params"), CASES)
@on_ranks(2)
def test_a_program_is_that_of_the_plain_module(name: str, strategy: str, use_orig_params: bool) -> None:
    program = PROGRAMS[name]

    def run(which: str) -> list[Tensor]:
        torch.manual_seed(5)
        module = program.module()
        if which != "plain":
            module = wrap(module, which, strategy, use_orig_params=use_orig_params, **program.arguments)
        return program.run(module)

    expected = run("plain")
    torchs = program.torchs[strategy] if isinstance(program.torchs, dict) else program.torchs
    if torchs is DIFFERENT:
        with pytest.raises(AssertionError, match="not close"):
            assert_close(run("torch"), expected)
    else:
        with pytest.raises((AssertionError, RuntimeError, ValueError), match=re.escape(torchs)):
            run("torch")
    races.forget()  # torch adds and edits gradients on other streams than those that reduce them
    assert_close(run("fsdp_c"), expected)


# ----------------------------------------------------------------- reductions


@on_ranks(2)
def test_hybrid_shard_over_one_rank_reduces_over_its_replicas(rank: int) -> None:
    found = {}
    for which in BOTH:
        mesh = init_device_mesh(device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
        layer = nn.Linear(1, 1, bias=False)
        model = wrap(layer, which, strategy="HYBRID_SHARD", device_mesh=mesh)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        found[which] = [parameter.grad.item() for parameter in model.parameters()]
    assert found == {"torch": [0.5 * (1 + rank)], "fsdp_c": [1.5]}


@on_ranks(2)
def test_norm_after_an_inf_norm_is_right_on_a_rank_without_gradients() -> None:
    """torch writes the reduced inf norm into a zero that it keeps, and includes it in the next norm."""
    norms = {}
    for which in BOTH:
        model = wrap(nn.Linear(1, 1, bias=False), which)  # rank 1 has none of the single element
        model(torch.full((1, 1), 3.0)).sum().backward()
        norms[which] = [
            model.clip_grad_norm_(100.0, float("inf")).item(),
            model.clip_grad_norm_(100.0, 2.0).item(),
        ]
    assert norms == {"torch": [3.0, pytest.approx(18**0.5)], "fsdp_c": [3.0, 3.0]}


# ----------------------------------------------------------------- state dicts and summon


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"device_id": None}, "needs a non-CPU accelerator"),
        ({"device_id": None, "sync_module_states": True}, "needs a non-CPU accelerator"),
        ({"device_id": None, "cpu_offload": CPUOffload(offload_params=True)}, "needs a non-CPU accelerator"),
        ({"sync_module_states": True}, "requires them to be on GPU"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, NO_ACCELERATOR),
    ],
    ids=["no device", "no device, sync", "no device, offload", "sync", "offload"],
)
@on_ranks(2)
def test_the_cpu_is_a_device_like_others(
    rank: int, world_size: int, arguments: dict[str, Any], refusal: str
) -> None:
    def step(which: str) -> Tensor:
        torch.manual_seed(rank if "sync_module_states" in arguments else 0)
        model = wrap(nn.Linear(WIDTH, WIDTH), which, **arguments)
        model(batch(rank)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        with torch.no_grad():
            return model(batch(0))

    with pytest.raises((RuntimeError, ValueError), match=refusal):
        step("torch")
    outputs = [torch.empty(3, WIDTH) for _ in range(world_size)]
    dist.all_gather(outputs, step("fsdp_c"))
    assert torch.equal(*outputs)


@on_ranks(2)
def test_state_dict_type_is_restored_when_the_body_raises() -> None:
    found = {}
    for which in BOTH:
        model = sharded(which)
        with pytest.raises(KeyError), type(model).state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            raise KeyError
        found[which] = type(model).get_state_dict_type(model).state_dict_type
    assert found == {"torch": StateDictType.SHARDED_STATE_DICT, "fsdp_c": StateDictType.FULL_STATE_DICT}


@pytest.mark.parametrize("query", ["check_is_root", "state_dict"])
@on_ranks(2)
def test_a_query_on_an_inner_unit_decides_nothing(rank: int, query: str) -> None:
    def nested(which: str) -> Tensor:
        inner = wrap(plain(), which)
        getattr(inner, query)()
        outer = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which)
        loss = outer(batch(rank)).sum()
        loss.backward()
        assert outer.check_is_root() and not inner.check_is_root()
        return loss

    with pytest.raises(AssertionError, match="`_is_root` should not have been set yet"):
        nested("torch")
    assert nested("fsdp_c").isfinite()


# ----------------------------------------------------------------- autograd


@on_ranks(2)
def test_a_packed_sequence_is_cast() -> None:
    def run(which: str) -> Tensor:
        model = wrap(nn.LSTM(WIDTH, 4), which, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        return model(pack_sequence([torch.ones(3, WIDTH), torch.ones(2, WIDTH)]))[0].data

    with pytest.raises(RuntimeError, match="must have the same dtype"):
        run("torch")
    assert run("fsdp_c").dtype == torch.bfloat16


class PartlyCheckpointed(nn.Module):
    """Its backward reads no parameter after the checkpointed layer, so that torch can train it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, checkpointed: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(checkpoint(self.inside, x, use_reentrant=True) if checkpointed else self.inside(x))


def frozen_start(which: str) -> Any:
    torch.manual_seed(3)
    model = PartlyCheckpointed()
    model.first.requires_grad_(False)
    return model if which == "plain" else wrap(model, which)


@on_ranks(2)
def test_a_reentrant_checkpoint_after_frozen_parameters_trains_as_without_fsdp(rank: int) -> None:
    """Torch trains what is inside, as the output of its frozen embeddings requires grad; see
    tests/distributed/test_no_gradient.py for what fsdp_c says then."""

    def trained(which: str) -> set[str]:
        model = frozen_start(which)
        model(batch(rank), checkpointed=True).sum().backward()
        with (
            contextlib.nullcontext()
            if which == "plain"
            else type(model).summon_full_params(model, with_grads=True)
        ):
            named = model.named_parameters()
            return {name for name, parameter in named if parameter.grad is not None and parameter.grad.any()}

    assert trained("plain") == trained("fsdp_c") == {"last.weight", "last.bias"}
    assert trained("torch") == {"last.weight", "last.bias", "inside.weight", "inside.bias"}


def adam_trained(which: str, rank: int, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(which, **arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for index in range(2):
        model(batch(rank, index)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_optim_state(
    model: Any, optimizer: torch.optim.Optimizer, offload: bool
) -> dict[str, dict[str, Tensor]]:
    config = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=offload)
    with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return type(model).optim_state_dict(model, optimizer)["state"]


@on_ranks(2)
def test_offloaded_optimizer_state_equals_the_state_on_the_device(rank: int) -> None:
    """On a CPU torch's exp_avg silently equals its exp_avg_sq."""
    for which in BOTH:
        model, optimizer = adam_trained(which, rank)
        offloaded, live = (whole_optim_state(model, optimizer, offload) for offload in (True, False))
        right = all(torch.equal(offloaded[name]["exp_avg"], live[name]["exp_avg"]) for name in live)
        confused = all(torch.equal(state["exp_avg"], state["exp_avg_sq"]) for state in offloaded.values())
        assert (right, confused) == ((True, False) if which == "fsdp_c" else (False, True))


@both_views
@on_ranks(2)
def test_names_of_tied_parameters_come_in_the_order_of_the_plain_model(use_orig_params: bool) -> None:
    """In torch a tied name follows the other parameters of its module; in fsdp_c only without
    use_orig_params.
    """
    names = {
        which: list(sharded(which, net={"tied_head": True}, use_orig_params=use_orig_params).state_dict())
        for which in BOTH
    }
    expected = list(plain(tied_head=True).state_dict())
    tied_last = [name for name in expected if name != "head.weight"] + ["head.weight"]
    assert expected[-2:] == ["head.weight", "head.bias"]
    assert names["torch"] == tied_last
    assert names["fsdp_c"] == (expected if use_orig_params else tied_last)


@on_ranks(2)
def test_a_parameter_of_two_units_is_refused_by_name(rank: int) -> None:
    def run(which: str) -> None:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        wrap(nn.Sequential(wrap(first, which), nn.Sequential(wrap(second, which))), which)(batch(rank))

    with pytest.raises(RuntimeError, match="mat2 must be a matrix, got 1-D tensor"):
        run("torch")
    with pytest.raises(ValueError, match="'weight' of Linear.*wrap the module that contains both"):
        run("fsdp_c")


@on_ranks(2)
def test_gradients_missing_on_one_rank_are_zeros_of_their_own_dtype(rank: int) -> None:
    """torch all-gathers float32 zeros among float64 gradients, and the process dies in the collective
    (SIGABRT).
    """
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double(), "fsdp_c")
    model(batch(rank).double()).sum().backward()
    own = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = None
    with type(model).summon_full_params(model, with_grads=True):
        found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.dtype == torch.float64 for gradient in found)
    assert found[0].count_nonzero() and not found[-1].count_nonzero()
    assert list(own.values()) == ([True, True, False, False] if rank == 0 else [False, False, True, True])


@on_ranks(2)
def test_low_precision_gradients_of_tied_weights_are_kept(rank: int, world_size: int) -> None:
    keep = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)

    def step(which: str) -> set[torch.dtype]:
        model = sharded(which, net={"tied": True}, mixed_precision=keep)
        model(batch(rank)).sum().backward()
        return {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}

    failures = [isinstance(gradients_or_error(lambda: list(step("torch"))), str)]
    dist.all_gather_object(everywhere := [None] * world_size, failures[0])
    assert any(everywhere)
    assert step("fsdp_c") == {torch.bfloat16}


@both_views
@all_strategies
@on_ranks(2)
def test_a_checkpointed_part_is_reduced_with_the_rest(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    """torch reduces the gradients of the part together with those left by no_sync, and the rest separately:
    the order of additions differs.
    """

    def gradients(which: str, checkpointed: bool) -> Tensor:
        torch.manual_seed(5)
        model = wrap(PartlyCheckpointed(), which, strategy, use_orig_params=use_orig_params)
        for index in range(8):
            with contextlib.nullcontext() if index == 7 else model.no_sync():
                model(batch(rank, index), checkpointed).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    without = gradients("torch", False)
    theirs = gradients("torch", True)
    races.forget()  # under NO_SHARD torch adds the rest while the part is reduced on another stream
    assert not torch.equal(theirs, without)
    torch.testing.assert_close(theirs, without)
    assert torch.equal(gradients("fsdp_c", True), without)


@on_ranks(2)
def test_gradients_of_transposed_parameters_lie_as_those_do(rank: int) -> None:
    own, contiguous = (1, WIDTH + 1), (WIDTH, 1)
    strides = {}
    for which in BOTH:
        layer = nn.Linear(WIDTH, WIDTH + 1)
        layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t())
        model = wrap(layer, which, strategy="NO_SHARD")
        model(batch(rank)).sum().backward()
        (weight,) = (param for param in model.parameters() if param.ndim == 2)
        strides[which] = weight.stride(), weight.grad.stride()
    assert strides == {"torch": (own, contiguous), "fsdp_c": (own, own)}


@both_views
@on_ranks(2)
def test_compiled_blocks_are_the_units_that_a_policy_chooses(rank: int, use_orig_params: bool) -> None:
    """torch's units replace the inner modules, but compiled modules still call the original ones."""

    def gradients(which: str, compiles: bool) -> list[Tensor]:
        torch._dynamo.reset()
        module = plain()
        for index, block in enumerate(module.blocks if compiles else ()):
            module.blocks[index] = torch.compile(block, backend="eager")
        model = wrap(module, which, use_orig_params=use_orig_params, auto_wrap_policy=PER_BLOCK)
        model(batch(rank)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    said = gradients_or_error(lambda: gradients("torch", True))
    assert isinstance(said, str)
    races.forget()
    expected = gradients("torch", False)
    found = gradients("fsdp_c", True)
    assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class Shared(nn.Module):
    """One of two modules that contain the same unit."""

    def __init__(self, inner: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.own, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.own(x))


class Both(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def shared(wrapped: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    inner = wrapped(nn.Linear(WIDTH, WIDTH))
    return wrapped(Shared(inner, 1)), wrapped(Shared(inner, 2))


@both_views
@on_ranks(2)
def test_a_unit_in_two_roots_trains_with_one_root_at_a_time(rank: int, use_orig_params: bool) -> None:
    """With forwards of both roots before a backward, torch trains under SHARD_GRAD_OP only."""

    def wrapped(which: str) -> tuple[Any, Any]:
        return shared(lambda module: wrap(module, which, use_orig_params=use_orig_params))

    def in_turn(models: tuple[Any, Any]) -> list[Tensor]:
        optimizer = torch.optim.SGD({one: None for model in models for one in model.parameters()}, lr=0.1)
        optimizer.zero_grad()
        losses = []
        for index in range(3):
            for model in models:
                losses.append(model(batch(0, index)).square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    def together(outputs: Any) -> None:
        torch.stack([output.square().mean() for output in outputs]).sum().backward()

    expected = in_turn(shared(lambda module: module))
    assert_close(in_turn(wrapped("torch")), expected)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        together([model(batch(0)) for model in wrapped("torch")])
    races.forget()
    models = wrapped("fsdp_c")
    with pytest.raises(
        RuntimeError, match=f"rank {rank}, unit Shared: a backward has reached .* around both roots"
    ):
        together([model(batch(0)) for model in models])
    assert_close(in_turn(models), expected)

    remedy, module = (
        wrap(Both(*wrapped("fsdp_c")), "fsdp_c", use_orig_params=use_orig_params),
        Both(*shared(lambda module: module)),
    )
    for model in (remedy, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        together(model(batch(0)))
        optimizer.step()
    for output, expected in zip(remedy(batch(0)), module(batch(0)), strict=True):
        torch.testing.assert_close(output, expected)


@on_ranks(2)
def test_compiled_autograd_is_refused_in_words(rank: int) -> None:
    """torch silently continues with wrong gradients; larger models fail with an error of Dynamo."""

    def two_layers(which: str | None) -> Any:
        torch.manual_seed(3)
        inner, outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        return wrap(nn.Sequential(outer, wrap(inner, which)), which) if which else nn.Sequential(outer, inner)

    def losses(model: Any, compiled: Callable[[], Any]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        found = []
        for index in range(3):
            found.append(model(batch(0, index)).square().sum())
            with compiled():
                found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in found]

    def compiled() -> Any:
        return torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))

    expected = losses(two_layers(None), contextlib.nullcontext)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(losses(two_layers("torch"), compiled), expected)
    races.forget()
    model = two_layers("fsdp_c")
    with pytest.raises(
        NotImplementedError, match=f"rank {rank}, unit .*FullyShardedDataParallel.*compiled_autograd off"
    ):
        losses(model, compiled)
    assert_close(losses(model, contextlib.nullcontext), expected)


@on_ranks(2)
def test_a_refused_set_state_dict_type_changes_no_unit() -> None:
    types = {}
    for which in BOTH:
        model = sharded(which)
        fsdp = type(model)
        fsdp.set_state_dict_type(model.module.blocks[1], StateDictType.SHARDED_STATE_DICT)
        with pytest.raises(AssertionError, match="same state_dict_type"):
            fsdp.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        types[which] = [unit._state_dict_type.name.split("_")[0] for unit in fsdp.fsdp_modules(model)]
    assert types == {
        "torch": ["LOCAL", "LOCAL", "SHARDED", "FULL"],
        "fsdp_c": ["FULL", "FULL", "SHARDED", "FULL"],
    }
