"""Every error and warning that construction, flattening, the runtime and the user's calls owe, by its id.

Rows about what this design cannot run into, and rows where it works instead, are listed in tests/surface_rows.md.
"""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import wrap as torch_wrap
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import _C, FlatParameter, construction, flat_param, fully_sharded_data_parallel, materialization
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.flat_param import FlatParamHandle, HandleShardingStrategy
from fsdp_c.traversal import Subtree
from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy, _recursive_wrap, always_wrap_policy, enable_wrap

WORLD_SIZE, RANK = 4, 1
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def nested(**kwargs: Any) -> FSDP:
    """A root with one inner unit, ``second``."""
    return FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **kwargs)


def inner_unit() -> nn.Module:
    """A plain module with a unit inside."""
    net = Net()
    net.second = FSDP(net.second)
    return net


def on(*devices: str) -> nn.Module:
    """A module with a parameter for each device; those that are not there are on the CPU and say otherwise."""
    return module_of(
        *(type("Elsewhere", (nn.Parameter,), {"device": torch.device(name)})(torch.ones(2)) for name in devices)
    )


def with_backend(attempt: Callable[[], Any]) -> None:
    """With an accelerator, whose current device is cuda:3, that can be asked and not used."""
    backend = types.SimpleNamespace(is_available=lambda: True, current_device=lambda: 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: backend)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        attempt()


def warned_by(attempt: Callable[[], Any]) -> None:
    """Only the warnings count: what the missing accelerator does to the rest of the construction does not."""
    with contextlib.suppress(Exception):
        with_backend(attempt)


def handle_of(params: list[nn.Parameter], module: nn.Module, use_orig_params: bool = False) -> FlatParamHandle:
    group, strategy = dist.group.WORLD, HandleShardingStrategy.FULL_SHARD
    return FlatParamHandle(params, module, CPU, strategy, False, None, None, False, group, use_orig_params)


def module_of(*params: nn.Parameter) -> nn.Module:
    module = nn.Module()
    for index, param in enumerate(params):
        module.register_parameter(f"p{index}", param)
    return module


def flatten(*params: nn.Parameter, use_orig_params: bool = False) -> FlatParamHandle:
    return handle_of(list(params), module_of(*params), use_orig_params)


class Row(NamedTuple):
    """What one row of the list of errors asks for."""

    id: str
    error: type[BaseException]
    match: str
    attempt: Callable[[], Any]


def check(row: Row) -> None:
    if issubclass(row.error, Warning):
        with pytest.warns(row.error, match=row.match):
            row.attempt()
        return
    with pytest.raises(row.error, match=row.match) as caught:
        row.attempt()
    assert caught.type is row.error or row.error is not RuntimeError


def of(rows: list[Row]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)


# ----------------------------------------------------------------- construction


def wrap_both_ignored() -> None:
    FSDP(Net(), ignored_modules=[], ignored_states=[])


def mix_ignored_states() -> None:
    net = Net()
    FSDP(net, ignored_states=[net.first, net.first.weight])


def ignore_a_parameter_as_module() -> None:
    net = Net()
    FSDP(net, ignored_modules=[net.first.weight])


def ignore_a_unit() -> None:
    net = inner_unit()
    FSDP(net, ignored_modules=[net.second])


def ignore_the_root() -> None:
    net = Net()
    FSDP(net, ignored_modules=[net])


def initialise_with(param_init_fn: Any) -> None:
    with torch.device("meta"):
        net = Net()
    FSDP(net, param_init_fn=param_init_fn)


def initialise_without_reset() -> None:
    with contextlib.suppress(AttributeError):
        FSDP(module_of(nn.Parameter(torch.empty(3, device="meta"))))


def leave_a_parameter() -> None:
    construction.check_all_flattened(Subtree(Net()), set(), "Net")


def freeze_partly(use_orig_params: bool) -> None:
    net = Net()
    net.second[0].weight.requires_grad_(False)
    FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=use_orig_params)


def normalise_in_mixed_precision() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(torch.bfloat16))


def nest_enable_wrap() -> None:
    with enable_wrap(wrapper_cls=FSDP), enable_wrap(wrapper_cls=FSDP):
        pass


def wrap_over_units() -> None:
    _recursive_wrap(inner_unit(), always_wrap_policy, FSDP, set(), set())


class Holder(torch.Tensor):
    """A wrapper subclass that names among its tensors an attribute that is none."""

    @staticmethod
    def __new__(cls) -> Holder:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    def __init__(self) -> None:
        self.inner = "not a tensor"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, meta: Any, size: Any, stride: Any) -> Holder:
        return Holder()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


CONSTRUCTION = [
    Row("X-001", UserWarning, "ModuleList has none", lambda: FSDP(nn.ModuleList([nn.Linear(2, 2)]))),
    Row("X-002", ValueError, "exclude each other", wrap_both_ignored),
    Row("X-003", ValueError, r"\['Linear', 'Parameter'\]", mix_ignored_states),
    Row("X-004", ValueError, r"all nn.Module elements but got types \['Parameter'\]", ignore_a_parameter_as_module),
    Row("X-005", TypeError, "iterable of modules", lambda: FSDP(Net(), ignored_modules=3)),
    Row("X-006", ValueError, "should not include FSDP modules", ignore_a_unit),
    Row("X-007", UserWarning, "itself is ignored", ignore_the_root),
    Row("X-008", RuntimeError, "different device types.*'cuda', 'xpu'", lambda: FSDP(on("cuda:0", "xpu:0"))),
    Row("X-010", AttributeError, "no backend torch.xla", lambda: FSDP(Net(), device_id=torch.device("xla"))),
    Row(
        "X-011",
        ValueError,
        "pass only one",
        lambda: FSDP(Net(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (4,))),
    ),
    Row(
        "X-012",
        ValueError,
        "requires explicit groups",
        lambda: FSDP(Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    ),
    Row(
        "X-013",
        ValueError,
        "ndim=1",
        lambda: FSDP(Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=init_device_mesh("cpu", (4,))),
    ),
    Row(
        "X-014",
        ValueError,
        "None or a",
        lambda: FSDP(Net(), process_group=dist.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    ),
    Row("X-015", UserWarning, "switching to use `NO_SHARD`", lambda: FSDP(Net(), dist.new_group([RANK]))),
    Row(
        "X-016",
        FutureWarning,
        "`NO_SHARD` sharding strategy is deprecated",
        lambda: FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD),
    ),
    Row("X-017", RuntimeError, "rank 1.*'p1' on cpu.*'p0' on cuda:0.*device_id", lambda: FSDP(on("cuda:0", "cpu"))),
    Row("X-018", RuntimeError, "single device.*'p0' on cuda:0, 'p1' on cuda:1", lambda: FSDP(on("cuda:0", "cuda:1"))),
    Row(
        "X-019",
        UserWarning,
        "no explicit index.*cuda:3",
        lambda: warned_by(lambda: FSDP(Net(), device_id=torch.device("cuda"))),
    ),
    Row(
        "X-020",
        ValueError,
        "inconsistent compute device.*rank 1.*'p0' of Module is on cuda:0.*cuda:3",
        lambda: with_backend(lambda: FSDP(on("cuda:0"), device_id=torch.device("cuda", 3))),
    ),
    Row("X-021", UserWarning, "the module is on CPU", lambda: warned_by(lambda: FSDP(Net()))),
    Row("X-022", ValueError, "param_init_fn to be callable but got int", lambda: initialise_with(3)),
    Row("X-023", UserWarning, "type Module.*reset_parameters", initialise_without_reset),
    Row("X-024", ValueError, "'p0' of Module to a 1-D", lambda: FSDP(module_of(nn.Parameter(torch.tensor(1.0))))),
    Row("X-026", AssertionError, "'inner' of Holder.*str", lambda: materialization._plain_tensors(Holder())),
    Row("X-027", RuntimeError, "unflattened parameter 'first.weight'", leave_a_parameter),
    Row(
        "X-028",
        ValueError,
        "'second'",
        lambda: FSDP(inner_unit(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    ),
    Row("X-029", AssertionError, "already wrapped", wrap_over_units),
    Row(
        "X-030",
        ValueError,
        "False.*True.*dict",
        lambda: FSDP(Net(), auto_wrap_policy=CustomPolicy(lambda module: "yes")),
    ),
    Row("X-031", ValueError, "requires_grad=True and False.*'second.0.weight'", lambda: freeze_partly(False)),
    Row("X-032", UserWarning, "12 numel instead of 3 numel", lambda: freeze_partly(True)),
    Row("X-033", UserWarning, "BatchNorm1d.*without mixed precision", normalise_in_mixed_precision),
    Row("X-034", NotImplementedError, "nested autowrap", nest_enable_wrap),
    Row("X-035", TypeError, "wrapper_cls", lambda: enable_wrap().__enter__()),
    Row(
        "X-036",
        AssertionError,
        "non-module|Module",
        lambda: torch_wrap._post_order_apply(Net(), lambda module: 3),
    ),
]


@of(CONSTRUCTION)
def test_construction_refuses(row: Row) -> None:
    check(row)


def test_meta_module_that_cannot_be_initialised_raises_its_own_error() -> None:
    with warnings.catch_warnings(), pytest.raises(AttributeError, match="reset_parameters"):
        warnings.simplefilter("ignore")
        FSDP(module_of(nn.Parameter(torch.empty(3, device="meta"))))


# ----------------------------------------------------------------- flattening


def param(dtype: torch.dtype = torch.float32, requires_grad: bool = True, device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype, device=device), requires_grad)


class Flat(FlatParameter):
    pass


FLATTENING = [
    Row("X-040", ValueError, "empty parameter list", lambda: handle_of([], nn.Module())),
    Row("X-041", ValueError, "Cannot flatten a `FlatParameter`: p0", lambda: flatten(FlatParameter(torch.ones(3)))),
    Row("X-042", ValueError, "integer dtype.*p0 is torch.int64", lambda: flatten(param(torch.int64, False))),
    Row(
        "X-043",
        ValueError,
        r"torch.float32 \(p0\) and torch.float16 \(p1\)",
        lambda: flatten(param(), param(torch.float16)),
    ),
    Row(
        "X-044",
        ValueError,
        r"uniform `requires_grad`.*\['p0'\].*\['p1'\]",
        lambda: flatten(param(), param(requires_grad=False)),
    ),
    Row("X-045", ValueError, r"cpu \(p0\) and meta \(p1\)", lambda: flatten(param(), param(device="meta"))),
    Row("X-046", ValueError, "aligned_numel|alignment", lambda: _C.FlatLayout([3], -1, 4, 0, True)),
    Row("X-047", ValueError, "tree of Module", lambda: handle_of([param()], module_of(param()))),
    Row("X-049", AssertionError, "subclasses FlatParameter", Flat),
]


@of(FLATTENING)
def test_flattening_refuses(row: Row) -> None:
    check(row)


def test_skipping_the_writeback_check_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:  # X-050, C-003
    flat_param._warn_skip_writeback_check.cache_clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, logger="fsdp_c"):
        patch.setenv("FSDP_SKIP_WRITEBACK_CHECK", "1")
        nested(use_orig_params=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "FSDP_SKIP_WRITEBACK_CHECK" in caplog.text


# ----------------------------------------------------------------- lazy initialisation and runtime


def initialise(unit: FSDP, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(unit, name, value)
    unit._lazy_init()


def move_offloaded() -> None:
    handle = types.SimpleNamespace(flat_param=torch.ones(3, device="meta"))
    available = types.SimpleNamespace(is_available=lambda: True)
    unit = types.SimpleNamespace(rank=2, _is_root=None, _handle=handle, _device_handle=available)
    unit.cpu_offload, unit._assert_state = CPUOffload(True), lambda state: None
    fully_sharded_data_parallel._check_ready(unit, "Net", is_root=True)


def attach_optimizer() -> None:
    model = FSDP(Net())
    model._flat_param._in_backward_optimizers = []
    model._lazy_init()


def use_inner_first() -> None:
    model = nested()
    model.second._lazy_init()
    model._lazy_init()


def differ_in(setting: str, inner: Any, outer: Any) -> None:
    net = Net()
    net.second = FSDP(net.second, **{setting: inner})
    FSDP(net, **{setting: outer})._lazy_init()


def differ_in_eval_precision() -> None:
    net = Net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        net.second = FSDP(net.second)
    FSDP(net)._lazy_init()


def differentiate_gradients() -> None:
    FSDP(Net())(torch.ones(2, 3)).sum().backward(create_graph=True)


RUNTIME = [
    Row(
        "X-060",
        RuntimeError,
        "'Net' on rank 1 computes on cpu, which is not available",
        lambda: initialise(FSDP(Net()), _device_handle=types.SimpleNamespace(is_available=lambda: False)),
    ),
    Row(
        "X-061",
        ValueError,
        "SUMMON_FULL_PARAMS.*current state is.*IDLE",
        lambda: FSDP(Net())._assert_state(fully_sharded_data_parallel.TrainingState.SUMMON_FULL_PARAMS),
    ),
    Row(
        "X-062",
        RuntimeError,
        "parameters on cpu: move the module to cuda:0",
        lambda: initialise(FSDP(Net()), compute_device=CUDA),
    ),
    Row("X-063", RuntimeError, "'Net' on rank 2.*meta: do not move it from the CPU", move_offloaded),
    Row("X-064", RuntimeError, "only with use_orig_params=True", attach_optimizer),
    Row("X-065", AssertionError, "'second' on rank 1.*already the root", use_inner_first),
    Row("X-066", ValueError, "homogeneous.*_use_orig_params", lambda: differ_in("use_orig_params", True, False)),
    Row(
        "X-066 limiter",
        ValueError,
        "homogeneous.*limit_all_gathers",
        lambda: differ_in("limit_all_gathers", True, False),
    ),
    Row("X-066 eval", ValueError, "homogeneous.*_use_full_prec_in_eval", differ_in_eval_precision),
    Row("X-069", RuntimeError, "gradients that themselves require gradients", differentiate_gradients),
]


@of(RUNTIME)
def test_runtime_refuses(row: Row) -> None:
    check(row)


# ----------------------------------------------------------------- calls of the user


def call_inner_no_sync() -> None:
    model = nested()
    enter(model.second.no_sync())


def clip_inner() -> None:
    model = nested()
    model.second.clip_grad_norm_(1.0)


def flip_in_no_sync() -> None:
    model = nested()
    with model.no_sync():
        model.second._sync_gradients = True


def enter(context: Any) -> None:
    with context:
        pass


def summon_in_forward() -> None:
    class Summoning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            enter(FSDP.summon_full_params(model))
            return super().forward(x)

    model = FSDP(Summoning())
    model(torch.ones(2, 3))


def summon_twice() -> None:
    model = FSDP(Net())
    with FSDP.summon_full_params(model):
        enter(FSDP.summon_full_params(model))


def summon_busy_handle() -> None:
    model = FSDP(Net())
    model._lazy_init()
    model._handle.summon_enter(False)
    try:
        model._handle.summon_enter(False)
    finally:
        model._handle.summon_exit()


def no_shard() -> FSDP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD)


SUMMON = FSDP.summon_full_params
USER_CALLS = [
    Row("X-100", RuntimeError, "inner FSDP instances.*root", call_inner_no_sync),
    Row("X-101", AssertionError, "incorrectly set to `True`", flip_in_no_sync),
    Row("X-102", RuntimeError, "only be called on the root", clip_inner),
    Row("X-103", UserWarning, "no gradients", lambda: nested().clip_grad_norm_(1.0)),
    Row(
        "X-105",
        NotImplementedError,
        "with_grads=True, use_orig_params=False, offload_to_cpu=False",
        lambda: enter(SUMMON(FSDP(Net()), with_grads=True)),
    ),
    Row(
        "X-105 offload",
        NotImplementedError,
        "with_grads=True, use_orig_params=True, offload_to_cpu=True",
        lambda: enter(SUMMON(FSDP(Net(), use_orig_params=True), with_grads=True, offload_to_cpu=True)),
    ),
    Row(
        "X-106",
        NotImplementedError,
        "offload_to_cpu=True and NO_SHARD",
        lambda: enter(SUMMON(no_shard(), offload_to_cpu=True)),
    ),
    Row(
        "X-107",
        NotImplementedError,
        "writeback=True and rank0_only=True",
        lambda: enter(SUMMON(FSDP(Net()), rank0_only=True)),
    ),
    Row(
        "X-108",
        UserWarning,
        "own copy of all parameters in CPU memory",
        lambda: enter(SUMMON(FSDP(Net()), offload_to_cpu=True)),
    ),
    Row("X-109", AssertionError, "during forward/backward", summon_in_forward),
    Row("X-110", AssertionError, "already unsharding", summon_twice),
    Row("X-111", AssertionError, "unit Net: cannot gather.*SUMMON_FULL_PARAMS", summon_busy_handle),
]


@of(USER_CALLS)
def test_calls_of_the_user_are_refused(row: Row) -> None:
    check(row)


def test_ids_are_given_once() -> None:
    ids = [row.id for row in (*CONSTRUCTION, *FLATTENING, *RUNTIME, *USER_CALLS)]
    assert len(set(ids)) == len(ids)
