"""``fsdp_c.summary``, ``print(model)`` and the log of units: output and errors."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision, ShardingStrategy
from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy
from tests.collectives import fake_ranks

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LINEARS = ModuleWrapPolicy({nn.Linear})

_group = fake_ranks(1, 4)


def net() -> nn.Module:
    """Three equal blocks, and a checkpointed layer with a tied weight."""
    last = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    last[1].weight = last[0].weight
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3))
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 5), blocks=blocks, last=last))


def test_sizes_are_those_counted_by_hand() -> None:
    """10 x 10 elements are aligned to 8 of bfloat16, the 10 of the bias follow, and the 114 are padded for 4
    ranks.
    """
    model = FSDP(nn.Sequential(nn.Linear(10, 10)), mixed_precision=BF16, use_orig_params=True)
    whole = fsdp_c.summary(model)
    (unit,) = whole.units
    assert (unit.numel, unit.padded_numel, unit.shard_numel) == (110, 116, 29)
    assert (unit.names, unit.path, unit.module) == (("0.weight", "0.bias"), "", "Sequential")
    dtypes = torch.float32, torch.bfloat16, torch.float32
    assert (unit.dtype, unit.param_dtype, unit.reduce_dtype) == dtypes
    assert (unit.sharded_nbytes, unit.unsharded_nbytes) == (29 * 4, 116 * 2)
    assert (unit.all_gather_nbytes, unit.reduce_scatter_nbytes, unit.all_reduce_nbytes) == (232, 464, 0)
    assert (whole.numel, whole.sharded_nbytes, whole.peak_unsharded_nbytes) == (110, 116, 232)


def test_hybrid_units_all_reduce_their_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    (unit,) = fsdp_c.summary(
        FSDP(nn.Linear(8, 8), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    ).units
    assert (unit.shards, unit.replicas) == (2, 2)
    assert unit.all_reduce_nbytes == unit.sharded_nbytes == unit.all_gather_nbytes / 2 == 144


def test_summary_marks_segments_and_frozen_units() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).requires_grad_(False))
    model = FSDP(layers, auto_wrap_policy=lambda module, recurse, **_: recurse or module is layers[2])
    whole = fsdp_c.summary(model)
    assert [(unit.path, unit.is_segment, unit.parent, unit.is_trainable) for unit in whole.units] == [
        ("", False, None, True),
        ("", True, 0, True),
        ("2", False, 0, False),
    ]
    assert "Sequential, segment" in str(whole) and "Linear, frozen" in str(whole)


def test_several_trees_and_an_inner_unit_are_summarised() -> None:
    trees = nn.ModuleList(
        [FSDP(nn.Linear(3, 3)), FSDP(nn.Sequential(nn.Linear(3, 3)), auto_wrap_policy=LINEARS)]
    )
    assert [(unit.path, unit.parent) for unit in fsdp_c.summary(trees).units] == [
        ("0", None),
        ("1", None),
        ("1.0", 1),
    ]
    (inner,) = fsdp_c.summary(trees[1].module[0]).units
    assert (inner.path, inner.parent) == ("", None)


def test_prefetch_limits_of_the_root_count_in_the_peak() -> None:
    for backward, forward in ((0, 0), (1, 2), (3, 1)):
        model = FSDP(
            nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))),
            auto_wrap_policy=LINEARS,
            forward_prefetch=True,
        )
        model._exec_order_data._backward_prefetch_limit = backward
        model._exec_order_data._forward_prefetch_limit = forward
        whole = fsdp_c.summary(model)
        assert whole.peak_unsharded_nbytes == (1 + max(backward, forward)) * 4 * 8 * 8
        model._lazy_init()
        assert fsdp_c.summary(model) == whole


def test_the_table_shows_units_sizes_collectives_names_and_memory() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    whole = fsdp_c.summary(FSDP(layers, auto_wrap_policy=LINEARS))
    head, _, columns, root, linears, _, *rest = str(whole).splitlines()
    assert head == "3 units and segments, 160 parameters"
    assert columns.split("  ")[0] == "unit" and "numel in / out" in columns
    assert root.split() == (
        "(root) Sequential FULL_SHARD over 4 16 0 4 / 16 float32 16 B 64 B "
        "all-gather 64 B, reduce-scatter 64 B".split()
    )
    assert linears.split() == (
        "* (x2) Linear FULL_SHARD over 4 72 0 18 / 72 float32 72 B 288 B "
        "all-gather 288 B, reduce-scatter 288 B".split()
    )
    assert rest == [
        "(root): 2.weight, 2.bias",
        "* (x2): weight, bias",
        "",
        "per rank: 160 B of parameters all the time, and about 640 B unsharded at the peak of a training step",
    ]


def test_units_of_other_settings_and_dtypes_say_theirs() -> None:
    def settings(module: nn.Module) -> bool | dict[str, Any]:
        return isinstance(module, nn.Sequential) and {
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
            "mixed_precision": BF16,
        }

    text = str(fsdp_c.summary(FSDP(net(), auto_wrap_policy=CustomPolicy(settings))))
    assert "SHARD_GRAD_OP over 4" in text and "FULL_SHARD over 4" in text
    assert "float32>bfloat16>float32" in text and "blocks.* (x3)" in text
    assert "last: 0.weight, 0.bias, 1.bias, 1.weight = 0.weight" in text


def test_printing_a_model_shows_its_units_in_the_tree_of_torch() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), auto_wrap_policy=LINEARS)
    assert repr(model).splitlines() == [
        "FullyShardedDataParallel(",
        "  per rank: 12 B of parameters all the time, and about 48 B unsharded at the peak of a training step",
        "  (_fsdp_wrapped_module): Sequential(",
        "    (0): FullyShardedDataParallel(",
        "      module Linear; strategy FULL_SHARD over 4; parameters 12; padding 0; numel in / out 3 / 12; "
        "dtype float32; sharded 12 B; unsharded 48 B; collectives all-gather 48 B, reduce-scatter 48 B; "
        "holds weight, bias",
        "      (_fsdp_wrapped_module): Linear(in_features=3, out_features=3, bias=True)",
        "    )",
        "    (1): ReLU()",
        "  )",
        ")",
    ]


def test_printing_a_unit_whose_construction_failed_still_works() -> None:
    broken = FSDP.__new__(FSDP)
    nn.Module.__init__(broken)
    assert repr(broken) == "FullyShardedDataParallel()"


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    with caplog.at_level(level, logger="fsdp_c"):
        policy = ModuleWrapPolicy({nn.Sequential})
        model = FSDP(net(), process_group=dist.new_group([1, 2]), auto_wrap_policy=policy)
        for _ in range(2):
            model._lazy_init()
    return [record.getMessage() for record in caplog.records if record.name == "fsdp_c"]


def test_the_first_rank_logs_the_units_once_at_lazy_initialisation(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = logged(caplog, logging.INFO)
    assert message.startswith("5 units and segments, ") and "blocks.* (x3)" in message


def test_nothing_is_made_to_be_logged_without_a_listener(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_c.tools.summary.summary", lambda root: pytest.fail("summarised"))
        assert logged(caplog, logging.WARNING) == []


def test_a_model_without_units_and_a_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no FullyShardedDataParallel in it: wrap it first\."):
        fsdp_c.summary(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="expected an nn.Module but got str"):
        fsdp_c.summary("model")  # type: ignore[arg-type]
