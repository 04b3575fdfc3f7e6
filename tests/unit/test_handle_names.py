"""Attributes of torch's flat parameter, handle and wrapped module, one by one.

Each is there as torch has it, or is state or a step of torch's runtime, which is in C here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Upstream
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp._runtime_utils import _lazy_init as upstream_lazy_init
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FlatParameter, _flat_param, _runtime_utils
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.collectives import fake_ranks
from tests.models import WIDTH, Block, Conv
from tests.ranks import both_views

CPU = torch.device("cpu")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mixed_precision": BF16},
    "reduced low": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "both": {"mixed_precision": MixedPrecision(torch.float16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(True)},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "NO_SHARD, mixed precision": {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": BF16},
}
HANDLE_LEFT_OUT = (
    "_check_low_precision_shard _check_on_compute_device _check_on_cpu _check_sharded "
    "_check_sharded_strategy _check_storage_allocated _check_storage_freed _check_unsharded "
    "_deregister_orig_params _free_low_precision_sharded_param _free_unsharded_flat_param "
    "_handle_index _init_flat_param_and_metadata _init_get_unflat_views_fn _init_param_reduce_dtypes "
    "_init_setattr_fns _init_shard_metadata _needs_pre_backward_unshard _needs_pre_forward_unshard "
    "_offload_to_cpu _post_forward_index _pre_forward_order_index _prefetched _ran_pre_backward_hook "
    "_reset_is_grad_none _restore_unsharded_flat_param_from_cpu _setattr_param _setattr_tensor "
    "_unsharded_flat_param_for_skipped_views _use_low_precision_shard _use_sharded_flat_param "
    "_use_sharded_grad_views _use_sharded_views _use_unsharded_grad_views _use_unsharded_views "
    "_validate_tensors_to_flatten _writeback_orig_params _writeback_tensor post_reshard post_unshard "
    "pre_unshard prepare_gradient_for_backward prepare_gradient_for_optim reshard_grad to_cpu "
    "unflatten_as_params unshard_grad"
).split()
UNIT_LEFT_OUT = (
    "_all_reduce_stream _default_stream _free_event_queue _is_using_optim_input "
    "_optim_state_dict_impl _optim_state_dict_to_load_impl _post_backward_stream "
    "_post_forward_handles _pre_forward_handles _pre_unshard_stream _root_pre_forward_handles "
    "_unshard_event _unshard_params_ctx _unshard_stream _use_training_state "
    "_warn_legacy_optim_state_dict _warn_optim_input"
    " _zero_scalar"  # by which torch's functions are known, and refused
).split()
# of the flat parameter, a plain nn.Parameter on both sides, which cannot say why it lacks something
FLAT_PARAM_LEFT_OUT = {
    "_tensors": "the views that autograd sees are kept in C",
    "_saved_grad_shard": "a reduction may be in flight; handle.sharded_grad is the gradient once it is there",
    "_cpu_grad": "with offload from the first backward on, and only where computation is not on the CPU",
}

configurations = pytest.mark.parametrize("name", CONFIGURATIONS)


_group = fake_ranks(1, 4)


@pytest.fixture(scope="module", autouse=True)
def nothing_pinned() -> Iterator[None]:
    """Upstream pins memory, which takes an accelerator."""
    with mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
        yield


def build(fsdp: type, use_orig_params: bool, name: str) -> Any:
    torch.manual_seed(0)
    options = CONFIGURATIONS[name] | {"use_orig_params": use_orig_params}
    return fsdp(Conv(), device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def start(model: Any, name: str) -> None:
    """A step; with offload upstream's waits for an accelerator, and its lazy initialisation must do."""
    if "offload" not in name:
        step(model)
    elif isinstance(model, FSDP):
        _runtime_utils._lazy_init(model, model)
    else:
        upstream_lazy_init(model, model)


def has(owner: Any, name: str) -> bool:
    """Some of a tensor's attributes raise other errors, on both sides."""
    try:
        return hasattr(owner, name)
    except (RuntimeError, TypeError):
        return True


def lacking(theirs: Any, ours: Any) -> set[str]:
    return {name for name in dir(theirs) if has(theirs, name) and not has(ours, name)}


def is_plain(value: Any) -> bool:
    """A value that can be compared: no object of an implementation's own, and no module."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    plain = (bool, int, str, torch.dtype, torch.device, torch.Size, dist.DebugLevel, type(None))
    return isinstance(value, plain)


def listed(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


@both_views
@configurations
def test_attributes_of_torch_exist_with_its_values_or_raise_with_a_replacement(
    name: str, use_orig_params: bool
) -> None:
    """Before and after the first step."""
    theirs, ours = (build(fsdp, use_orig_params, name) for fsdp in (Upstream, FSDP))
    for has_run in (False, True):
        if has_run:
            start(theirs, name), start(ours, name)
        for their_unit, our_unit in zip(Upstream.fsdp_modules(theirs), FSDP.fsdp_modules(ours), strict=True):
            for their_one, our_one, left_out in (
                (their_unit._flat_param, our_unit._flat_param, FLAT_PARAM_LEFT_OUT),
                (their_unit._handle, our_unit._handle, HANDLE_LEFT_OUT),
                (their_unit, our_unit, UNIT_LEFT_OUT),
            ):
                assert lacking(their_one, our_one) <= set(left_out)
                known = {key: value for key, value in vars(their_one).items() if hasattr(our_one, key)}
                values = {key: listed(value) for key, value in known.items() if is_plain(value)}
                assert len(values) > 5
                assert {key: listed(getattr(our_one, key)) for key in values} == values


STORAGES = ("_local_shard", "_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


def storages(flat_param: Any) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    """Return (size, dtype, True if it has memory) of each existing storage tensor."""
    found = {name: getattr(flat_param, name) for name in STORAGES if hasattr(flat_param, name)}
    return {
        name: (tensor.size(), tensor.dtype, tensor.untyped_storage().size() > 0)
        for name, tensor in found.items()
    }


class Look(nn.Module):
    """Calls ``look`` in its forward, and when the gradient of its input is there."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        vars(self)["look"] = look

    def forward(self, x: Tensor) -> Tensor:
        self.look("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.look("backward"))
        return self.linear(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["fp32", "bf16"])
@both_views
def test_storage_is_there_when_torchs_is(
    use_orig_params: bool, mixed_precision: MixedPrecision | None, strategy: str
) -> None:
    """Sizes and dtypes equal torch's in a forward, in a backward and after it."""
    seen = []
    for fsdp in (Upstream, FSDP):
        moments: list[Any] = []
        units: list[Any] = []

        def look(moment: str, moments: list[Any] = moments, units: list[Any] = units) -> None:
            moments.append((moment, [storages(unit._flat_param) for unit in units]))

        torch.manual_seed(0)
        model: Any = fsdp(
            nn.Sequential(nn.Linear(WIDTH, 5), Look(look)),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=CPU,
            use_orig_params=use_orig_params,
            mixed_precision=mixed_precision,
            sharding_strategy=ShardingStrategy[strategy],
            backward_prefetch=None,
        )
        units += [unit for unit in model.modules() if isinstance(unit, fsdp) and unit._flat_param is not None]
        look("before lazy init")
        for _ in range(2):
            step(model)
            look("after a step")
        seen.append(moments)
    assert [moment for moment, _ in seen[0]].count("backward") == 2
    for theirs, ours in zip(*seen, strict=True):
        assert ours == theirs, theirs[0]


def test_sharded_grad_is_readable_in_a_backward_and_after_it() -> None:
    """Once its reduction has ended, which is when the next one begins."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    model: Any = FSDP(layers, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    first, last, seen = model.module[0][0], model.module[2][0], []
    assert last._handle.sharded_grad is None
    first.register_full_backward_hook(lambda *_: seen.append(last._handle.sharded_grad))
    step(model)
    ((sharded_grad),) = seen
    assert sharded_grad.data_ptr() == last._flat_param.grad.data_ptr()
    assert sharded_grad.size() == last._flat_param._sharded_size
    assert torch.equal(first._handle.sharded_grad, first._flat_param.grad)


@both_views
def test_shards_and_views_are_cut_as_torch_cuts_them(use_orig_params: bool) -> None:
    theirs, ours = (build(fsdp, use_orig_params, "plain")._handle for fsdp in (Upstream, FSDP))
    assert ours._get_flat_param_offsets() == theirs._get_flat_param_offsets()
    assert set(map(type, ours._get_modules())) == set(map(type, theirs._get_modules()))
    numel = ours.flat_param._unpadded_unsharded_size.numel()
    for first in range(numel):
        for last in range(first, numel):
            expected = [tuple(info) for info in theirs._get_shard_metadata(first, last)]
            assert [tuple(info) for info in ours._get_shard_metadata(first, last)] == expected
    whole = torch.arange(float(numel))
    expected = list(theirs._get_unflat_views(whole))
    assert all(map(torch.equal, ours._get_unflat_views(whole), expected)) and len(expected) == 8
    for size in (1, 4, 7, 9):
        for rank in range(4):
            tensor = torch.arange(float(size))
            (our_shard, our_padding), (shard, padding) = (
                one._get_shard(tensor, rank, 4) for one in (ours, theirs)
            )
            assert torch.equal(our_shard, shard) and our_padding == padding
            assert ours._get_sharded_size(tensor, rank, 4) == theirs._get_sharded_size(tensor, rank, 4)


def test_execution_order_data_of_the_root_equals_torchs() -> None:
    theirs, ours = (build(fsdp, True, "plain") for fsdp in (Upstream, FSDP))
    assert ours._exec_order_data.param_to_fqn == {} and ours._exec_order_data.is_first_iter
    step(theirs), step(ours)
    data = ours._exec_order_data
    assert list(data.param_to_fqn.values()) == list(theirs._exec_order_data.param_to_fqn.values())
    assert data is ours.module.blocks[0]._exec_order_data and data.all_handles == ours._all_handles
    assert data._iter == theirs._exec_order_data._iter == 1 and not data.is_first_iter


def test_unknown_attributes_stay_unknown() -> None:
    model = build(FSDP, True, "plain")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = model.nothing
    with pytest.raises(AttributeError, match=r"'FlatParamHandle' object has no attribute 'nothing'$"):
        _ = model._handle.nothing
    assert isinstance(FSDP.__getattr__, types.FunctionType)


@both_views
def test_names_of_parameters_and_buffers_are_those_of_torch(use_orig_params: bool) -> None:
    theirs, ours = (build(fsdp, use_orig_params, "plain") for fsdp in (Upstream, FSDP))
    for method in ("named_parameters", "named_buffers"):
        for kwargs in ({}, {"prefix": "p"}, {"recurse": False}, {"remove_duplicate": False}):
            names = [[name for name, _ in getattr(model, method)(**kwargs)] for model in (theirs, ours)]
            if "remove_duplicate" in kwargs:  # torch moves a shared parameter behind its neighbours
                names = [sorted(one) for one in names]
            assert names[0] == names[1], (method, kwargs)


def test_flat_parameter_is_a_plain_parameter_with_a_mark() -> None:
    param = FlatParameter(torch.ones(3), False)
    assert type(param) is nn.Parameter and isinstance(param, FlatParameter) and not param.requires_grad
    assert not isinstance(nn.Parameter(torch.ones(3)), FlatParameter)
    marked = torch.ones(3)
    marked._is_flat_param = True
    assert isinstance(marked, FlatParameter)
    assert FlatParameter(torch.ones(3, device="meta")).is_meta
    assert set(torch_flat_param.__all__) <= set(_flat_param.__all__)


def shown_by(unit: Any) -> dict[str, Any]:
    """Places, names, metadata and values of a unit, without the objects of an implementation's own."""
    flat_param, handle = unit._flat_param, unit._handle
    sizes = flat_param, torch.empty(3), torch.empty(flat_param._sharded_size)
    return {
        "infos": [(one.param_name, one.module_name, type(one.module)) for one in flat_param._param_infos],
        "shared": [(one[0], one[2], one[3], one[5]) for one in flat_param._shared_param_infos],
        "modules": len(flat_param._modules),
        "metadata": handle.shard_metadata()._asdict(),
        "module names": list(handle.param_module_names()),
        "shared module names": list(handle.shared_param_module_names()),
        "names in the shard": handle._fqns_in_shard,
        "repr": repr(handle),
        "is sharded": [handle.is_sharded(tensor) for tensor in sizes],
        "values": flat_param.tolist(),  # also the padding, which is 42 between parameters and zero at the end
    }


@both_views
@pytest.mark.parametrize("name", ["plain", "SHARD_GRAD_OP", "NO_SHARD"])
def test_metadata_of_units_equals_torchs(name: str, use_orig_params: bool) -> None:
    theirs, ours = (build(fsdp, use_orig_params, name) for fsdp in (Upstream, FSDP))
    for their_unit, our_unit in zip(Upstream.fsdp_modules(theirs), FSDP.fsdp_modules(ours), strict=True):
        assert shown_by(our_unit) == shown_by(their_unit)
        assert type(our_unit._flat_param._param_infos) is list


@pytest.mark.parametrize("name", ["plain", "mixed precision", "reduced low"])
@pytest.mark.parametrize("in_eval", ["0", "1"])
def test_precisions_in_use_are_those_of_torch(
    name: str, in_eval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", in_eval)
    names = ("_uses_param_mixed_precision", "_uses_reduce_mixed_precision", "_force_full_precision")
    theirs, ours = (build(fsdp, False, name) for fsdp in (Upstream, FSDP))
    for pair in zip(Upstream.fsdp_modules(theirs), FSDP.fsdp_modules(ours), strict=True):
        found = []
        for unit in pair:
            states = {}
            for training in (True, False):
                unit.module.train(training)
                states[training] = [getattr(unit._handle, one) for one in (*names, "uses_sharded_strategy")]
            found.append(states)
        assert found[0] == found[1]
    with FSDP.summon_full_params(ours):
        assert ours._handle._force_full_precision is (name != "plain")


@pytest.mark.parametrize("name", ["plain", "SHARD_GRAD_OP", "NO_SHARD"])
@both_views
def test_skipped_use_sharded_views_equals_torchs(name: str, use_orig_params: bool) -> None:
    models = [build(fsdp, use_orig_params, name) for fsdp in (Upstream, FSDP)]
    for grad in (False, True):
        found, outputs = [], []
        for model in models:
            with torch.set_grad_enabled(grad):
                # without outputs no backward can follow, and fsdp_c exposes sharded parameters again
                outputs.append(model(torch.ones(2, WIDTH)))
            found.append(model._handle._skipped_use_sharded_views)
        assert found[0] == found[1], grad
