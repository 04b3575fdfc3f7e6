"""Decisions and errors of the constructor, and attributes of a unit before its first step."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision, ShardingStrategy
from fsdp_c.compat.upstream import HandleShardingStrategy
from fsdp_c.wrap import ModuleWrapPolicy
from tests.collectives import fake_ranks
from tests.ranks import both_views

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


def test_outer_unit_ignores_parameters_ignored_by_an_inner_unit() -> None:
    net = Net()
    weight = net.second[0].weight
    net.second = FSDP(net.second, ignored_states=[weight])
    assert weight in FSDP(net)._ignored_params


def test_pair_of_groups_is_refused_by_a_plain_strategy() -> None:
    with pytest.raises(ValueError, match="takes one process group, but got 2"):
        FSDP(Net(), process_group=(dist.group.WORLD, dist.group.WORLD))


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategy_takes_a_pair_of_groups(strategy: ShardingStrategy) -> None:
    shard, replicate = dist.new_group([0, 1]), dist.new_group([1, 3])
    model = FSDP(Net(), process_group=(shard, replicate), sharding_strategy=strategy)
    assert (model.process_group, model._inter_node_pg) == (shard, replicate)
    assert model.sharding_strategy is strategy
    assert type(model._inter_node_state) is DefaultState
    assert model._inter_node_state.process_group is replicate
    assert not hasattr(nested(), "_inter_node_pg") and not hasattr(nested(), "_inter_node_state")
    assert model._gradient_predivide_factor * model._gradient_postdivide_factor == WORLD_SIZE


def test_hybrid_strategy_makes_the_pair_once_for_all_units(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("size", [1, 2, 4, 6, 8, 9, 64, 512])
def test_gradients_are_divided_by_the_factors_of_torch(size: int) -> None:
    model = FSDP(Net(), process_group=FakeProcessGroup._create_internal(rank=0, world_size=size))
    factor = DefaultState._get_gradient_predivide_factor(size)
    assert (model._gradient_predivide_factor, model._gradient_postdivide_factor) == (factor, size / factor)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("device_id", [0, torch.device("cuda", 0)])
def test_device_that_is_not_there_is_refused_and_named(device_id: int | torch.device) -> None:
    with pytest.raises(RuntimeError, match=f"rank {RANK}.*leave it out"):
        FSDP(Net(), device_id=device_id)


def test_meta_module_is_initialised_by_reset_parameters() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("meta"))
    assert model._flat_param.device == torch.device("cpu")
    assert model.module[1].running_var.tolist() == [1.0] * 4


def test_meta_module_is_initialised_by_param_init_fn_once_per_module() -> None:
    initialised = []

    def initialise(module: nn.Module) -> None:
        initialised.append(module)
        module.to_empty(device="cpu", recurse=False)

    net = Net().to("meta")
    FSDP(net, param_init_fn=initialise)
    assert initialised == [net, net.first, net.second, net.second[0], net.second[1]]
    net = Net().to("meta")
    initialised.clear()
    FSDP(net, param_init_fn=initialise, ignored_modules=[net.second])
    assert initialised == [net, net.first]


def test_param_init_fn_that_forgets_a_parameter_is_refused_and_names_it() -> None:
    with pytest.raises(ValueError, match="'first.weight' is still on the meta device"):
        FSDP(Net().to("meta"), param_init_fn=lambda module: None)


@both_views
def test_parameter_of_two_units_is_refused_and_both_names_given(use_orig_params: bool) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    net[1].weight = net[0][0].weight
    net[0] = FSDP(net[0], use_orig_params=use_orig_params)
    same = "'1.weight' of Sequential is the same parameter as '0.weight' of Sequential, and one parameter"
    for module, message in ((net, same), (net[0].module, "one parameter belongs to one unit")):
        with pytest.raises(ValueError, match=message):
            FSDP(module, use_orig_params=use_orig_params)


def test_unknown_attributes_and_indices_are_those_of_the_wrapped_module() -> None:
    assert FSDP(Net()).greet() == "hello"
    model = FSDP(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert isinstance(model[1], nn.Tanh)
    with pytest.raises(TypeError):
        len(model)


def test_attribute_of_an_unfinished_unit_does_not_recurse() -> None:
    with pytest.raises(AttributeError, match="absent"):
        _ = FSDP.__new__(FSDP).absent


def test_submodules_are_marked_for_dynamo_but_ignored_ones_are_not() -> None:
    net = Net()
    FSDP(net, use_orig_params=True, ignored_modules=[net.first])
    assert net._is_fsdp_managed_module and net.second[0]._fsdp_use_orig_params is True
    assert not hasattr(net.first, "_is_fsdp_managed_module")


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
def test_copying_or_pickling_a_unit_names_the_remedy(attempt: object) -> None:
    with pytest.raises(TypeError, match="copy the plain module and wrap the copy"):
        attempt(nn.ModuleList([FSDP(Net())])[0])


def test_a_shallow_copy_is_another_object_over_the_same_unit() -> None:
    model = FSDP(Net())
    copied = copy.copy(model)
    assert type(copied) is FSDP and copied is not model and copied.module is model.module
    assert [id(param) for param in copied.parameters()] == [id(param) for param in model.parameters()]
    assert list(copied.state_dict()) == list(model.state_dict())


def test_root_that_was_summoned_alone_joins_a_tree() -> None:
    inner = FSDP(nn.Linear(3, 3))
    with FSDP.summon_full_params(inner):
        pass
    assert inner._is_root is True
    outer = FSDP(nn.Sequential(nn.Linear(3, 3)))
    outer.module[0] = inner  # after construction, which would have found it
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


def test_lazy_initialisation_casts_buffers_to_the_innermost_dtype() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[1] = FSDP(net[1], mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    model = FSDP(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model._lazy_init()
    dtypes = {name: buffer.dtype for name, buffer in model.module.named_buffers()}
    assert dtypes["0.running_mean"] is torch.bfloat16
    assert dtypes["1._fsdp_wrapped_module.running_mean"] is torch.float16
    assert dtypes["0.num_batches_tracked"] is torch.int64
    assert model._buffer_name_to_orig_dtype["1.running_mean"] is torch.float32


def test_ignored_buffers_are_not_cast() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = FSDP(net, ignored_modules=[net[0]], mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model._lazy_init()
    assert net[0].running_mean.dtype is torch.float32
    assert model._ignored_buffer_names == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


def test_ids_of_handles_are_not_used_again() -> None:
    seen = set()
    for _ in range(3):
        model = FSDP(Net())
        seen.add(model._handle.registration_id)
        del model
        gc.collect()
    assert len(seen) == 3
