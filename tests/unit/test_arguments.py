"""Errors for wrong arguments and modules that cannot be wrapped name a remedy, and change nothing.

test_errors.py has the errors that torch's FSDP1 raises too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision, ShardedGradScaler, StateDictType, checkpoint
from fsdp_c.checkpoint import CheckpointError
from fsdp_c.checkpoint.optim_state import optim_state
from fsdp_c.sharding import flattening
from tests.collectives import fake_ranks
from tests.ranks import both_views

RANK = 1

_group = fake_ranks(RANK, 4)


def layer() -> nn.Linear:
    return nn.Linear(3, 3)


# Arguments of the constructor, or a function that makes them; the error, and its text.
ARGUMENTS: list[tuple[Any, type[Exception], str]] = [
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "instance ShardingStrategy.FULL_SHARD"),
    ({"mixed_precision": torch.bfloat16}, TypeError, r"pass for instance MixedPrecision\("),
    (
        {"mixed_precision": MixedPrecision(param_dtype="bfloat16")},
        TypeError,
        "param_dtype must be a dtype or None, not str 'bfloat16': pass for instance torch.bfloat16",
    ),
    (
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.int32)},
        ValueError,
        "MixedPrecision.reduce_dtype is torch.int32: pass a floating-point dtype",
    ),
    ({"cpu_offload": True}, TypeError, r"not bool True: .*CPUOffload\(offload_params"),
    ({"backward_prefetch": "pre"}, TypeError, "pass for instance BackwardPrefetch.BACKWARD_PRE"),
    ({"auto_wrap_policy": {nn.Linear}}, TypeError, r"not set .*ModuleWrapPolicy\({Tr"),
    ({"auto_wrap_policy": nn.Linear}, TypeError, "not Linear: .*ModuleWrapPolicy"),
    ({"process_group": "gloo"}, TypeError, "not str 'gloo': pass for instance .*new_group"),
    (lambda: {"process_group": (dist.group.WORLD, 3)}, TypeError, "not int 3: pass for instance .*new_group"),
    (
        lambda: {"process_group": dist.new_group([0, 2])},
        ValueError,
        "rank 1 is not in process_group: wrap the module on the ranks of the group only",
    ),
    ({"device_id": "cpu:9"}, ValueError, "device_id=cpu:9 on rank 1 .* one CPU"),
    ({"device_mesh": "cpu"}, TypeError, "not str 'cpu': pass for instance init_device_mesh"),
    ({"device_id": [0]}, TypeError, r"device_id .* not list \[0\]: pass for instance torch.device"),
    ({"device_id": "gpu"}, RuntimeError, "'gpu' on rank 1 names no device here.*leave it out"),
    ({"device_id": torch.device("meta")}, AttributeError, "pass another device"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ARGUMENTS)
def test_argument_of_another_type_is_refused_and_nothing_changed(
    arguments: Any, error: type[Exception], message: str
) -> None:
    net = nn.Sequential(layer(), layer())
    before = {module: {**vars(module)} for module in net.modules()}
    attributes = [{**vars(param)} for param in net.parameters()]
    with pytest.raises(error, match=message):
        FSDP(net, **(arguments() if callable(arguments) else arguments))
    assert {module: {**vars(module)} for module in net.modules()} == before
    assert [{**vars(param)} for param in net.parameters()] == attributes


def sharded_by_torch() -> nn.Module:
    inner = layer()
    fully_shard(inner, mesh=init_device_mesh("cpu", (4,)))
    return nn.Sequential(inner)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: [layer()], TypeError, "expected an nn.Module but got list: pass the module itself"),
        (lambda: nn.Linear, TypeError, r"got the class Linear: pass an instance, Linear\(\)"),
        (
            sharded_by_torch,
            ValueError,
            "'0' is already sharded by torch's own FSDP (?s:.)*from the plain module",
        ),
        (
            lambda: nn.Linear(3, 3, dtype=torch.complex64),
            ValueError,
            "complex dtype tensors: weight is torch.complex64. Pass it in ignored_states. If it is trained, give",
        ),
        (lambda: nn.LazyLinear(3), ValueError, "'weight' of LazyLinear (?s:.)*`forward` with a dummy batch"),
    ],
)
def test_module_that_cannot_be_wrapped_is_refused(
    build: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FSDP(build())


@both_views
def test_wrapping_a_unit_again_warns_and_adds_a_unit_without_parameters(use_orig_params: bool) -> None:
    """As torch allows it: the outer unit is one without parameters."""
    inner = FSDP(layer(), use_orig_params=use_orig_params)
    with pytest.warns(UserWarning, match="is a FullyShardedDataParallel already.*wrap it once"):
        outer = FSDP(inner, use_orig_params=use_orig_params)
    assert outer._handle is None and outer.module is inner
    assert [name for name, _ in outer.state_dict().items()] == ["weight", "bias"]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def sharded() -> Any:
    return FSDP(layer())


FULL = StateDictType.FULL_STATE_DICT
CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: FSDP.summon_full_params([layer()]).__enter__(),
        TypeError,
        "expected an nn.Module but got list",
    ),
    (lambda: FSDP.fsdp_modules([sharded()]), TypeError, "expected an nn.Module but got list"),
    (
        lambda: FSDP.set_state_dict_type(sharded(), "FULL_STATE_DICT"),
        TypeError,
        "not str 'FULL_STATE_DICT': pass for instance StateDictType.FULL_STATE_DICT",
    ),
    (
        lambda: FSDP.set_state_dict_type(sharded(), FULL, FULL),
        RuntimeError,
        r"pass FullStateDictConfig\(",
    ),
    (
        lambda: FSDP.optim_state_dict(sgd(net := sharded()), net),
        TypeError,
        "expected an nn.Module but got SGD",
    ),
    (lambda: FSDP.optim_state_dict(sharded(), None), TypeError, "optimizer but got NoneType: pass"),
    (
        lambda: FSDP.optim_state_dict_to_load(sharded(), sharded(), {"state": {}}),
        TypeError,
        "expected an optimizer but got FullyShardedDataParallel: pass the one over",
    ),
    (
        lambda: FSDP.optim_state_dict_to_load(net := sharded(), sgd(net), None),
        TypeError,
        "expected an optimizer's state dict but got NoneType",
    ),
    (
        lambda: FSDP.optim_state_dict_to_load(net := sharded(), sgd(net), [1]),
        TypeError,
        "expected an optimizer's state dict but got list",
    ),
    (
        lambda: optim_state(sharded(), "adam"),
        TypeError,
        "expected an optimizer but got str: pass the one over model.parameters",
    ),
    (
        lambda: ShardedGradScaler("cpu", process_group="gloo"),
        TypeError,
        "process_group must be a ProcessGroup or None",
    ),
    # torch divides by zero, reverses gradients or makes them NaN
    (lambda: sharded().clip_grad_norm_(1.0, 0), ValueError, "norm_type must be above 0, not 0.0"),
    (lambda: sharded().clip_grad_norm_(1.0, -2), ValueError, "norm_type must be above 0"),
    (lambda: sharded().clip_grad_norm_(1.0, math.nan), ValueError, "norm_type must be above 0, not nan"),
    (lambda: sharded().clip_grad_norm_(-1.0), ValueError, "max_norm must be at least 0, not -1.0"),
    (lambda: sharded().clip_grad_norm_(math.nan), ValueError, "max_norm must be at least 0, not nan"),
    (lambda: sharded().clip_grad_norm_(None), TypeError, "max_norm must be a number, not NoneType None"),
    (lambda: sharded().clip_grad_norm_(1.0, "two"), ValueError, "norm_type must be a number, not str 'two'"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("attempt", "error", "message"), CALLS)
def test_call_with_something_else_is_refused(
    attempt: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attempt()


def backward_through(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def wrapped(module: nn.Module | None = None, **arguments: Any) -> Any:
    return FSDP(module or nn.Sequential(layer(), layer()), device_id=torch.device("cpu"), **arguments)


@pytest.mark.parametrize(
    "assigned",
    [
        lambda model: nn.Parameter(torch.ones(3, 3)),
        lambda model: torch.ones(3, 3),
        lambda model: model[0].weight,
    ],
    ids=["parameter", "tensor", "tied"],
)
@pytest.mark.parametrize("trained", [False, True], ids=["first", "trained"])
def test_parameter_assigned_after_wrapping_is_refused_by_the_next_forward(
    trained: bool, assigned: Callable[[Any], torch.Tensor]
) -> None:
    """Each rank would train it alone, and no state dict would have it; torch undoes it without a word."""
    model = wrapped()
    if trained:
        backward_through(model)
    before = model[1].weight
    model[1].weight = assigned(model)
    with pytest.raises(
        RuntimeError, match="rank 1, unit Sequential: something else was assigned to 1.weight after .*"
    ):
        backward_through(model)
    assert model.training_state.name == "IDLE"
    model[1]._parameters.pop("weight", None)
    model[1].__dict__["weight"] = before
    backward_through(model)


@both_views
def test_a_parameter_that_was_deleted_after_wrapping_is_not_missed(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    model.module.forward = model[0].forward
    del model[1].weight
    backward_through(model)


@both_views
def test_scripted_modules_are_refused_by_name(use_orig_params: bool) -> None:
    module = nn.Sequential(layer(), torch.jit.script(layer()))
    with pytest.raises(
        RuntimeError,
        match="a script module: 1.weight is one's. Wrap.*ignored_modules. If it is trained, give all",
    ):
        wrapped(module, use_orig_params=use_orig_params)
    assert [name for name, _ in module.named_parameters()][::2] == ["0.weight", "1.weight"]
    wrapped(module, use_orig_params=use_orig_params, ignored_modules=[module[1]])


@pytest.mark.parametrize("way", ["overwrite", "swap"])
@both_views
def test_conversions_that_replace_parameters_are_refused(use_orig_params: bool, way: str) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    before = list(model.parameters())
    set_flag = getattr(torch.__future__, f"set_{way}_module_params_on_conversion")
    set_flag(True)
    try:
        with pytest.raises(
            RuntimeError, match=f"rank 1, unit Sequential: torch.__future__.set_{way}_module_params_on_.*"
        ):
            nn.Sequential(model).to(torch.bfloat16)
    finally:
        set_flag(False)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert model.to(torch.bfloat16)._handle.flat_param.dtype == torch.bfloat16


def test_an_error_that_lists_parameters_names_ten() -> None:
    params = [nn.Parameter(torch.ones(1), requires_grad=index % 2 == 0) for index in range(80)]
    with pytest.raises(ValueError, match="'p18'] and 30 more, frozen are .*'p19'] and 30 more. Pass"):
        flattening.check_uniform(params, [f"p{index}" for index in range(80)], use_orig_params=False)


def test_the_scaler_takes_a_device_for_its_type() -> None:
    assert ShardedGradScaler(torch.device("cpu"), enabled=True)._device == "cpu"  # type: ignore[arg-type]


@both_views
def test_an_optimizer_of_other_parameters_is_refused(use_orig_params: bool) -> None:
    """torch raises a KeyError with the tensor."""
    plain = layer()
    before = torch.optim.Adam(plain.parameters())
    other = torch.optim.Adam(layer().parameters())
    model = FSDP(plain, use_orig_params=use_orig_params)
    for optimizer in (other,) if use_orig_params else (before, other):
        for refused in (
            lambda optimizer=optimizer: FSDP.optim_state_dict(model, optimizer),
            lambda optimizer=optimizer: FSDP.optim_state_dict_to_load(
                model, optimizer, optimizer.state_dict()
            ),
        ):
            with pytest.raises(
                KeyError, match=r"not the model's, of shapes \[\(3, 3\), \(3,\)\]: create the opt"
            ):
                refused()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_loading_integers_or_complex_numbers_warns_once(dtype: torch.dtype) -> None:
    model = FSDP(nn.Sequential(FSDP(layer()), layer()))
    values = {name: torch.ones(tensor.shape, dtype=dtype) for name, tensor in layer().state_dict().items()}
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        model.load_state_dict(
            {f"{index}.{name}": value for index in range(2) for name, value in values.items()}
        )
    told = [str(one.message) for one in record if "integers or complex" in str(one.message)]
    assert len(told) == 1 and "['1.weight', '1.bias', '0.weight', '0.bias']" in told[0]
    assert model._handle.local_shard[0] == 1


@pytest.mark.parametrize("background", [False, True])
def test_save_with_a_fake_process_group_is_refused(tmp_path: Path, background: bool) -> None:
    model = FSDP(layer(), device_id=torch.device("cpu"))
    words = (
        f"saving {tmp_path / 'ckpt'}: of the 4 ranks of torch's fake process group only rank {RANK} exists"
    )
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(model, None, tmp_path / "ckpt", background=background)
    assert not list(tmp_path.iterdir())
