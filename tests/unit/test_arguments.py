"""Errors for wrong arguments and modules that cannot be wrapped name a remedy, and change nothing.

test_errors.py has the errors that torch's FSDP1 raises too.
"""

from __future__ import annotations

import re
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


fake_group = fake_ranks(RANK, 4, scope="function", autouse=False)


def layer() -> nn.Linear:
    return nn.Linear(3, 3)


ARGUMENTS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "strategy": (
        lambda: {"sharding_strategy": "FULL_SHARD"},
        TypeError,
        "instance ShardingStrategy.FULL_SHARD",
    ),
    "precision": (
        lambda: {"mixed_precision": torch.bfloat16},
        TypeError,
        "pass for instance MixedPrecision\\(",
    ),
    "dtype": (
        lambda: {"mixed_precision": MixedPrecision(param_dtype="bfloat16")},
        TypeError,
        "MixedPrecision.param_dtype must be a dtype or None, not str 'bfloat16': pass for instance "
        "torch.bfloat16",
    ),
    "integers": (
        lambda: {"mixed_precision": MixedPrecision(reduce_dtype=torch.int32)},
        ValueError,
        "MixedPrecision.reduce_dtype is torch.int32: pass a floating-point dtype",
    ),
    "offload": (
        lambda: {"cpu_offload": True},
        TypeError,
        "not bool True: .*CPUOffload\\(offload_params",
    ),
    "prefetch": (
        lambda: {"backward_prefetch": "pre"},
        TypeError,
        "pass for instance BackwardPrefetch.BACKWARD_PRE",
    ),
    "policy": (
        lambda: {"auto_wrap_policy": {nn.Linear}},
        TypeError,
        "not set .*ModuleWrapPolicy\\({Tr",
    ),
    "class as policy": (lambda: {"auto_wrap_policy": nn.Linear}, TypeError, "not Linear: .*ModuleWrapPolicy"),
    "group": (lambda: {"process_group": "gloo"}, TypeError, "not str 'gloo': pass for instance .*new_group"),
    "pair": (
        lambda: {"process_group": (dist.group.WORLD, 3)},
        TypeError,
        "not int 3: pass for instance .*new_group",
    ),
    "foreign group": (
        lambda: {"process_group": dist.new_group([0, 2])},
        ValueError,
        "rank 1 is not in process_group: wrap the module on the ranks of the group only",
    ),
    "another CPU": (lambda: {"device_id": "cpu:9"}, ValueError, "device_id=cpu:9 on rank 1 .* one CPU"),
    "mesh": (lambda: {"device_mesh": "cpu"}, TypeError, "not str 'cpu': pass for instance init_device_mesh"),
    "device": (
        lambda: {"device_id": [0]},
        TypeError,
        "device_id .* not list \\[0\\]: pass for instance torch.device",
    ),
    "device name": (
        lambda: {"device_id": "gpu"},
        RuntimeError,
        "'gpu' on rank 1 names no device here.*leave it out",
    ),
    "device of no backend": (
        lambda: {"device_id": torch.device("meta")},
        AttributeError,
        "pass another device",
    ),
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_of_another_type_is_refused_and_nothing_changed(name: str) -> None:
    make, error, message = ARGUMENTS[name]
    net = nn.Sequential(layer(), layer())
    before = {module: {**vars(module)} for module in net.modules()}
    attributes = [{**vars(param)} for param in net.parameters()]
    with pytest.raises(error, match=message):
        FSDP(net, **make())
    assert {module: {**vars(module)} for module in net.modules()} == before
    assert [{**vars(param)} for param in net.parameters()] == attributes


def sharded_by_torch() -> nn.Module:
    inner = layer()
    fully_shard(inner, mesh=init_device_mesh("cpu", (4,)))
    return nn.Sequential(inner)


MODULES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [layer()], TypeError, "expected an nn.Module but got list: pass the module itself"),
    "class": (lambda: nn.Linear, TypeError, r"got the class Linear: pass an instance, Linear\(\)"),
    "FSDP2": (
        sharded_by_torch,
        ValueError,
        "'0' is already sharded by torch's own FSDP .*from the plain module",
    ),
    "complex": (
        lambda: nn.Linear(3, 3, dtype=torch.complex64),
        ValueError,
        "complex dtype tensors: weight is torch.complex64. Pass it in ignored_states. If it is trained, give",
    ),
    "uninitialised": (
        lambda: nn.LazyLinear(3),
        ValueError,
        "'weight' of LazyLinear .*`forward` with a dummy batch",
    ),
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", MODULES)
def test_module_that_cannot_be_wrapped_is_refused(name: str) -> None:
    build, error, message = MODULES[name]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        FSDP(build())


@pytest.mark.usefixtures("fake_group")
@both_views
def test_wrapping_a_unit_again_warns_and_adds_a_unit_without_parameters(use_orig_params: bool) -> None:
    """As torch allows it: the outer unit is one without parameters."""
    inner = FSDP(layer(), use_orig_params=use_orig_params)
    with pytest.warns(UserWarning, match="is a FullyShardedDataParallel already.*wrap it once"):
        outer = FSDP(inner, use_orig_params=use_orig_params)
    assert outer._handle is None and outer.module is inner
    assert [name for name, _ in outer.state_dict().items()] == ["weight", "bias"]


def test_wrapping_without_a_process_group_names_init_process_group() -> None:
    assert not dist.is_initialized()
    net = layer()
    with pytest.raises(
        ValueError, match=r"init_process_group\(\) before wrapping, in a script started with torchrun"
    ):
        FSDP(net)
    assert type(net.weight) is nn.Parameter


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "full parameters of a list": (
        lambda: FSDP.summon_full_params([layer()]).__enter__(),
        TypeError,
        "expected an nn.Module but got list",
    ),
    "units of a list": (
        lambda: FSDP.fsdp_modules([FSDP(layer())]),
        TypeError,
        "expected an nn.Module but got list",
    ),
    "kind of state dict": (
        lambda: FSDP.set_state_dict_type(FSDP(layer()), "FULL_STATE_DICT"),
        TypeError,
        "not str 'FULL_STATE_DICT': pass for instance StateDictType.FULL_STATE_DICT",
    ),
    "kind of its configuration": (
        lambda: FSDP.set_state_dict_type(
            FSDP(layer()), StateDictType.FULL_STATE_DICT, StateDictType.FULL_STATE_DICT
        ),
        RuntimeError,
        r"pass FullStateDictConfig\(",
    ),
    "optimizer state the wrong way round": (
        lambda: FSDP.optim_state_dict(sgd(net := FSDP(layer())), net),
        TypeError,
        "expected an nn.Module but got SGD",
    ),
    "no optimizer": (
        lambda: FSDP.optim_state_dict(FSDP(layer()), None),
        TypeError,
        "optimizer but got NoneType: pass",
    ),
    "no optimizer to load": (
        lambda: FSDP.optim_state_dict_to_load(FSDP(layer()), FSDP(layer()), {"state": {}}),
        TypeError,
        "expected an optimizer but got FullyShardedDataParallel: pass the one over",
    ),
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_call_with_something_else_is_refused(name: str) -> None:
    attempt, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        attempt()


def backward_through(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def assign_a_parameter(model: Heads) -> None:
    model.second.weight = nn.Parameter(torch.ones(3, 3))


def assign_a_tensor(model: Heads) -> None:
    model.second.weight = torch.ones(3, 3)


def tie(model: Heads) -> None:
    model.second.weight = model.first.weight


@pytest.mark.parametrize("assign", [assign_a_parameter, assign_a_tensor, tie])
@pytest.mark.parametrize("trained", [False, True], ids=["first", "trained"])
@pytest.mark.usefixtures("fake_group")
def test_parameter_assigned_after_wrapping_is_refused_by_the_next_forward(
    trained: bool, assign: Callable[[Heads], None]
) -> None:
    """Each rank would train it alone, and no state dict would have it; torch undoes it without a word."""
    model = FSDP(Heads(), device_id=torch.device("cpu"))
    if trained:
        backward_through(model)
    before = model.module.second.weight
    assign(model.module)
    with pytest.raises(
        RuntimeError, match="rank 1, unit Heads: something else was assigned to second.weight after .*"
    ):
        backward_through(model)
    assert model.training_state.name == "IDLE"
    model.module.second._parameters.pop("weight", None)
    model.module.second.__dict__["weight"] = before
    backward_through(model)


@both_views
@pytest.mark.usefixtures("fake_group")
def test_a_parameter_that_was_deleted_after_wrapping_is_not_missed(use_orig_params: bool) -> None:
    class Partly(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    model = FSDP(Partly(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    del model.module.second.weight
    backward_through(model)


@both_views
@pytest.mark.usefixtures("fake_group")
def test_scripted_modules_are_refused_by_name(use_orig_params: bool) -> None:
    module = Heads()
    module.second = torch.jit.script(layer())
    with pytest.raises(
        RuntimeError,
        match="a script module: second.weight is one's. Wrap.*ignored_modules. If it is trained, give all",
    ):
        FSDP(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    assert [name for name, _ in module.named_parameters()][::2] == ["first.weight", "second.weight"]
    FSDP(
        module,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        ignored_modules=[module.second],
    )


@pytest.mark.parametrize("way", ["overwrite", "swap"])
@both_views
@pytest.mark.usefixtures("fake_group")
def test_conversions_that_replace_parameters_are_refused(use_orig_params: bool, way: str) -> None:
    model = FSDP(Heads(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    before = list(model.parameters())
    set_flag = getattr(torch.__future__, f"set_{way}_module_params_on_conversion")
    set_flag(True)
    try:
        with pytest.raises(
            RuntimeError, match=f"rank 1, unit Heads: torch.__future__.set_{way}_module_params_on_.*"
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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0, 0), ValueError, "norm_type must be above 0, not 0.0"),
        ((1.0, -2), ValueError, "norm_type must be above 0"),
        ((1.0, float("nan")), ValueError, "norm_type must be above 0, not nan"),
        ((-1.0,), ValueError, "max_norm must be at least 0, not -1.0"),
        ((float("nan"),), ValueError, "max_norm must be at least 0, not nan"),
        ((None,), TypeError, "max_norm must be a number, not NoneType None"),
        ((1.0, "two"), ValueError, "norm_type must be a number, not str 'two'"),
    ],
)
@pytest.mark.usefixtures("fake_group")
def test_norms_that_are_none_are_refused(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """torch divides by zero, reverses gradients or makes them NaN."""
    model = FSDP(layer())
    with pytest.raises(error, match=message):
        model.clip_grad_norm_(*arguments)


@pytest.mark.usefixtures("fake_group")
def test_the_scaler_refuses_a_group_by_name() -> None:
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None"):
        ShardedGradScaler("cpu", process_group="gloo")  # type: ignore[arg-type]


def test_the_scaler_takes_a_device_for_its_type() -> None:
    assert ShardedGradScaler(torch.device("cpu"), enabled=True)._device == "cpu"  # type: ignore[arg-type]


@both_views
@pytest.mark.usefixtures("fake_group")
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


@pytest.mark.usefixtures("fake_group")
def test_optimizer_and_its_state_dict_of_other_types_are_refused() -> None:
    model = FSDP(layer())
    optimizer = torch.optim.Adam(model.parameters())
    for nothing in (None, [1]):
        with pytest.raises(
            TypeError, match=f"expected an optimizer's state dict but got {type(nothing).__name__}"
        ):
            FSDP.optim_state_dict_to_load(model, optimizer, nothing)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="expected an optimizer but got str: pass the one over model.parameters"
    ):
        optim_state(model, "adam")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.usefixtures("fake_group")
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
@pytest.mark.usefixtures("fake_group")
def test_save_with_a_fake_process_group_is_refused(tmp_path: Path, background: bool) -> None:
    model = FSDP(layer(), device_id=torch.device("cpu"))
    words = (
        f"saving {tmp_path / 'ckpt'}: of the 4 ranks of torch's fake process group only rank {RANK} exists"
    )
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(model, None, tmp_path / "ckpt", background=background)
    assert not list(tmp_path.iterdir())
