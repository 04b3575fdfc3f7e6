"""Names, values and metadata that outside code reads, beside torch's own. Each test names the rows it
covers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fsdp_c import FlatParameter, _flat_param
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.collectives import fake_ranks
from tests.models import WIDTH, Block, Conv
from tests.ranks import both_views

WORLD_SIZE, RANK = 4, 1
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)


_group = fake_ranks(RANK, WORLD_SIZE)


def build(cls: type, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return cls(Conv(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **kwargs)


def both(**kwargs: Any) -> list[Any]:
    """The same model wrapped by torch and by fsdp_c, each as its units in order."""
    return [
        [unit for unit in build(cls, **kwargs).modules() if isinstance(unit, cls)]
        for cls in (torch_fsdp.FullyShardedDataParallel, FSDP)
    ]


def each_flat_param(**kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for theirs, ours in zip(*both(**kwargs), strict=True):
        yield theirs._flat_param, ours._flat_param


# ----------------------------------------------------------------- names


def test_package_says_its_version_and_shows_what_users_use() -> None:
    assert fsdp_c.__version__.split(".")[0].isdigit()
    shown = [name for name in dir(fsdp_c) if not name.startswith("_")]
    assert set(fsdp_c.__all__) | {"install", "uninstall", "summary", "wrap"} <= set(shown)
    assert not {"_C", "torch", "construction", "materialization", "left_out"} & set(dir(fsdp_c))
    assert all(hasattr(fsdp_c, name) for name in dir(fsdp_c))


def test_flat_param_exports_the_names_of_torchs() -> None:
    from torch.distributed.fsdp import _flat_param as theirs

    assert set(theirs.__all__) <= set(_flat_param.__all__)


def test_names_of_parameters_and_buffers_are_those_of_torch() -> None:
    for use_orig_params in (True, False):
        theirs, ours = (units[0] for units in both(use_orig_params=use_orig_params))
        for method in ("named_parameters", "named_buffers"):
            for kwargs in ({}, {"prefix": "p"}, {"recurse": False}, {"remove_duplicate": False}):
                names = [[name for name, _ in getattr(model, method)(**kwargs)] for model in (theirs, ours)]
                if "remove_duplicate" in kwargs:  # torch moves a shared parameter behind its neighbours
                    names = [sorted(one) for one in names]
                assert names[0] == names[1], (use_orig_params, method, kwargs)


def test_indexing_is_forwarded_and_len_is_not() -> None:
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert isinstance(model[1], nn.ReLU)
    with pytest.raises(TypeError):
        len(model)


# ----------------------------------------------------------------- the flat parameter


def test_flat_parameter_is_a_plain_parameter_that_says_so() -> None:  # B-001, B-002
    param = FlatParameter(torch.ones(3), False)
    assert type(param) is nn.Parameter and isinstance(param, FlatParameter) and not param.requires_grad
    assert not isinstance(nn.Parameter(torch.ones(3)), FlatParameter)
    marked = torch.ones(3)
    marked._is_flat_param = True
    assert isinstance(marked, FlatParameter)


def test_flat_parameter_of_a_meta_tensor() -> None:  # B-005
    assert FlatParameter(torch.ones(3, device="meta")).is_meta


@both_views
@all_strategies
def test_infos_name_the_same_places(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """B-014, B-020, B-021, B-040, B-041."""
    for theirs, ours in each_flat_param(sharding_strategy=strategy, use_orig_params=use_orig_params):
        assert type(ours._param_infos) is list
        for name in ("_param_infos", "_shared_param_infos"):
            expected = [(one.param_name, one.module_name, type(one.module)) for one in getattr(theirs, name)]
            assert [
                (one.param_name, one.module_name, type(one.module)) for one in getattr(ours, name)
            ] == expected
        expected = [(one.prim_param_name, one.prim_module_name) for one in theirs._shared_param_infos]
        assert [(one.prim_param_name, one.prim_module_name) for one in ours._shared_param_infos] == expected
        assert len(ours._modules) == len(theirs._modules)


@both_views
@all_strategies
def test_shards_hold_the_values_of_torchs(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """C-014, C-030: also the padding, which is 42 between parameters and zero at the end."""
    for theirs, ours in each_flat_param(sharding_strategy=strategy, use_orig_params=use_orig_params):
        assert torch.equal(ours.detach(), theirs.detach())


@both_views
@all_strategies
def test_shard_metadata_is_that_of_torch(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:  # B-043, C-035
    theirs, ours = both(sharding_strategy=strategy, use_orig_params=use_orig_params)
    for their_unit, our_unit in zip(theirs, ours, strict=True):
        expected = their_unit._handle.shard_metadata()
        assert our_unit._handle.shard_metadata()._asdict() == expected._asdict()


@both_views
def test_handle_names_its_parameters(use_orig_params: bool) -> None:  # C-007, C-141
    theirs, ours = both(use_orig_params=use_orig_params)
    for their_unit, our_unit in zip(theirs, ours, strict=True):
        for method in ("param_module_names", "shared_param_module_names"):
            assert list(getattr(our_unit._handle, method)()) == list(getattr(their_unit._handle, method)())
        assert our_unit._handle._fqns_in_shard == their_unit._handle._fqns_in_shard
        assert repr(our_unit._handle) == repr(their_unit._handle)


@both_views
def test_padded_full_parameter_is_there_without_its_storage(use_orig_params: bool) -> None:  # B-011, B-024
    model = build(
        FSDP, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    model(torch.ones(2, WIDTH))
    flat = model.blocks[0]._flat_param
    assert flat._padded_unsharded_size == torch.Size((flat._sharded_size.numel() * WORLD_SIZE,))
    full = model.blocks[0]._handle._get_padded_unsharded_flat_param()
    assert full.dtype is torch.bfloat16 and full.shape == flat._padded_unsharded_size
    assert full.untyped_storage().size() == 0


@all_strategies
@both_views
def test_size_says_whether_a_tensor_is_sharded(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:  # C-140
    for theirs, ours in zip(*both(sharding_strategy=strategy, use_orig_params=use_orig_params), strict=True):
        for tensor in (
            theirs._handle.flat_param,
            torch.empty(3),
            torch.empty(theirs._handle.flat_param._sharded_size),
        ):
            assert ours._handle.is_sharded(tensor) is theirs._handle.is_sharded(tensor)


@pytest.mark.parametrize("precision", [None, "param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("in_eval", ["0", "1"])
def test_precisions_in_use_are_those_of_torch(
    precision: str | None, in_eval: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # C-142
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", in_eval)
    mixed = MixedPrecision(**{precision: torch.bfloat16}) if precision else None
    names = ("_uses_param_mixed_precision", "_uses_reduce_mixed_precision", "_force_full_precision")
    for pair in zip(*both(mixed_precision=mixed), strict=True):
        found = []
        for unit in pair:
            states = {}
            for training in (True, False):
                unit.module.train(training)
                states[training] = [getattr(unit._handle, name) for name in (*names, "uses_sharded_strategy")]
            found.append(states)
        assert found[0] == found[1]
    model = build(FSDP, mixed_precision=mixed)
    with FSDP.summon_full_params(model):
        assert model._handle._force_full_precision is (precision is not None)


@all_strategies
@both_views
def test_views_between_forward_and_backward_are_said_to_stay(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:  # C-142, C-091
    x = torch.ones(2, WIDTH)
    for theirs, ours in zip(*both(sharding_strategy=strategy, use_orig_params=use_orig_params), strict=True):
        for grad in (False, True):
            found, outputs = [], []
            for unit in (theirs, ours):
                with torch.set_grad_enabled(grad):
                    # without outputs no backward can come, and ours shows sharded ones again
                    outputs.append(unit(x))
                found.append(unit._handle._skipped_use_sharded_views)
            assert found[0] == found[1], (strategy, use_orig_params, grad)
        break
