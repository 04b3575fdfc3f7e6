"""Every error and warning of torch's FSDP1: a program that provokes it in both implementations, and the
phrase that fsdp_c's message keeps. A key such as X-001 pairs a phrase with its program.

This file has the errors that one process with a fake group of four ranks can provoke.
tests/distributed/test_errors.py has the others.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, _init_utils
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_c import fully_sharded_data_parallel
from fsdp_c.compat.errors import with_note
from fsdp_c.compat.upstream import HandleShardingStrategy, HandleTrainingState, torch_version
from fsdp_c.sharding import construction
from fsdp_c.sharding.traversal import Subtree
from fsdp_c.wrap import ModuleWrapPolicy
from tests.collectives import fake_ranks
from tests.errors import CPU, Implementation, Net, Row, check, forget_torchs_units, of, rows
from tests.training import debug_level

WORLD_SIZE, RANK = 4, 1
X = torch.ones(2, 3)


_group = fake_ranks(RANK, WORLD_SIZE)


@pytest.fixture(scope="module", autouse=True)
def forgotten_units() -> Iterator[None]:
    yield
    forget_torchs_units()


def inner_unit(fsdp: Implementation) -> nn.Module:
    """A plain module with a unit inside."""
    net = Net()
    net.second = fsdp.wrap(net.second)
    return net


def module_of(*params: nn.Parameter) -> nn.Module:
    module = nn.Module()
    for index, param in enumerate(params):
        module.register_parameter(f"p{index}", param)
    return module


def on(*devices: str) -> nn.Module:
    """A module with a parameter for each device; those that are not there are on the CPU and say
    otherwise."""
    return module_of(
        *(
            type("Elsewhere", (nn.Parameter,), {"device": torch.device(name)})(torch.ones(2))
            for name in devices
        )
    )


def with_cuda(attempt: Callable[[], Any]) -> None:
    """Run the body with a fake accelerator, current device cuda:3, that can be queried but not used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        patch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        attempt()


def handle_of(fsdp: Implementation, params: list[nn.Parameter], module: nn.Module) -> Any:
    group, strategy = dist.group.WORLD, HandleShardingStrategy.FULL_SHARD
    return fsdp.flat_param.FlatParamHandle(
        params, module, CPU, strategy, False, None, None, False, group, False
    )


def flatten(fsdp: Implementation, *params: nn.Parameter) -> Any:
    return handle_of(fsdp, list(params), module_of(*params))


def enter(context: Any) -> None:
    with context:
        pass


def wrap_with(fsdp: Implementation, net: Any, arguments: Callable[[Any], dict[str, Any]]) -> None:
    fsdp.wrap(net, **arguments(net))


def shard_hybrid(fsdp: Implementation, **kwargs: Any) -> None:
    fsdp.wrap(Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, **kwargs)


def initialise_without_reset(fsdp: Implementation) -> None:
    fsdp.wrap(module_of(nn.Parameter(torch.empty(3, device="meta"))))


def leave_a_parameter(fsdp: Implementation) -> None:
    if fsdp.is_torchs:
        _init_utils._check_orig_params_flattened(Net(), set())
    construction.check_all_flattened(Subtree(Net()), set(), "Net")


def freeze_partly(fsdp: Implementation, use_orig_params: bool) -> None:
    net = Net()
    net.second[0].weight.requires_grad_(False)
    fsdp.wrap(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=use_orig_params)


def normalise_in_mixed_precision(fsdp: Implementation) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    fsdp.wrap(
        net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(torch.bfloat16)
    )


def nest_enable_wrap(fsdp: Implementation) -> None:
    context = fsdp.wrapping.enable_wrap
    with context(wrapper_cls=fsdp.FSDP), context(wrapper_cls=fsdp.FSDP):
        pass


def wrap_over_units(fsdp: Implementation) -> None:
    wrapping = fsdp.wrapping
    wrapping._recursive_wrap(inner_unit(fsdp), wrapping.always_wrap_policy, fsdp.FSDP, set(), set())


class Holder(TwoTensor):
    """A wrapper subclass that names among its tensors an attribute that is none."""

    inner = "not a tensor"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def synchronise_a_holder(fsdp: Implementation) -> None:
    net = Net()
    net.register_buffer("held", Holder(torch.ones(2), torch.ones(2)))
    fsdp.wrap(net, sync_module_states=True)


def torchs_words_of_a_holder() -> tuple[type[BaseException], str] | None:
    """Return torch's error on versions that word it differently from the phrase that fsdp_c keeps."""
    if torch_version() < (2, 12):
        return AttributeError, "'str' object has no attribute 'device'"
    return (AssertionError, "expected Tensor or CustomClassBase, got") if torch_version() >= (2, 14) else None


CONSTRUCTION = rows(
    r"""
X-001 | UserWarning | FSDP will not all-gather parameters for containers that do not implement forward
    ours: wrap the elements of the ModuleList
X-002 | ValueError | Cannot pass both ignored_modules and ignored_states at the same time
X-003 | ValueError | ignored_states expects all nn.Parameter or all nn.Module list elements but got types [<class
    'torch.nn.modules.linear.Linear'>, <class 'torch.nn.parameter.Parameter'>]
X-004 | ValueError | ignored_modules expects nn.Module list elements but got types [<class
    'torch.nn.parameter.Parameter'>]
X-005 | TypeError | 'int' object is not iterable
    ours: ignored_modules
X-006 | ValueError | `ignored_modules` should not include FSDP modules
X-007 | UserWarning | Trying to ignore the top-level module passed into the FSDP constructor itself will result in
    all parameters being ignored
    ours: Net
X-008 | RuntimeError | FSDP does not support modules with different device types but got params on
    ours: 'cuda', 'xpu'
X-010 | AttributeError | Device 'xla' does not have a corresponding backend registered as 'torch.xla'
    ours: rank 1
X-011 | ValueError | Cannot pass both process_group and device_mesh at the same time
X-012 | ValueError | Manual wrapping with ShardingStrategy.HYBRID_SHARD requires explicit specification of process
    group or device_mesh
X-013 | ValueError | Expected device_mesh to have ndim=2 but got 1
X-014 | ValueError | Expected process_group to be passed in as either None or
X-015 | UserWarning, whole | FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the
    world size is 1.
X-016 | FutureWarning | The `NO_SHARD` sharding strategy is deprecated
    ours: DistributedDataParallel
X-017 | RuntimeError | To support a module with both CPU and GPU params, please pass in device_id
    ours: rank 1.*'p1' on cpu.*'p0' on cuda:0
X-018 | RuntimeError | FSDP only supports single device modules but got params on
    ours: 'p0' on cuda:0, 'p1' on cuda:1
X-019 | UserWarning | FSDP got the argument `device_id` cuda on rank 1, which does not have an explicit index
    ours: cuda:3
X-020 | ValueError | Inconsistent compute device and `device_id` on rank 1: cuda:0 vs cuda:3
    ours: 'p0' of Module
X-021 | UserWarning | The passed-in `module` is on CPU
    ours: cuda:3
X-022 | ValueError | Expected 3 to be callable but got <class 'int'>
    ours: param_init_fn
X-023 | UserWarning | Unable to call `reset_parameters()` for module on meta device with error
    ours: give Module this method
X-023 error | AttributeError, whole | 'Module' object has no attribute 'reset_parameters'
X-027 | RuntimeError | Found an unflattened parameter: first.weight
    ours: \(3, 3\)
X-028 | ValueError | FSDP auto wrapping requires modules to not already have FSDP applied but found second in
X-032 | UserWarning | second has both parameters with requires_grad=True and False
    ours: 12 numel instead of 3 numel.*True: \['second.0.bias'\].*False: \['second.0.weight'\]
X-033 | UserWarning | Both mixed precision and an auto_wrap_policy were specified to FSDP
    also: These modules will be wrapped as separate FSDP
    ours: BatchNorm1d
""",
    {
        "X-001": lambda fsdp: fsdp.wrap(nn.ModuleList([nn.Linear(2, 2)])),
        "X-002": lambda fsdp: fsdp.wrap(Net(), ignored_modules=[], ignored_states=[]),
        "X-003": lambda fsdp: wrap_with(
            fsdp, Net(), lambda net: {"ignored_states": [net.first, net.first.weight]}
        ),
        "X-004": lambda fsdp: wrap_with(fsdp, Net(), lambda net: {"ignored_modules": [net.first.weight]}),
        "X-005": lambda fsdp: fsdp.wrap(Net(), ignored_modules=3),
        "X-006": lambda fsdp: wrap_with(
            fsdp, inner_unit(fsdp), lambda net: {"ignored_modules": [net.second]}
        ),
        "X-007": lambda fsdp: wrap_with(fsdp, Net(), lambda net: {"ignored_modules": [net]}),
        "X-008": lambda fsdp: fsdp.wrap(on("cuda:0", "xpu:0"), device_id=None),
        "X-010": lambda fsdp: fsdp.wrap(Net(), device_id=torch.device("xla")),
        "X-011": lambda fsdp: fsdp.wrap(
            Net(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (4,))
        ),
        "X-012": shard_hybrid,
        "X-013": lambda fsdp: shard_hybrid(fsdp, device_mesh=init_device_mesh("cpu", (4,))),
        "X-014": lambda fsdp: shard_hybrid(fsdp, process_group=dist.group.WORLD),
        "X-015": lambda fsdp: fsdp.wrap(Net(), process_group=dist.new_group([RANK])),
        "X-016": lambda fsdp: fsdp.wrap(Net(), sharding_strategy=ShardingStrategy.NO_SHARD),
        "X-017": lambda fsdp: fsdp.wrap(on("cuda:0", "cpu"), device_id=None),
        "X-018": lambda fsdp: fsdp.wrap(on("cuda:0", "cuda:1"), device_id=None),
        "X-019": lambda fsdp: with_cuda(lambda: fsdp.wrap(Net(), device_id=torch.device("cuda"))),
        "X-020": lambda fsdp: with_cuda(lambda: fsdp.wrap(on("cuda:0"), device_id=torch.device("cuda", 3))),
        "X-021": lambda fsdp: with_cuda(lambda: fsdp.wrap(Net(), device_id=None)),
        "X-022": lambda fsdp: fsdp.wrap(Net().to("meta"), param_init_fn=3),
        "X-023": initialise_without_reset,
        "X-023 error": initialise_without_reset,
        "X-027": leave_a_parameter,
        "X-028": lambda fsdp: fsdp.wrap(inner_unit(fsdp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
        "X-032": lambda fsdp: freeze_partly(fsdp, True),
        "X-033": normalise_in_mixed_precision,
    },
)
CONSTRUCTION += [
    Row(
        "X-026",
        AssertionError,
        "expected Tensor or OpaqueBase, got <class 'str'>",
        synchronise_a_holder,
        ours="Holder",
        torchs=torchs_words_of_a_holder(),
    ),
]

# Policies and contexts are torch's own, unless there are none: then ours stand in.
WRAPPING = rows(
    """
X-029 | AssertionError | Child module FullyShardedDataParallel(
    also: is already wrapped
X-030 | ValueError | The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned
    yes
X-034 | NotImplementedError | You are already within an autowrap context
X-035 | TypeError, whole | enable_wrap() missing 1 required keyword-only argument: 'wrapper_cls'
X-036 | AssertionError | fn should return None or an nn.Module but got 3
X-036 root | AssertionError | Non-root modules should have their parent module set but got None for
""",
    {
        "X-029": wrap_over_units,
        "X-030": lambda fsdp: fsdp.wrapping.CustomPolicy(lambda module: "yes")._run_policy(Net(), set(), {}),
        "X-034": nest_enable_wrap,
        "X-035": lambda fsdp: enter(fsdp.wrapping.enable_wrap()),
        "X-036": lambda fsdp: fsdp.wrapping._post_order_apply(Net(), lambda module: 3),
        "X-036 root": lambda fsdp: fsdp.wrapping._post_order_apply(nn.ReLU(), lambda module: 3),
    },
)


def param(
    dtype: torch.dtype = torch.float32, requires_grad: bool = True, device: str = "cpu"
) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype, device=device), requires_grad)


def set_variable(fsdp: Implementation, name: str) -> None:
    """Clear the caches of messages that are logged once per process."""
    for cached in vars(fsdp.flat_param).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        fsdp.wrap(Net(), use_orig_params=True)


FLATTENING = rows(
    r"""
X-040 | ValueError, whole | Cannot construct a FlatParamHandle with an empty parameter list
X-041 | ValueError | Cannot flatten a `FlatParameter`
    ours: p0
X-042 | ValueError | Cannot flatten integer dtype tensors
    ours: p0 is torch.int64
X-043 | ValueError | Must flatten tensors with uniform dtype but got torch.float32
    ours: \(p0\) and torch.float16 \(p1\)
X-044 | ValueError | Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`
    ours: \['p0'\].*\['p1'\]
X-045 | ValueError | Must flatten tensors on the same device but got both cpu
    ours: \(p0\) and meta \(p1\)
X-046 | ValueError, whole | Expects non-negative `aligned_numel` but got -1
X-047 | ValueError | `params` were not found in `module`'s tree
X-049 | AssertionError, whole | subclasses FlatParameter not supported
X-050 | logging.LogRecord | Since FSDP_SKIP_WRITEBACK_CHECK=1, FSDP will not check for
X-050 gather | logging.LogRecord | Since FSDP_USE_FAKE_ALL_GATHER=1, FSDP will not execute all-gather
X-050 reduce | logging.LogRecord | Since FSDP_USE_FAKE_REDUCE=1, FSDP will not execute reduce-scatter
""",
    {
        "X-040": lambda fsdp: handle_of(fsdp, [], nn.Module()),
        "X-041": lambda fsdp: flatten(fsdp, fsdp.FlatParameter(torch.ones(3))),
        "X-042": lambda fsdp: flatten(fsdp, param(torch.int64, False)),
        "X-043": lambda fsdp: flatten(fsdp, param(), param(torch.float16)),
        "X-044": lambda fsdp: flatten(fsdp, param(), param(requires_grad=False)),
        "X-045": lambda fsdp: flatten(fsdp, param(), param(device="meta")),
        "X-046": lambda fsdp: flatten(fsdp, param()).flatten_tensors([torch.ones(3)], -1),
        "X-047": lambda fsdp: handle_of(fsdp, [param()], module_of(param())),
        "X-049": lambda fsdp: type("Flat", (fsdp.FlatParameter,), {})(),
        "X-050": lambda fsdp: set_variable(fsdp, "FSDP_SKIP_WRITEBACK_CHECK"),
        "X-050 gather": lambda fsdp: set_variable(fsdp, "FSDP_USE_FAKE_ALL_GATHER"),
        "X-050 reduce": lambda fsdp: set_variable(fsdp, "FSDP_USE_FAKE_REDUCE"),
    },
)


def run_with(fsdp: Implementation, name: str, value: Any) -> None:
    model = fsdp.wrap(Net())
    setattr(model, name, value)
    model(X)


def call_in_forward(fsdp: Implementation, call: Callable[[Any], Any]) -> None:
    class Calling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call(model)
            return super().forward(x)

    model = fsdp.wrap(Calling())
    model(X)


def move_offloaded(fsdp: Implementation) -> None:
    """Offload needs a device, so the handle is only marked as offloaded."""
    flat_param = nn.Parameter(torch.ones(3, device="meta"))
    if fsdp.is_torchs:
        model = fsdp.wrap(Net())
        model._handle._offload_params, model._handle.flat_param = True, flat_param
        model(X)
    unit = types.SimpleNamespace(rank=1, module=Net(), _flat_param=flat_param)
    unit._device_handle = types.SimpleNamespace(is_available=lambda: True)
    unit.cpu_offload, unit._assert_state = CPUOffload(True), lambda state: None
    fully_sharded_data_parallel._check_tree(unit, [("", unit)])


def attach_optimizer(fsdp: Implementation) -> None:
    model = fsdp.wrap(Net())
    model._flat_param._in_backward_optimizers = []
    model(X)


def use_inner_first(fsdp: Implementation) -> None:
    model = fsdp.nested()
    model.second(X)
    model(X)


def differ_in(fsdp: Implementation, setting: str, inner: Any, outer: Any) -> None:
    net = Net()
    net.second = fsdp.wrap(net.second, **{setting: inner})
    fsdp.wrap(net, **{setting: outer})(X)


def differ_in_eval_precision(fsdp: Implementation) -> None:
    net = Net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        net.second = fsdp.wrap(net.second)
    fsdp.wrap(net)(X)


def replace_between(fsdp: Implementation) -> None:
    strategy = ShardingStrategy.SHARD_GRAD_OP
    model = fsdp.wrap(nn.Linear(3, 3), use_orig_params=True, sharding_strategy=strategy)
    loss = model(X).sum()
    model.module.weight = nn.Parameter(torch.zeros(3, 3))
    loss.backward()


def held(model: nn.Module) -> nn.Parameter:
    return next(one for one in model.parameters() if one.numel())


def reshape(fsdp: Implementation) -> None:
    model = fsdp.wrap(nn.Linear(3, 3), use_orig_params=True)
    held(model).data = torch.zeros(7)
    model(X)


def untie(fsdp: Implementation) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    model = fsdp.wrap(net, use_orig_params=True)
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())
    model(X)


def replace_and_be_told(fsdp: Implementation) -> None:
    with debug_level(dist.DebugLevel.INFO):
        model = fsdp.wrap(nn.Linear(3, 3), use_orig_params=True)
        held(model).data = torch.zeros_like(held(model))
        model(X)


def log_the_backward(fsdp: Implementation) -> None:
    with debug_level(dist.DebugLevel.INFO):
        model = fsdp.wrap(Net(), use_orig_params=True)
        model(X).sum().backward()


RUNTIME = rows(
    r"""
X-060 | RuntimeError | FSDP does not support CPU only execution
    ours: 'Net' on rank 1
X-061 | ValueError | expected to be in states [<TrainingState.IDLE
    also: current state is TrainingState.FORWARD_BACKWARD
    ours: rank 1
X-062 | RuntimeError | An FSDP-managed module unexpectedly has parameters on cpu. Make sure to move the module to
    cuda:0 before training
    ours: 'Net' on rank 1
X-063 | RuntimeError | An FSDP-managed module with parameter CPU offloading enabled has parameters on meta. Make
    sure to not move the module from CPU when offloading parameters
    ours: 'Net' on rank 1
X-064 | RuntimeError | FSDP optimizer in backward only supported with use_orig_params=True!
    ours: 'Net' on rank 1
X-065 | AssertionError | Non-root FSDP instance's `_is_root` should not have been set yet
    ours: 'second' on rank 1
X-066 | ValueError | Expects one homogeneous value for _use_orig_params but got
    ours: True in 'second'
X-066 limiter | ValueError | Expects one homogeneous value for limit_all_gathers but got
X-066 eval | ValueError | Expects one homogeneous value for _use_full_prec_in_eval but got
X-069 | RuntimeError | FSDP does not support gradients of gradients
    ours: rank 1, unit Net
X-074 | AssertionError | FSDP does not support changing the parameters between forward and backward
    ours: rank 1, unit Linear.*weight
X-075 | RuntimeError | Cannot writeback when the parameter shape changes
    ours: of unit Linear has shape \(\d,\) on rank 1.*\[7\]
X-076 | NotImplementedError | Changing shared parameters is not supported yet
    ours: rank 1, unit Sequential
X-077 | UserWarning | [Rank 1] Parameter needs writeback in
    ours: of unit Linear
X-085 | logging.LogRecord, whole | FSDP firing post-backward hooks for parameters
""",
    {
        "X-060": lambda fsdp: run_with(
            fsdp, "_device_handle", types.SimpleNamespace(is_available=lambda: False)
        ),
        "X-061": lambda fsdp: call_in_forward(fsdp, lambda model: model.apply(lambda module: None)),
        "X-062": lambda fsdp: run_with(fsdp, "compute_device", torch.device("cuda", 0)),
        "X-063": move_offloaded,
        "X-064": attach_optimizer,
        "X-065": use_inner_first,
        "X-066": lambda fsdp: differ_in(fsdp, "use_orig_params", True, False),
        "X-066 limiter": lambda fsdp: differ_in(fsdp, "limit_all_gathers", True, False),
        "X-066 eval": differ_in_eval_precision,
        "X-069": lambda fsdp: fsdp.wrap(Net())(X).sum().backward(create_graph=True),
        "X-074": replace_between,
        "X-075": reshape,
        "X-076": untie,
        "X-077": replace_and_be_told,
        "X-085": log_the_backward,
    },
)


def flip_in_no_sync(fsdp: Implementation) -> None:
    model = fsdp.nested()
    with model.no_sync():
        model.second._sync_gradients = True


def summon(model: Any, **kwargs: Any) -> None:
    enter(type(model).summon_full_params(model, **kwargs))


def summon_twice(fsdp: Implementation) -> None:
    model = fsdp.wrap(Net())
    with fsdp.FSDP.summon_full_params(model):
        summon(model)


def summon_busy_handle(fsdp: Implementation) -> None:
    model = fsdp.wrap(Net())
    if fsdp.is_torchs:
        model._handle._training_state = HandleTrainingState.FORWARD
        summon(model)
    model._lazy_init()
    model._handle.summon_enter(False)
    try:
        model._handle.summon_enter(False)
    finally:
        model._handle.summon_exit()


def do_nothing(state: Any, *tensors: torch.Tensor) -> None:
    pass


def register_twice(fsdp: Implementation) -> None:
    model = fsdp.wrap(Net())
    model.register_comm_hook(None, do_nothing)
    model.register_comm_hook(None, do_nothing)


def hook_a_hybrid(fsdp: Implementation) -> None:
    mesh, strategy = init_device_mesh("cpu", (2, 2)), ShardingStrategy.HYBRID_SHARD
    fsdp.wrap(Net(), device_mesh=mesh, sharding_strategy=strategy).register_comm_hook(None, do_nothing)


def scaler(fsdp: Implementation) -> Any:
    return fsdp.Scaler(device="cpu", process_group=dist.group.WORLD)


def unscale_twice(fsdp: Implementation, then_step: bool) -> None:
    model, scaled = fsdp.wrap(Net()), scaler(fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled.scale(model(X).sum()).backward()
    if then_step:
        scaled.step(optimizer)
    else:
        scaled.unscale_(optimizer)
    scaled.unscale_(optimizer)


def update_with(fsdp: Implementation, new_scale: Any) -> None:
    scaled = scaler(fsdp)
    scaled.scale(torch.ones(()))
    scaled.update(new_scale)


USER_CALLS = rows(
    """
X-100 | RuntimeError | `no_sync()` on inner FSDP instances is not supported
X-101 | AssertionError | `_sync_gradients` was incorrectly set to `True` while in the `no_sync()` context manager
    ours: rank 1
X-102 | RuntimeError | `clip_grad_norm_()` should only be called on the root FSDP instance
X-103 | UserWarning, whole | Called FSDP.clip_grad_norm_() on rank 1 with no gradients -- returning the total norm
    in the default dtype torch.float32
X-105 | NotImplementedError | with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported
X-105 offload | NotImplementedError | with_grads=True, use_orig_params=True, offload_to_cpu=True is not supported
X-106 | NotImplementedError | offload_to_cpu=True and NO_SHARD is not supported
X-107 | NotImplementedError | writeback=True and rank0_only=True is not supported
X-108 | UserWarning | offload_to_cpu=True and rank0_only=False may result in
X-109 | AssertionError | Cannot manually unshard parameters during forward/backward
    ours: rank 1, unit Calling
X-110 | AssertionError | Cannot manually unshard parameters when already unsharding parameters
    ours: rank 1, unit Net
X-111 | AssertionError | Expects the handle training to be IDLE but got HandleTrainingState.
    ours: rank 1, unit Net
X-112 | AssertionError, whole | register_comm_hook can only be called on a root instance.
    ours: Sequential at 'second'
X-113 | AssertionError | Communication hook is not supported for hybrid strategies
    ours: Net
X-114 | AssertionError, whole | A communication hook is already registered
    ours: Net
X-115 | ValueError, whole | The communication hook must be callable but got 3
X-117 | ValueError | outputs must be a Tensor or an iterable of Tensors
    ours: int
X-118 | AssertionError | Expected supported device, got meta
X-119 | RuntimeError, whole | unscale_() has already been called on this optimizer since the last update().
X-119 step | RuntimeError, whole | unscale_() is being called after step().
X-120 | AssertionError, whole | No inf checks were recorded prior to update.
X-120 scale | AssertionError, whole | new_scale should be a float or a 1-element
""",
    {
        "X-100": lambda fsdp: (model := fsdp.nested())(X) is None or enter(model.second.no_sync()),
        "X-101": flip_in_no_sync,
        "X-102": lambda fsdp: (model := fsdp.nested())(X) is None or model.second.clip_grad_norm_(1.0),
        "X-103": lambda fsdp: fsdp.nested().clip_grad_norm_(1.0),
        "X-105": lambda fsdp: summon(fsdp.wrap(Net()), with_grads=True),
        "X-105 offload": lambda fsdp: summon(
            fsdp.wrap(Net(), use_orig_params=True), with_grads=True, offload_to_cpu=True
        ),
        "X-106": lambda fsdp: summon(fsdp.unsharded(), offload_to_cpu=True),
        "X-107": lambda fsdp: summon(fsdp.wrap(Net()), rank0_only=True),
        "X-108": lambda fsdp: summon(fsdp.wrap(Net()), offload_to_cpu=True),
        "X-109": lambda fsdp: call_in_forward(fsdp, summon),
        "X-110": summon_twice,
        "X-111": summon_busy_handle,
        "X-112": lambda fsdp: (
            (model := fsdp.nested())(X) is None or model.second.register_comm_hook(None, do_nothing)
        ),
        "X-113": hook_a_hybrid,
        "X-114": register_twice,
        "X-115": lambda fsdp: fsdp.wrap(Net()).register_comm_hook(None, 3),
        "X-117": lambda fsdp: scaler(fsdp).scale(3),
        "X-118": lambda fsdp: scaler(fsdp).scale(torch.ones(2, device="meta")),
        "X-119": lambda fsdp: unscale_twice(fsdp, False),
        "X-119 step": lambda fsdp: unscale_twice(fsdp, True),
        "X-120": lambda fsdp: update_with(fsdp, None),
        "X-120 scale": lambda fsdp: update_with(fsdp, torch.ones(2)),
    },
)


@of([*CONSTRUCTION, *WRAPPING, *FLATTENING, *RUNTIME, *USER_CALLS])
def test_errors_and_warnings_begin_with_torchs_words(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_note_is_printed_below_the_message(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    if sys.version_info >= version:
        monkeypatch.setattr(sys, "version_info", version)
    error = with_note(ValueError("said"), "noted")
    text = "".join(traceback.format_exception_only(error))
    assert text.splitlines() == ["ValueError: said", "noted"]
