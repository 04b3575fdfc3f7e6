"""What the constructor decides and refuses, and what a unit answers before its first step."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision, ShardingStrategy
from fsdp_c.api import TrainingState
from fsdp_c.sharding.flat_param import HandleShardingStrategy
from fsdp_c.sharding.traversal import clean_name
from fsdp_c.wrap import ModuleWrapPolicy
from tests.collectives import fake_ranks

WORLD_SIZE, RANK = 4, 1


_group = fake_ranks(RANK, WORLD_SIZE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale

    def greet(self) -> str:
        return "hello"


def nested(**kwargs: object) -> FSDP:
    """A root with one inner unit, ``second``."""
    return FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **kwargs)


# ----------------------------------------------------------------- the names


def test_package_exports_the_names_of_torch_fsdp1() -> None:
    #
    for name in fsdp_c.__all__:
        assert hasattr(torch_fsdp, name), name
        if name != "FullyShardedDataParallel":
            assert getattr(fsdp_c, name) is getattr(torch_fsdp, name)


def test_unit_is_its_own_state_to_clients_of_torch() -> None:
    from torch.distributed.fsdp._common_utils import (
        _FSDPState,
        _get_module_fsdp_state_if_fully_sharded_module,
    )

    model = FSDP(Net())
    assert [kind for kind in FSDP.__mro__ if not kind.__module__.startswith("fsdp_c.")][:2] == [
        nn.Module,
        _FSDPState,
    ]
    assert _get_module_fsdp_state_if_fully_sharded_module(model) is model


# ----------------------------------------------------------------- ignored states


def test_ignoring_the_wrapped_module_itself_warns() -> None:  # G-020
    net = Net()
    with pytest.warns(UserWarning, match="ignore the top-level module"):
        model = FSDP(net, ignored_modules=[net])
    assert not model._has_params and model._flat_param is None and model.params == []


def test_ignored_parameter_stays_as_it_was() -> None:  # G-021
    net = Net()
    weight = net.first.weight
    model = FSDP(net, ignored_states=[weight])
    assert model.module.first.weight is weight
    assert "first.weight" not in model._flat_param._fqns


def test_buffers_of_ignored_modules_are_named_without_wrappers() -> None:  # G-022
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = FSDP(net, ignored_modules=[net[0]])
    assert model._ignored_buffer_names == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


def test_outer_unit_ignores_what_an_inner_one_ignores() -> None:  # A-040, G-020
    net = Net()
    weight = net.second[0].weight
    net.second = FSDP(net.second, ignored_states=[weight])
    assert weight in FSDP(net)._ignored_params


# ----------------------------------------------------------------- process groups and strategies


def test_mesh_of_one_dimension_gives_the_group() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model = FSDP(Net(), device_mesh=mesh)
    assert model.process_group is mesh.get_group() and model._device_mesh is mesh


def test_default_group_gives_rank_and_world_size() -> None:
    model = FSDP(Net())
    assert (model.rank, model.world_size, model.process_group) == (RANK, WORLD_SIZE, dist.group.WORLD)


def test_pair_of_groups_is_refused_by_a_plain_strategy() -> None:
    with pytest.raises(ValueError, match="takes one process group, but got 2"):
        FSDP(Net(), process_group=(dist.group.WORLD, dist.group.WORLD))


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategy_takes_a_pair_of_groups(strategy: ShardingStrategy) -> None:  # G-023
    shard, replicate = dist.new_group([0, 1]), dist.new_group([1, 3])
    model = FSDP(Net(), process_group=(shard, replicate), sharding_strategy=strategy)
    assert (model.process_group, model._inter_node_pg, model.sharding_strategy) == (
        shard,
        replicate,
        strategy,
    )
    assert model._gradient_predivide_factor * model._gradient_postdivide_factor == WORLD_SIZE


def test_hybrid_strategy_takes_a_mesh_of_replicate_and_shard() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = FSDP(Net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert (model._inter_node_pg, model.process_group) == (mesh.get_group(0), mesh.get_group(1))


def test_hybrid_strategy_makes_the_pair_once_for_all_units(monkeypatch: pytest.MonkeyPatch) -> None:  # G-008
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = nested(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert (model.world_size, model._inter_node_pg.size()) == (2, 2)
    assert model.second.process_group is model.process_group
    assert model.second._inter_node_pg is model._inter_node_pg


def test_hybrid_strategy_on_uneven_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="4 ranks do not fill nodes of 3"):
        nested(sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_no_shard_on_one_rank_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(Net(), process_group=dist.new_group([RANK]), sharding_strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize(
    ("size", "factor"), [(1, 1), (2, 2), (4, 2), (6, 4), (8, 4), (9, 2), (64, 8), (512, 32)]
)
def test_predivide_factor_is_that_of_torch(size: int, factor: float) -> None:  # D-082
    from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

    assert (
        fsdp_c.sharding.flat_param.predivide_factor(size)
        == factor
        == DefaultState._get_gradient_predivide_factor(size)
    )


# ----------------------------------------------------------------- device and materialisation


@pytest.mark.parametrize("device_id", [None, "cpu", "cpu:0"])
def test_cpu_is_a_device_like_any_other(device_id: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FSDP(Net(), device_id=device_id and torch.device(device_id))
    assert model.compute_device == torch.device("cpu") == model._flat_param.device


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("device_id", [0, torch.device("cuda", 0)])
def test_device_that_is_not_there_is_refused_and_named(device_id: int | torch.device) -> None:
    with pytest.raises(RuntimeError, match=f"rank {RANK}.*leave it out"):
        FSDP(Net(), device_id=device_id)


def test_meta_module_is_initialised_by_reset_parameters() -> None:  # G-034
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = FSDP(net)
    assert model._flat_param.device == torch.device("cpu")
    assert model.module[1].running_var.tolist() == [1.0] * 4


def test_meta_module_is_initialised_by_param_init_fn_once_per_module() -> None:
    with torch.device("meta"):
        net = Net()
    initialised = []

    def initialise(module: nn.Module) -> None:
        initialised.append(module)
        module.to_empty(device="cpu", recurse=False)

    FSDP(net, param_init_fn=initialise)
    assert initialised == [net, net.first, net.second, net.second[0], net.second[1]]


def test_param_init_fn_that_forgets_a_parameter_is_refused_and_names_it() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match="'first.weight' is still on the meta device"):
        FSDP(net, param_init_fn=lambda module: None)


# ----------------------------------------------------------------- parameters


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameter_shared_by_two_units_is_refused_and_both_names_given(
    use_orig_params: bool,
) -> None:  # parity 33
    # G-042
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    net[1].weight = net[0][0].weight
    net[0] = FSDP(net[0], use_orig_params=use_orig_params)
    with pytest.raises(
        ValueError, match=r"'1.weight' of Sequential is the same parameter as '0.weight' of Sequential"
    ):
        FSDP(net, use_orig_params=use_orig_params)


def test_parameter_that_a_policy_shares_between_units_goes_to_the_outer_one() -> None:  # parity 33
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    net[1].weight = net[0][0].weight
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    assert [clean_name(fqn) for fqn in model._flat_param._fqns] == ["0.0.weight", "1.bias"]
    assert model.module[0]._flat_param._fqns == ["0.bias"]


def test_parameter_shared_inside_a_unit_is_flattened_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert FSDP(net)._flat_param._fqns == ["0.weight"]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrapping_the_module_of_a_unit_again_is_refused(use_orig_params: bool) -> None:
    model = FSDP(Net(), use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match="one parameter belongs to one unit"):
        FSDP(model.module, use_orig_params=use_orig_params)


def test_unit_of_torch_inside_is_refused_and_named() -> None:
    net = Net()
    net.second = torch_fsdp.FullyShardedDataParallel(net.second, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="submodule 'second' is already sharded by torch's own FSDP"):
        FSDP(net)


def test_unit_without_parameters_has_no_handle() -> None:
    model = FSDP(nn.ReLU())
    assert model._handle is None and not model._has_params


# ----------------------------------------------------------------- names and lookups


def test_flat_parameters_are_named_after_the_unit() -> None:
    names = [name for name, _ in nested().named_parameters()]
    assert names == [
        "_fsdp_wrapped_module._flat_param",
        "_fsdp_wrapped_module.second._fsdp_wrapped_module._flat_param",
    ]


def test_original_parameters_keep_their_names_behind_the_wrappers() -> None:
    names = [name for name, _ in nested(use_orig_params=True).named_parameters()]
    assert names == [
        "_fsdp_wrapped_module.first.weight",
        "_fsdp_wrapped_module.first.bias",
        "_fsdp_wrapped_module.second._fsdp_wrapped_module.0.weight",
        "_fsdp_wrapped_module.second._fsdp_wrapped_module.0.bias",
    ]


def test_unknown_attributes_and_indices_are_those_of_the_wrapped_module() -> None:
    assert FSDP(Net()).greet() == "hello"
    assert isinstance(FSDP(nn.Sequential(nn.ReLU(), nn.Tanh()))[1], nn.Tanh)


def test_missing_attribute_is_an_attribute_error_of_the_wrapped_module() -> None:
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = FSDP(Net()).absent


def test_attribute_of_an_unfinished_unit_does_not_recurse() -> None:
    with pytest.raises(AttributeError, match="absent"):
        _ = FSDP.__new__(FSDP).absent


def test_module_sees_through_a_checkpoint_wrapper() -> None:
    net = Net()
    assert FSDP(checkpoint_wrapper(net)).module is net


def test_submodules_are_marked_for_dynamo_but_ignored_ones_are_not() -> None:  # G-041
    net = Net()
    FSDP(net, use_orig_params=True, ignored_modules=[net.first])
    assert net._is_fsdp_managed_module and net.second[0]._fsdp_use_orig_params is True
    assert not hasattr(net.first, "_is_fsdp_managed_module")


def test_printing_shows_the_tree_as_nn_module_does() -> None:
    assert repr(FSDP(nn.Sequential(nn.ReLU()))).splitlines() == [
        "FullyShardedDataParallel(",
        "  (_fsdp_wrapped_module): Sequential(",
        "    (0): ReLU()",
        "  )",
        ")",
    ]


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
def test_copying_or_pickling_says_what_to_do_instead(attempt: object) -> None:
    with pytest.raises(TypeError, match="copy the plain module and wrap the copy"):
        attempt(nn.ModuleList([FSDP(Net())])[0])


def test_a_shallow_copy_is_another_object_over_the_same_unit() -> None:
    model = FSDP(Net())
    copied = copy.copy(model)
    assert type(copied) is FSDP and copied is not model and copied.module is model.module
    assert [id(param) for param in copied.parameters()] == [id(param) for param in model.parameters()]
    assert list(copied.state_dict()) == list(model.state_dict())


def test_a_module_without_items_has_none_when_it_is_wrapped() -> None:
    with pytest.raises(AttributeError, match="has no attribute '__getitem__'"):
        FSDP(Net())[0]


# ----------------------------------------------------------------- roots and lazy initialisation


def test_asking_for_the_root_decides_nothing() -> None:  # D-002
    model = nested()
    assert model.check_is_root() and not model.second.check_is_root()
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert model._is_root is None and model.second._is_root is None


def test_after_full_parameters_were_shown_the_root_is_told_as_asked() -> None:
    model = nested()
    with FSDP.summon_full_params(model):
        pass
    assert model._is_root is True and model.second._is_root is False
    model._is_root = None
    assert model._is_root is None
    inner = FSDP(nn.Linear(3, 3))
    with FSDP.summon_full_params(inner):
        pass
    outer = FSDP(nn.Sequential(nn.Linear(3, 3)))
    outer.module[0] = inner  # where construction does not see it
    outer(torch.ones(2, 3))
    assert outer._is_root is True and inner._is_root is False


def test_the_handle_s_name_of_a_strategy_is_taken() -> None:
    assert FSDP(Net(), sharding_strategy=HandleShardingStrategy.SHARD_GRAD_OP).sharding_strategy is (
        ShardingStrategy.SHARD_GRAD_OP
    )


def test_unit_whose_outer_one_is_gone_is_a_root_again() -> None:
    model = nested()
    inner = model.second
    del model
    gc.collect()
    assert inner.check_is_root()


def test_units_are_listed_outer_first_and_once() -> None:
    model = nested()
    assert FSDP.fsdp_modules(nn.ModuleList([model, model])) == [model, model.second]


def test_lazy_initialisation_makes_the_outermost_unit_the_root() -> None:
    model = nested()
    model._lazy_init()
    assert (model._is_root, model.second._is_root) == (True, False)
    assert model._all_handles == [model._handle, model.second._handle]
    assert model._all_fsdp_states == [model, model.second]


def test_lazy_initialisation_casts_buffers_to_the_innermost_dtype() -> None:  # A-019, D-022
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[1] = FSDP(net[1], mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    model = FSDP(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model._lazy_init()
    dtypes = {name: buffer.dtype for name, buffer in model.module.named_buffers()}
    assert dtypes["0.running_mean"] is torch.bfloat16
    assert dtypes["1._fsdp_wrapped_module.running_mean"] is torch.float16
    assert dtypes["0.num_batches_tracked"] is torch.int64
    assert model._buffer_name_to_orig_dtype["1.running_mean"] is torch.float32


def test_ignored_buffers_are_not_cast() -> None:  # D-022, G-022
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = FSDP(net, ignored_modules=[net[0]], mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model._lazy_init()
    assert net[0].running_mean.dtype is torch.float32


def test_no_sync_switches_every_unit_off_and_on_again() -> None:
    model = nested()
    with model.no_sync():
        assert not model._sync_gradients and not model.second._sync_gradients
    assert model._sync_gradients and model.second._sync_gradients


def test_no_sync_on_an_inner_unit_is_refused() -> None:
    model = nested()
    with pytest.raises(RuntimeError, match="inner FSDP instances"), model.second.no_sync():
        pass
    assert model.second._is_root is None


def test_no_sync_notices_who_switched_synchronisation_on() -> None:
    model = nested()
    with pytest.raises(AssertionError, match="incorrectly set to `True`"), model.no_sync():
        model.second._sync_gradients = True
    assert model._sync_gradients


def test_training_state_starts_idle() -> None:
    model = FSDP(Net())
    assert model.training_state is TrainingState.IDLE
    with pytest.raises(ValueError, match="Net, rank 1"):
        model._assert_state(TrainingState.FORWARD_BACKWARD)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_changing_the_dtype_changes_the_flat_parameter_and_all_that_shows_it(use_orig_params: bool) -> None:
    #
    model = nested(use_orig_params=use_orig_params)
    names = [name for name, _ in model.named_parameters()]
    flat_params = [unit._flat_param for unit in FSDP.fsdp_modules(model)]
    model.double()
    assert [unit._flat_param for unit in FSDP.fsdp_modules(model)] == flat_params
    assert {flat_param.dtype for flat_param in flat_params} == {torch.float64}
    assert [name for name, _ in model.named_parameters()] == names
    assert {param.dtype for param in model.parameters()} == {torch.float64}
