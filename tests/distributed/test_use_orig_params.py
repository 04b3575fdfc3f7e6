"""use_orig_params: what the user does to parameters and gradients between steps, bitwise as with torch's
FSDP1."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.models import WIDTH
from tests.parity.engine import implementation, same_bits
from tests.ranks import all_strategies, device, on_ranks
from tests.simulated_gpu import races
from tests.training import batch, sharded, wrap

STEPS = 4
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=False),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.02, fused=True),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=0.05, foreach=True),
}


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(rank, step)).float().square().mean().backward()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names in the user's model."""
    return {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}


class Trace(dict[str, Any]):
    """What a run of one implementation showed, by moment."""

    def record(self, moment: str, params: dict[str, nn.Parameter]) -> None:
        for name, param in params.items():
            self[f"{moment} {name}"] = param.detach().clone()
            self[f"{moment} {name} grad"] = None if param.grad is None else param.grad.clone()


Body = Callable[[Any, Trace, int], None]


def compare(rank: int, body: Body, strategy: str, torch_races: bool = False, **arguments: Any) -> Trace:
    """Run the body on torch's FSDP1 and on fsdp_c, require equal records, return fsdp_c's."""
    traces = {}
    for name in ("torch", "fsdp_c"):
        traces[name] = Trace()
        body(sharded(name, strategy, **arguments), traces[name], rank)
        if torch_races and name == "torch":
            races.forget()
    expected, actual = traces["torch"], traces["fsdp_c"]
    assert expected.keys() == actual.keys()
    different = [moment for moment in expected if not same_bits(expected[moment], actual[moment])]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:5]}"
    return actual


def steps(
    model: Any,
    trace: Trace,
    rank: int,
    optimizer: Any,
    before: Callable[[dict[str, nn.Parameter], int], None],
) -> None:
    """STEPS steps; ``before(params, step)`` acts before each. The parameters are those of the start."""
    params = named(model)
    for step in range(STEPS):
        before(params, step)
        backward(model, step, rank)
        trace.record(f"step {step} backward", params)
        optimizer.step()
        optimizer.zero_grad()
        trace.record(f"step {step}", params)


def nothing(params: dict[str, nn.Parameter], step: int) -> None:
    pass


# ----------------------------------------------------------------- what is visible


@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_parameters_are_flat_shards_and_empty_outside_of_it(rank: int, strategy: str) -> None:
    model = sharded("fsdp_c", strategy)
    backward(model, 0, rank)
    infos = zip(model._flat_param._params, model._flat_param._shard_param_infos, strict=True)
    seen = set()
    for param, info in infos:
        seen.add(info.in_shard)
        assert param.dim() == 1 and param.numel() == (info.numel_in_shard if info.in_shard else 0)
        assert isinstance(param, nn.Parameter) and (param.grad is None) == (not info.in_shard)
        if info.in_shard:
            assert param.grad.shape == param.shape
            start, end = info.offset_in_shard, info.offset_in_shard + info.numel_in_shard
            assert torch.equal(param.detach(), model._flat_param._local_shard[start:end])
            assert torch.equal(param.grad, model._flat_param.grad[start:end])
    assert True in seen


@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_the_flat_gradient_goes_with_the_last_gradient_of_a_parameter(rank: int, strategy: str) -> None:
    model = sharded("fsdp_c", strategy)
    flat_param = model._flat_param

    def shown() -> list[nn.Parameter]:
        return [param for param in flat_param._params if param.grad is not None]

    for order in (1, -1):
        backward(model, 0, rank)
        for param in shown()[::order]:
            assert flat_param.grad is not None
            param.grad = None
        assert flat_param.grad is None and model._handle.sharded_grad is None
    backward(model, 0, rank)
    for param in shown():  # all replaced by the user's own: these are what the next backward adds to
        assert flat_param.grad is not None
        param.grad = param.grad.clone().fill_(3.0)
    assert flat_param.grad is None
    backward(model, 0, rank)
    twice = flat_param.grad.clone()
    for param in shown():
        param.grad = None
    backward(model, 0, rank)
    covered = flat_param.grad != 0
    assert torch.equal(twice[covered], flat_param.grad[covered] + 3.0)


@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_a_model_that_is_dropped_with_its_gradients_goes_quietly(rank: int, strategy: str) -> None:
    gc.collect()  # what torch's FSDP1 left open in other tests may say something as it is closed
    said: list[str] = []
    model = sharded("fsdp_c", strategy)
    backward(model, 0, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda one: said.append(str(one.exc_value)))
        del model
        gc.collect()
    assert not said


@all_strategies
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@on_ranks(2)
def test_what_is_visible_after_forward_and_backward_is_what_torch_shows(
    rank: int, grad: bool, strategy: str
) -> None:
    shown = {}
    for name in ("torch", "fsdp_c"):
        model = sharded(name, strategy)
        with torch.set_grad_enabled(grad):
            output = model(batch(rank, 0))
        weights = [model.inp.weight, model.blocks[0]._fsdp_wrapped_module.up.weight]
        shown[name] = [(type(weight), weight.shape) for weight in weights]
        if grad:
            output.square().mean().backward()
        weights = [model.inp.weight, model.blocks[0]._fsdp_wrapped_module.up.weight]
        shown[name] += [(type(weight), weight.shape) for weight in weights]
    assert shown["torch"] == shown["fsdp_c"]


# ----------------------------------------------------------------- optimizers


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@all_strategies
@on_ranks(2)
def test_optimizers_train_bitwise_as_with_torch(rank: int, strategy: str, optimizer_name: str) -> None:
    def body(model: Any, trace: Trace, rank: int) -> None:
        steps(model, trace, rank, OPTIMIZERS[optimizer_name](model.parameters()), nothing)

    compare(rank, body, strategy)


@all_strategies
@on_ranks(2)
def test_groups_give_parameters_their_own_hyperparameters(rank: int, strategy: str) -> None:
    def body(model: Any, trace: Trace, rank: int) -> None:
        params = named(model)
        decayed = [
            param for name, param in params.items() if not name.endswith("bias") and "norm" not in name
        ]
        others = [param for name, param in params.items() if name.endswith("bias") or "norm" in name]
        groups = [{"params": decayed, "weight_decay": 0.5, "lr": 0.1}, {"params": others, "lr": 0.01}]
        steps(model, trace, rank, torch.optim.AdamW(groups, weight_decay=0.0), nothing)

    compare(rank, body, strategy)


# ----------------------------------------------------------------- freezing


def freeze_root(params: dict[str, nn.Parameter], step: int) -> None:
    for name, param in params.items():
        if not name.startswith("blocks."):
            param.requires_grad_(step in (0, 3))


@pytest.mark.parametrize("name", ["torch", "fsdp_c"])
@on_ranks(2)
def test_wholly_frozen_root_under_no_shard_is_unfrozen(rank: int, name: str) -> None:
    """torch leaves plain tensors on the modules of such a root and never looks at requires_grad again; 2.15
    raises."""
    model, untouched = sharded(name, "NO_SHARD"), sharded(name, "NO_SHARD")
    params = named(model)
    freeze_root(params, 1)
    backward(model, 0, rank)
    freeze_root(params, 3)
    model.zero_grad()
    with contextlib.suppress(RuntimeError) if name == "torch" else contextlib.nullcontext():
        backward(model, 1, rank)
    backward(untouched, 1, rank)
    expected = named(untouched)["head.bias"].grad
    grad = params["head.bias"].grad
    assert grad is None if name == "torch" else torch.equal(grad, expected)


# ----------------------------------------------------------------- writeback


def edit_in_place(model: Any, param: nn.Parameter, name: str) -> None:
    with torch.no_grad():
        param.mul_(0.5).add_(0.125)


def replace_data(model: Any, param: nn.Parameter, name: str) -> None:
    param.data = param.detach() * 0.5 + 0.125


def replace_parameter(model: Any, param: nn.Parameter, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    owner = dict((key.replace("_fsdp_wrapped_module.", ""), module) for key, module in model.named_modules())
    module = owner[path]
    module = getattr(module, "_fsdp_wrapped_module", module)
    setattr(module, attribute, nn.Parameter(param.detach() * 0.5 + 0.125))


EDITS = {"in_place": edit_in_place, "data": replace_data, "parameter": replace_parameter}


@pytest.mark.parametrize("edit", EDITS)
@all_strategies
@on_ranks(2)
def test_edited_parameters_are_taken_over(rank: int, strategy: str, edit: str) -> None:
    def body(model: Any, trace: Trace, rank: int) -> None:
        for name, param in list(named(model).items()):
            if param.numel() and name in (
                "inp.weight",
                "blocks.0.up.weight",
                "blocks.2.norm.bias",
                "head.bias",
            ):
                EDITS[edit](model, param, name)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with torch.no_grad():
            trace["output"] = model(batch(rank, 0))
        steps(model, trace, rank, optimizer, nothing)

    trace = compare(rank, body, strategy)
    with torch.no_grad():
        assert not torch.equal(trace["output"], sharded("fsdp_c", strategy)(batch(rank, 0)))


@pytest.mark.parametrize("change", ["replaced", "none", "all_none", "scaled"])
@all_strategies
@on_ranks(2)
def test_edited_gradients_are_taken_over(rank: int, strategy: str, change: str) -> None:
    def edit(params: dict[str, nn.Parameter]) -> None:
        for index, param in enumerate(params.values()):
            if param.grad is None:
                continue
            if change == "replaced" and index % 2:
                param.grad = param.grad * 2 + 1
            elif change == "scaled":
                param.grad.mul_(3)
            elif change == "all_none" or (change == "none" and index % 2):
                param.grad = None

    def body(model: Any, trace: Trace, rank: int) -> None:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step in range(2):
            backward(model, 0, rank)
            edit(named(model))
            trace.record(f"{step} edited", named(model))
            backward(model, 1, rank)  # adds to what the edit left
            trace.record(f"{step} added", named(model))
            optimizer.step()
            optimizer.zero_grad()
            trace.record(f"{step} stepped", named(model))

    # torch takes them over on the stream that gathers, and adds to them on the one that reduces
    compare(rank, body, strategy, torch_races=True)


def unheld(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the first block that lie in the other rank's shard."""
    found = [
        (name, param)
        for name, param in named(model).items()
        if name.startswith("blocks.0.") and not param.numel()
    ]
    assert found
    return found


@on_ranks(2)
def test_data_put_where_the_rank_holds_nothing_is_refused_within_as_many_gathers_as_there_are_such_parameters(
    rank: int,
) -> None:
    """One is looked at per gather. Each rank holds two of the four, so that both raise
    together."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    model = implementation("fsdp_c")(layers, use_orig_params=True, device_id=device())
    with torch.no_grad():
        model(batch(rank, 0))
    name = "3.weight" if rank == 0 else "0.weight"
    named(model)[name].data = torch.ones(3)
    with pytest.raises(RuntimeError) as found, torch.no_grad():
        for _ in range(2):
            model(batch(rank, 0))
    message = str(found.value)
    for part in (
        f"{name} of unit Sequential",
        f"rank {rank} holds none",
        "[3]",
        "summon_full_params(module, writeback=True)",
    ):
        assert part in message


@on_ranks(2)
def test_summon_looks_at_all_parameters_that_the_rank_holds_nothing_of(rank: int) -> None:
    """Before anything is gathered, and nothing is changed by it."""
    model = sharded("fsdp_c")
    with torch.no_grad():
        model(batch(rank, 0))
    edited = [param for _, param in unheld(model)[-1:]]
    for param in edited:
        param.data = torch.ones(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="holds none of the parameter"):
            with type(model).summon_full_params(model.blocks[0]):
                pass
    for param in edited:
        param.data = torch.empty(0)
    with type(model).summon_full_params(model):
        assert named(model)["blocks.0.up.weight"].shape == (7, 5)


@on_ranks(2)
def test_parameter_replaced_where_the_rank_holds_nothing_is_the_parameter_from_then_on(
    rank: int,
) -> None:
    model = sharded("fsdp_c")
    name, param = unheld(model)[0]
    replace_parameter(model, param, name)
    new = named(model)[name]
    assert new is not param
    backward(model, 0, rank)
    assert named(model)[name] is new


@pytest.mark.parametrize("name", ["torch", "fsdp_c"])
@on_ranks(2)
def test_skipped_check_leaves_replaced_data_alone(rank: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SKIP_WRITEBACK_CHECK", "1")
        model = sharded(name)
    backward(model, 0, rank)
    expected = sharded(name)(batch(rank, 0))
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    assert torch.equal(model(batch(rank, 0)), expected)


# ----------------------------------------------------------------- gradients kept low, tied weights, offload


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@pytest.mark.parametrize("net", [{}, {"tied": True}], ids=["plain", "tied"])
@pytest.mark.parametrize("strategy", SHARDED)
@on_ranks(2)
def test_kept_low_precision_gradients_are_visible(
    rank: int, strategy: str, net: dict[str, Any], offload: bool
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = sharded("fsdp_c", strategy, net, mixed_precision=precision, cpu_offload=CPUOffload(offload))
    backward(model, 0, rank)
    held = [param for param in model.parameters() if param.numel()]
    assert {(param.dtype, param.grad.dtype) for param in held} == {(torch.float32, torch.bfloat16)}
    assert all(param.grad.shape == param.shape for param in held)


# ----------------------------------------------------------------- optimizers in backward


def optimizers_in_backward(rank: int, strategy: str, **arguments: Any) -> Trace:
    def body(model: Any, trace: Trace, rank: int) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05, "momentum": 0.9})
        for step in range(STEPS):
            backward(model, step, rank)
            trace.record(f"step {step}", named(model))

    return compare(rank, body, strategy, **arguments)


@all_strategies
@on_ranks(2)
def test_optimizer_in_backward_steps_as_with_torch(rank: int, strategy: str) -> None:
    trace = optimizers_in_backward(rank, strategy)
    assert all(value is None for moment, value in trace.items() if moment.endswith("grad"))


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_optimizer_in_backward_of_hybrid_strategies_steps_as_with_torch(rank: int, strategy: str) -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    optimizers_in_backward(rank, strategy, device_mesh=mesh)


@all_strategies
@on_ranks(2)
def test_optimizer_in_backward_steps_at_each_reduction_as_with_torch(rank: int, strategy: str) -> None:
    """The second recomputation of a unit sees its first step."""

    def body(model: Any, trace: Trace, rank: int) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        for step in range(2):
            outputs = [model(batch(rank, 2 * step + each).requires_grad_()) for each in range(2)]
            sum(outputs).square().mean().backward()
            trace.record(f"step {step}", named(model))

    compare(rank, body, strategy, net={"around": "reentrant"})


@on_ranks(2)
def test_optimizer_in_backward_has_gradients_that_come_after_the_units_own(rank: int) -> None:
    """Of a term of the parameters themselves."""
    models = [sharded("fsdp_c") for _ in range(2)]
    _apply_optimizer_in_backward(torch.optim.SGD, models[0].parameters(), {"lr": 0.05})
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for step in range(2):
        for model in models:
            term = sum(param.sum() for param in model.parameters())
            (model(batch(rank, step)).square().mean() + term).backward()
        assert all(param.grad is None for param in models[0].parameters())
        optimizer.step()
        optimizer.zero_grad()
    inside, after = map(named, models)
    for name, param in after.items():  # added in another order
        torch.testing.assert_close(inside[name], param)


@on_ranks(2)
def test_optimizer_in_backward_waits_for_the_synced_backward(rank: int) -> None:
    model = sharded("fsdp_c")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    before = {name: param.detach().clone() for name, param in named(model).items()}
    with model.no_sync():
        backward(model, 0, rank)
    assert all(torch.equal(before[name], param) for name, param in named(model).items())
    backward(model, 1, rank)
    assert not all(torch.equal(before[name], param) for name, param in named(model).items())


@all_strategies
@on_ranks(2)
def test_optimizer_in_backward_of_several_parameters_steps_once(rank: int, strategy: str) -> None:
    steps_taken: dict[int, int] = {}

    class Counting(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> None:
            steps_taken[id(self)] = steps_taken.get(id(self), 0) + 1
            super().step(*args, **kwargs)

    def body(model: Any, trace: Trace, rank: int) -> None:
        steps_taken.clear()
        for unit in (model.module.blocks[0], model.module.blocks[1]):
            optimizer = Counting(unit.parameters(), lr=0.05)
            for param in unit.parameters():
                param._in_backward_optimizers = [optimizer]
        for step in range(2):
            backward(model, step, rank)
            trace.record(f"step {step}", named(model))
        assert set(steps_taken.values()) == {2}

    compare(rank, body, strategy)


@pytest.mark.parametrize("names", [("c",), ("a",), ("b", "a")])
@all_strategies
@on_ranks(2)
def test_parameters_beside_ignored_ones_have_torchs_order(strategy: str, names: tuple[str, ...]) -> None:
    """Optimizers number them so in what they save."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x * self.a + self.b * self.c)

    orders = []
    for name in ("torch", "fsdp_c"):
        module = Three()
        ignored = [getattr(module, ignored_name) for ignored_name in names]
        model = wrap(module, name, strategy, ignored_states=ignored)
        before = list(named(model)), list(model.state_dict())
        model(torch.ones(2, 4, device=device())).sum().backward()
        orders.append((before, list(named(model)), list(model.state_dict())))
    assert orders[0] == orders[1]


@on_ranks(2)
def test_optimizer_in_backward_steps_offloaded_parameters(rank: int) -> None:
    models = [sharded("fsdp_c", cpu_offload=CPUOffload(offload)) for offload in (False, True)]
    for model in models:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
        for step in range(2):
            backward(model, step, rank)
    plain, offloaded = map(named, models)
    assert all(same_bits(plain[name], param) for name, param in offloaded.items())
    assert all(param.grad is None for param in offloaded.values())


@all_strategies
@on_ranks(2)
def test_an_empty_parameter_has_no_gradient_as_with_torch(strategy: str) -> None:
    class WithEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.linear = nn.Parameter(torch.empty(0)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.empty.sum()

    found = []
    for name in ("torch", "fsdp_c"):
        model = wrap(WithEmpty(), name, strategy)
        model(torch.ones(2, 4, device=device())).sum().backward()
        found.append(
            {each: None if param.grad is None else param.grad.shape for each, param in named(model).items()}
        )
    assert found[0] == found[1] and found[1]["empty"] is None
