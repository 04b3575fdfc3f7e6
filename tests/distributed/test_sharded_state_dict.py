"""SHARDED_STATE_DICT and LOCAL_STATE_DICT: values, metadata and loading, compared with torch's FSDP1."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from tests.distributed.test_state_dict import train, wrap
from tests.models import Net
from tests.pairwise import pairwise
from tests.parity.engine import same_bits
from tests.ranks import VIEWS, both_views, device, on_ranks
from tests.training import FULL, LOCAL, SHARDED, assert_same

both_forms = pytest.mark.parametrize("mesh", [False, True])


class Odd(nn.Module):
    """A module with fewer rows than ranks, unevenly dividing rows, a shared parameter, buffers, and another
    memory format.
    """

    def __init__(self, memory_format: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        self.one_row = nn.Parameter(torch.randn(1, 5))
        self.vector = nn.Parameter(torch.randn(7))
        self.image = nn.Conv2d(3, 5, 3).to(memory_format=memory_format)
        self.net = Net(2, tied_head=True, tied=True)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        extra = self.image(torch.ones(1, 3, 3, 3)).sum() + self.vector.sum() + self.one_row.sum()
        return self.net(x) + extra


def odd(seed: int = 0, **options: Any) -> Odd:
    torch.manual_seed(seed)
    return Odd(**options)


def contiguous(seed: int = 0) -> Odd:
    """Return a contiguous model: torch makes no ShardedTensor of a channels_last parameter."""
    return odd(seed, memory_format=torch.contiguous_format)


def saved(model: Any, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with type(model).state_dict_type(model, kind, config):
        return model.state_dict()


def load(model: Any, kind: StateDictType, state: dict[str, Any], strict: bool = True) -> Any:
    with type(model).state_dict_type(model, kind):
        return model.load_state_dict(state, strict=strict)


def load_transformed(model: Any, kind: StateDictType, state: dict[str, Any]) -> Any:
    """Load through modules that copy the loaded values themselves."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module._register_load_state_dict_pre_hook(lambda *args: None)
    return load(model, kind, state)


def load_shown(model: Any, kind: StateDictType, state: dict[str, Any]) -> Any:
    with type(model).summon_full_params(model):
        return load(model, kind, state)


def assert_same_value(name: Any, expected: Any, actual: Any) -> None:
    assert type(expected) is type(actual), name
    if isinstance(expected, ShardedTensor):
        assert expected.metadata() == actual.metadata(), name
        assert type(expected.sharding_spec()) is type(actual.sharding_spec()), name
        ours, theirs = actual.local_shards(), expected.local_shards()
        assert [shard.metadata for shard in ours] == [shard.metadata for shard in theirs], name
        assert all(same_bits(a.tensor, b.tensor) for a, b in zip(ours, theirs, strict=True)), name
    elif isinstance(expected, DTensor):
        assert (expected.placements, expected.shape) == (actual.placements, actual.shape), name
        assert expected.stride() == actual.stride(), name
        assert same_bits(expected.to_local(), actual.to_local()), name
    else:
        assert same_bits(expected, actual), name


def assert_same_full(expected: Any, actual: Any) -> None:
    assert_same(saved(expected, FULL), saved(actual, FULL))


@pairwise(use_orig_params=VIEWS, mesh=[False, True, "hybrid", "first dimension"], offload=[False, True])
@on_ranks(4)
def test_sharded_values_and_their_metadata_equal_torchs(rank, use_orig_params, mesh, offload):
    states, options = [], {"mesh": mesh}
    data = rank // 2 if mesh == "first dimension" else rank  # whose second dimension has copies
    if isinstance(mesh, str):
        options = {"device_mesh": init_device_mesh(device().type, (2, 2))}
    if mesh == "hybrid":
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    for which in ("torch", "fsdp_c"):
        model = wrap(odd() if mesh else contiguous(), use_orig_params, which, **options)
        train(model, data)
        states.append(saved(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)))
    torchs, ours = states
    assert sorted(ours) == sorted(torchs)
    for name in torchs:
        assert_same_value(name, torchs[name], ours[name])
    expected = saved(model, FULL)
    train(model, data)
    load(model, SHARDED, torchs)
    assert_same(expected, saved(model, FULL))


@both_forms
@both_views
@on_ranks(2)
def test_sharded_dict_loads_where_whole_tensors_are_loaded(use_orig_params, mesh):
    source = wrap(odd(0), use_orig_params, mesh=mesh)
    for strategy, kind in (("FULL_SHARD", FULL), ("NO_SHARD", FULL), ("NO_SHARD", SHARDED)):
        for loader in (load, load_transformed, load_shown):
            target = wrap(odd(1), use_orig_params, sharding_strategy=ShardingStrategy[strategy])
            result = loader(target, kind, saved(source, SHARDED))
            assert result.missing_keys == result.unexpected_keys == []
            assert_same_full(source, target)


@both_views
@on_ranks(2)
def test_empty_parameters_are_saved_and_loaded(use_orig_params):
    """torch divides by the number of rows."""

    def small(value: float) -> nn.Module:
        module = nn.Module()
        module.empty = nn.Parameter(torch.empty(0, 3))
        module.weight = nn.Parameter(torch.full((3, 2), value))
        return module

    for mesh in (False, True):
        source = wrap(small(1.0), use_orig_params, mesh=mesh, auto_wrap_policy=None)
        target = wrap(small(2.0), use_orig_params, mesh=mesh, auto_wrap_policy=None)
        load(target, SHARDED, saved(source, SHARDED))
        full = saved(target, FULL)
        assert full["empty"].shape == (0, 3)
        assert full["weight"].eq(1.0).all()


@on_ranks(2)
def test_transposed_parameter_is_saved_in_rows(rank):
    def transposed() -> nn.Module:
        torch.manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(6, 5).t())
        return module

    expected = transposed().weight.detach()
    model = wrap(transposed(), True, auto_wrap_policy=None)
    state = saved(model, SHARDED)
    assert torch.equal(state["weight"].local_tensor(), expected.chunk(2)[rank])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(model, SHARDED, state)
    assert torch.equal(saved(model, FULL)["weight"], expected)


@on_ranks(2)
def test_inner_unit_saves_and_loads_on_its_own():
    model, other = wrap(odd(0), True), wrap(odd(1), True)
    inner, into = type(model).fsdp_modules(model)[1], type(model).fsdp_modules(other)[1]
    load(into, SHARDED, saved(inner, SHARDED))
    assert_same_full(inner, into)


@on_ranks(2)
def test_all_units_are_saved_by_one_transfer():
    model = wrap(odd(), False)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as transfer:
        state = saved(model, SHARDED)
        assert transfer.call_count == 1
        load(model, SHARDED, state)
        assert transfer.call_count == 2


# ----------------------------------------------------------------- errors


@both_views
@on_ranks(2)
def test_missing_and_unexpected_values_are_reported(use_orig_params):
    source, target = wrap(odd(0), use_orig_params), wrap(odd(1), use_orig_params)
    state = saved(source, SHARDED)
    before = saved(target, FULL)
    del state["vector"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "vector"'):
        load(target, SHARDED, dict(state))
    result = load(target, SHARDED, dict(state), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["vector"], [])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "nowhere"'):
        load(target, SHARDED, state | {"nowhere": state["one_row"]})
    assert torch.equal(saved(target, FULL)["vector"], before["vector"])
    assert not torch.equal(saved(target, FULL)["one_row"], before["one_row"])


@both_views
@on_ranks(2)
def test_values_that_one_rank_lacks_are_refused_on_all_ranks(rank, use_orig_params):
    source, target = wrap(odd(0), use_orig_params), wrap(odd(1), use_orig_params)
    before, state = saved(target, FULL), saved(source, SHARDED)
    if rank == 1:
        del state["vector"]
    with pytest.raises(ValueError, match=r"vector, torch.float32, is on ranks \[0\] only of \[0, 1\]"):
        load(target, SHARDED, state)
    assert_same(before, saved(target, FULL))


@both_views
@on_ranks(2)
def test_wrong_value_is_named_and_nothing_is_loaded(use_orig_params):
    source, target = wrap(odd(0), use_orig_params), wrap(odd(1), use_orig_params)
    before = saved(target, FULL)
    good = saved(source, SHARDED)
    wrong_shape = copy.copy(good)
    wrong_shape["vector"] = good["one_row"]
    with pytest.raises(RuntimeError, match="size mismatch for vector"):
        load(target, SHARDED, wrong_shape)
    plain = copy.copy(good)
    plain["vector"] = torch.zeros(7)
    with pytest.raises(
        AssertionError, match="Expected ShardedTensor, got .* for vector in a sharded state dict"
    ):
        load(target, SHARDED, plain)
    assert_same(before, saved(target, FULL))


@on_ranks(2)
def test_rows_of_another_number_of_ranks_are_refused(rank):
    model = wrap(nn.Linear(3, 4), True, auto_wrap_policy=None)
    state = saved(model, SHARDED)
    shard = state["weight"].local_shards()[0]
    shard.tensor = shard.tensor[:1]
    with pytest.raises(
        AssertionError, match=f"weight: rank {rank} of 2 expects rows of 6 elements but the value has 3"
    ):
        load(model, SHARDED, state)


# ----------------------------------------------------------------- LOCAL


@pytest.mark.parametrize("offload", [False, True])
@both_views
@on_ranks(2)
def test_local_dict_equals_torchs(rank, use_orig_params, offload):
    """The dict contains original parameters besides the flat ones with use_orig_params."""
    states = []
    for which in ("torch", "fsdp_c"):
        model = wrap(odd(), use_orig_params, which)
        train(model, rank)
        states.append(saved(model, LOCAL, LocalStateDictConfig(offload_to_cpu=offload)))
    # torch moves shared parameters behind the others of their module
    assert sorted(states[0]) == sorted(states[1])
    assert use_orig_params or list(states[0]) == list(states[1])
    assert ("net.inp.weight" in states[1]) == use_orig_params
    for name in states[0]:
        if isinstance(states[0][name], ShardedTensor):
            # torch's metadata describe a detached tensor
            states[0][name].metadata().tensor_properties.requires_grad = False
        assert_same_value(name, states[0][name], states[1][name])


@both_views
@on_ranks(4)
def test_local_dict_saves_and_loads_with_either_kind_of_parameters(rank, use_orig_params):
    """torch cannot load the dicts that it saves with use_orig_params. fsdp_c loads the flat parameters."""
    source, target = wrap(odd(0), use_orig_params), wrap(odd(1), use_orig_params)
    train(source, rank)
    buffer = io.BytesIO()
    torch.save(saved(source, LOCAL), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    for name in dict(odd().named_parameters(remove_duplicate=False)):
        assert (name in state) == use_orig_params
        if use_orig_params:
            state[name] = torch.zeros_like(state[name])
    result = load(target, LOCAL, state)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_full(source, target)


@both_views
@on_ranks(2)
def test_local_values_are_loaded_within_a_unit_that_shards_nothing(use_orig_params):
    """The outer unit loads unsharded tensors, the inner one its shard of its flat parameter."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        inner = wrap(nn.Linear(3, 4), use_orig_params, auto_wrap_policy=None)
        outer = {"auto_wrap_policy": None, "sharding_strategy": ShardingStrategy.NO_SHARD}
        models.append(wrap(nn.Sequential(inner, nn.Linear(4, 2)), use_orig_params, **outer))
    result = load(models[1], LOCAL, saved(models[0], LOCAL))
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_full(*models)


@on_ranks(2)
def test_local_values_are_views_of_the_shard():
    model = wrap(nn.Linear(3, 4), False, auto_wrap_policy=None)
    state = saved(model, LOCAL)
    assert state["_flat_param"].local_tensor().data_ptr() == model._handle.local_shard.data_ptr()


# ----------------------------------------------------------------- through torch.distributed.checkpoint


@both_forms
@pytest.mark.parametrize("direction", ["torch to fsdp_c", "fsdp_c to torch", "fsdp_c to fsdp_c"])
@on_ranks(4)
def test_dcp_checkpoint_is_exchanged_and_resharded(rank, mesh, direction, tmp_path):
    """Four ranks save and two load, in separate groups."""
    source_name, target_name = direction.split(" to ")
    path = str(tmp_path)
    source = wrap(contiguous(0), True, source_name, mesh)
    train(source, rank)
    dcp.save(saved(source, SHARDED), checkpoint_id=path)
    expected = saved(source, FULL)
    options: dict[str, Any] = {}
    if mesh:
        grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("copy", "shard"))
        options["device_mesh"] = grid["shard"]
    else:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        options["process_group"] = groups[rank // 2]
    target = wrap(contiguous(1), False, target_name, **options)
    state = saved(target, SHARDED)
    dcp.load(state, checkpoint_id=path)
    load(target, SHARDED, state)
    assert_same(expected, saved(target, FULL))


@both_views
@on_ranks(4)
def test_rows_divided_over_all_ranks_load_where_units_shard_over_some(rank, use_orig_params):
    """torch's load_sharded_optimizer_state_dict divides rows this way under hybrid sharding too."""
    source = wrap(contiguous(0), use_orig_params)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    target = wrap(contiguous(1), use_orig_params, process_group=groups[rank // 2])
    load(target, SHARDED, saved(source, SHARDED))
    assert_same_full(source, target)


@on_ranks(2)
def test_full_config_objects_are_shared_by_the_units():
    """Every unit sees later changes of the caller's config object."""
    model = wrap(odd(), True)
    config = FullStateDictConfig()
    with type(model).state_dict_type(model, FULL, config):
        assert all(unit._state_dict_config is config for unit in type(model).fsdp_modules(model))
        config.offload_to_cpu = True
        assert model.state_dict()["vector"].device.type == "cpu"
