"""``summary``, ``plan``, ``print(model)`` and ``python -m fsdp_c plan``: what they show, and what they
refuse."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c
from fsdp_c import CPUOffload, MixedPrecision, ShardingStrategy, cli
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.collectives import fake_ranks

WORLD_SIZE = 4
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
LINEARS = ModuleWrapPolicy({nn.Linear})
ROOT = Path(__file__).resolve().parents[2]


_group = fake_ranks(1, WORLD_SIZE)


class Net(nn.Module):
    """Odd sizes, a norm that mixed precision leaves out, a tied weight, a checkpointed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3)
        )
        self.last = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
        self.last[1].weight = self.last[0].weight


# ----------------------------------------------------------------- a plan is what wrapping makes


def policy_of_settings(module: nn.Module) -> bool | dict[str, Any]:
    """Other settings for some units: another strategy, another precision."""
    if isinstance(module, nn.Sequential):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": BF16}
    return isinstance(module, nn.BatchNorm1d)


SETTINGS: dict[str, dict[str, Any]] = {
    "one unit": {},
    "classes": {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "use_orig_params": True},
    "nested classes": {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential, nn.ModuleList, nn.BatchNorm1d})},
    "size": {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=40)},
    "size in bf16": {
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=40),
        "mixed_precision": BF16,
    },
    "classes in bf16": {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "mixed_precision": BF16},
    "settings by unit": {"auto_wrap_policy": CustomPolicy(policy_of_settings), "forward_prefetch": True},
    "offloaded": {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "cpu_offload": CPUOffload(True)},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_plan_equals_the_summary_of_what_is_wrapped(name: str) -> None:
    planned = fsdp_c.plan(Net(), world_size=WORLD_SIZE, **SETTINGS[name])
    assert fsdp_c.summary(FSDP(Net(), **SETTINGS[name])) == planned
    assert len(planned.units) > 1 or name == "one unit"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hybrid_plan_equals_the_summary_of_what_is_wrapped() -> None:
    hybrid, mesh = ShardingStrategy.HYBRID_SHARD, init_device_mesh("cpu", (2, 2))
    planned = fsdp_c.plan(Net(), world_size=4, strategy=hybrid, ranks_per_node=2)
    assert fsdp_c.summary(FSDP(Net(), sharding_strategy=hybrid, device_mesh=mesh)) == planned
    (unit,) = planned.units
    assert (unit.shards, unit.replicas) == (2, 2)
    assert unit.all_reduce_nbytes == unit.sharded_nbytes == unit.all_gather_nbytes / 2 > 0


def net_of_segments(frozen_in_front: bool) -> nn.Module:
    net = Net()
    net.blocks[1][0].requires_grad_(False)
    net.blocks[2].double()
    net.first.requires_grad_(not frozen_in_front)
    net.order = nn.Parameter(torch.arange(9), requires_grad=False)
    return net


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("frozen_in_front", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_plan_knows_segments(name: str, frozen_in_front: bool) -> None:
    planned = fsdp_c.plan(net_of_segments(frozen_in_front), world_size=WORLD_SIZE, **SETTINGS[name])
    assert fsdp_c.summary(FSDP(net_of_segments(frozen_in_front), **SETTINGS[name])) == planned
    segments = [unit for unit in planned.units if unit.is_segment]
    assert segments and all(planned.units[unit.parent].path == unit.path for unit in segments)
    assert "segment" in str(planned)
    for unit, count in zip(planned.units, planned.all_gathers, strict=True):
        assert count == (planned.all_gathers[unit.parent] if unit.is_segment else count)
    assert planned.units[0].dtype == torch.float32 and all(
        not unit.is_trainable or unit.dtype for unit in segments
    )


def test_ignored_states_are_left_out() -> None:
    net = Net()
    planned = fsdp_c.plan(net, world_size=4, ignored_states=[net.norm, net.last])
    assert not any(name.startswith(("norm", "last")) for name in planned.units[0].fqns)
    assert fsdp_c.summary(FSDP(net, ignored_states=[net.norm, net.last])) == planned


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_planning_changes_nothing() -> None:
    net = Net()
    tensors = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    attributes = {module: {**vars(module)} for module in net.modules()}
    for settings in SETTINGS.values():
        fsdp_c.plan(net, world_size=8, **settings)
    assert {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()} == tensors
    assert {module: {**vars(module)} for module in net.modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


# ----------------------------------------------------------------- numbers


def test_sizes_of_a_large_world_in_numbers() -> None:
    """Counted by hand: 10 x 10 + 10 elements, aligned to 8 of bfloat16, padded to 64 ranks."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(10, 10))
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = fsdp_c.plan(net, world_size=64, mixed_precision=precision, use_orig_params=True)
    (unit,) = whole.units
    assert (unit.numel, unit.padded_numel, unit.padding, unit.shard_numel) == (110, 128, 18, 2)
    assert (unit.fqns, unit.path, unit.module) == (("0.weight", "0.bias"), "", "Sequential")
    assert (unit.sharded_nbytes, unit.unsharded_nbytes) == (8, 256)
    assert (unit.all_gather_nbytes, unit.reduce_scatter_nbytes, unit.all_reduce_nbytes) == (256, 512, 0)
    assert (whole.peak_unsharded_nbytes, whole.all_gathers, whole.all_gather_nbytes) == (256, (1,), 256)


def test_on_a_gpu_the_unit_freed_last_in_forward_is_held_back() -> None:
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    peaks, gathers = {}, set()
    for device_type, ahead in itertools.product(("cpu", "cuda"), (False, True)):
        whole = fsdp_c.plan(
            net, world_size=2, auto_wrap_policy=LINEARS, device_type=device_type, forward_prefetch=ahead
        )
        peaks[device_type, ahead] = whole.peak_unsharded_nbytes / whole.units[1].unsharded_nbytes
        gathers.add(whole.all_gathers)
    # The root has nothing of its own, and one is gathered ahead in backward, where none is held back then.
    assert peaks == {("cpu", False): 2, ("cpu", True): 2, ("cuda", False): 2, ("cuda", True): 3}
    assert len(gathers) == 1


def test_limits_are_those_of_the_root_before_and_after_the_first_step() -> None:
    limits = {"backward_prefetch_limit": 3, "forward_prefetch_limit": 2}
    planned = fsdp_c.plan(Net(), world_size=WORLD_SIZE, auto_wrap_policy=LINEARS, **limits)
    model = FSDP(Net(), auto_wrap_policy=LINEARS)
    model._exec_order_data._backward_prefetch_limit = 3
    model._exec_order_data._forward_prefetch_limit = 2
    assert fsdp_c.summary(model) == planned
    model._lazy_init()
    assert fsdp_c.summary(model) == planned


def test_more_is_held_where_more_is_gathered_ahead() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    settings = {"world_size": 2, "auto_wrap_policy": LINEARS, "forward_prefetch": True}
    unit_nbytes = 4 * 8 * 8
    for limit in range(4):
        forward = fsdp_c.plan(net, **settings, backward_prefetch=None, forward_prefetch_limit=limit)
        backward = fsdp_c.plan(net, **settings, backward_prefetch_limit=limit, forward_prefetch_limit=0)
        for planned in (forward, backward):
            assert planned.peak_unsharded_nbytes == (1 + limit) * unit_nbytes


def test_blocks_of_the_allocator_are_counted_where_the_ranks_compute_on_a_gpu() -> None:
    """By hand: 12 MB, cut of a larger piece, and 100 B take whole 512."""
    net = nn.Sequential(nn.Linear(3000, 1000, bias=False), nn.Linear(5, 5, bias=False))
    settings = {"world_size": 2, "auto_wrap_policy": LINEARS}
    on_gpu = fsdp_c.plan(net, device_type="cuda", **settings)
    assert on_gpu.peak_unsharded_nbytes == 12_000_000 + 4 * 26  # padded to two ranks
    assert on_gpu.peak_allocated_nbytes == 12_000_256 + 512
    on_cpu = fsdp_c.plan(net, device_type="cpu", **settings)
    assert on_cpu.peak_allocated_nbytes == on_cpu.peak_unsharded_nbytes


def test_under_no_sync_a_unit_that_stays_gathered_adds_to_those_that_come_and_go() -> None:
    """The last layer is freed before the others are gathered for their backward, unless under no_sync."""
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    keeps = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = CustomPolicy(lambda module: keeps if module is net[2] else isinstance(module, nn.Linear))
    planned = fsdp_c.plan(net, world_size=2, auto_wrap_policy=policy, device_type="cpu")
    unit_nbytes = 4 * 8 * 8
    assert (planned.peak_allocated_nbytes, planned.no_sync_peak_allocated_nbytes) == (
        2 * unit_nbytes,
        3 * unit_nbytes,
    )
    assert "at most 512 B unsharded in a training step, or 768 B where gradients are accumulated" in str(
        planned
    )
    usual = fsdp_c.plan(net, world_size=2, auto_wrap_policy=LINEARS, device_type="cpu")
    assert "accumulated" not in str(usual)


def test_one_rank_gathers_nothing() -> None:
    whole = fsdp_c.plan(nn.Linear(10, 10), world_size=1)
    assert whole.units[0].sharding_strategy is ShardingStrategy.NO_SHARD
    assert (whole.sharded_nbytes, whole.peak_unsharded_nbytes, whole.all_gather_nbytes) == (440, 0, 0)
    assert whole.units[0].all_reduce_nbytes == 0


def test_plan_of_two_thousand_ranks_and_a_thousand_units_is_quick() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(100, 100) for _ in range(1000)))
    whole = fsdp_c.plan(net, world_size=2048, auto_wrap_policy=LINEARS, use_orig_params=True)
    assert len(whole.units) == 1001
    # the root has nothing of its own
    assert whole.peak_unsharded_nbytes == 2 * 4 * whole.units[1].padded_numel
    assert len(str(whole).splitlines()) < 15  # units that are alike are one line


def test_hint_names_what_a_step_waits_for_at_its_start_and_end() -> None:
    def planned(head: int, **settings: Any) -> fsdp_c.Summary:
        blocks = [nn.Sequential(nn.Linear(6000, 6000, device="meta")) for _ in range(3)]
        net = nn.Sequential(*blocks, nn.Linear(6000, head, bias=False, device="meta"))
        return fsdp_c.plan(net, world_size=8, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **settings)

    hint = planned(32000).hint
    assert hint is not None and hint.startswith(
        "732.4 MiB are in the outermost unit (3.weight): a step waits"
    )
    assert "wrap the largest layers" in hint and "hint: 732.4 MiB" in str(planned(32000))
    assert planned(10000).hint is None  # as long as the others, about
    assert planned(32000, strategy=ShardingStrategy.NO_SHARD).hint is None


def test_hint_says_that_low_precision_loses_updates() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.bfloat16)
    hint = fsdp_c.plan(net, world_size=2).hint
    assert hint is not None and hint.startswith(
        "what 1 unit train is kept in torch.bfloat16: updates below about a 256th"
    )
    assert "Wrap the model in float32" in hint and "param_dtype=torch.bfloat16)" in hint
    assert fsdp_c.plan(net.requires_grad_(False), world_size=2).hint is None


def test_hint_counts_small_units_and_says_how_many_belong_together() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        large = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))
    hint = fsdp_c.plan(net, world_size=8, auto_wrap_policy=LINEARS).hint
    assert (
        hint is not None
        and hint.startswith("4 of 5 units have fewer than 33,554,432")
        and "about 2 of them" in hint
    )
    assert fsdp_c.plan(large, world_size=8, auto_wrap_policy=LINEARS).hint is None
    assert fsdp_c.plan(net, world_size=1, auto_wrap_policy=LINEARS).hint is None


# ----------------------------------------------------------------- text


def test_table_shows_units_names_sizes_and_memory() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    whole = fsdp_c.plan(net, world_size=2, auto_wrap_policy=LINEARS)
    assert [line.rstrip() for line in str(whole).splitlines()[:8]] == [
        "3 units, 160 parameters, FULL_SHARD over 2 ranks",
        "",
        "unit    module      parameters  padding  dtype    sharded  unsharded  collectives",
        "(root)  Sequential          16        0  float32     32 B       64 B  gather 64 B, scatter 64 B",
        "* (x2)  Linear              72        0  float32    144 B      288 B  gather 288 B, scatter 288 B",
        "",
        "(root): 2.weight, 2.bias",
        "* (x2): weight, bias",
    ]
    assert (
        "per rank: 320 B of parameters all the time, and at most 640 B unsharded in a training step"
        in str(whole)
    )
    assert (
        "a save in the background holds 960 B of host memory per rank, with Adam's state"
        in str(whole).splitlines()
    )
    assert "per step: 5 all-gathers, 1.2 KiB on each rank" in str(whole)
    computed = fsdp_c.plan(net, world_size=2, auto_wrap_policy=LINEARS, mixed_precision=BF16)
    assert "kept>computed>reduced" in str(computed) and "float32>bfloat16>bfloat16" in str(computed)


def test_a_save_in_the_background_copies_shards_and_of_those_that_are_trained_the_state() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    whole = fsdp_c.plan(net, world_size=2, auto_wrap_policy=LINEARS)
    assert whole.background_save_nbytes == 144 * 3 + 144


def test_units_of_several_strategies_say_theirs() -> None:
    whole = fsdp_c.plan(Net(), world_size=4, auto_wrap_policy=CustomPolicy(policy_of_settings))
    assert "SHARD_GRAD_OP over 4 ranks" in str(whole) and "FULL_SHARD over 4 ranks" in str(whole)
    assert "blocks.* (x3)" in str(whole)


def test_printing_a_model_shows_its_units_in_the_tree_of_torch() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), auto_wrap_policy=LINEARS)
    assert repr(model).splitlines() == [
        "FullyShardedDataParallel(",
        "  per rank: 12 B of parameters all the time, and at most 48 B unsharded in a training step",
        "  (_fsdp_wrapped_module): Sequential(",
        "    (0): FullyShardedDataParallel(",
        "      FULL_SHARD over 4 ranks: 12 elements and 0 of padding in float32; 12 B per rank, 48 B "
        "unsharded",
        "      holds weight, bias",
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


def test_summary_of_several_trees_and_of_an_inner_unit() -> None:
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


# ----------------------------------------------------------------- logging


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    with caplog.at_level(level, logger="fsdp_c"):
        model = FSDP(
            Net(), process_group=dist.new_group([1, 2]), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})
        )
        for _ in range(2):
            model._lazy_init()
    return [record.getMessage() for record in caplog.records if record.name == "fsdp_c"]


def test_first_rank_logs_the_units_once_at_lazy_initialisation(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = logged(caplog, logging.INFO)
    assert message.startswith("5 units, ") and "blocks.* (x3)" in message


def test_nothing_is_made_to_be_logged_without_a_listener(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_c.tools.summary.summary", lambda root: pytest.fail("summarised"))
        assert logged(caplog, logging.WARNING) == []


# ----------------------------------------------------------------- what is refused


AS_WRAPPING = {
    "scalar": (lambda: nn.ParameterList([nn.Parameter(torch.tensor(1.0))]), {}),
    "complex": (lambda: nn.ParameterList([nn.Parameter(torch.ones(3).to(torch.cfloat))]), {}),
    "both ignored": (lambda: nn.Linear(3, 3), {"ignored_modules": [], "ignored_states": []}),
    "policy": (lambda: nn.Linear(3, 3), {"auto_wrap_policy": {nn.Linear}}),
    "a class as policy": (lambda: nn.Linear(3, 3), {"auto_wrap_policy": nn.Linear}),
    "precision": (lambda: nn.Linear(3, 3), {"mixed_precision": torch.bfloat16}),
    "no module": (lambda: [nn.Linear(3, 3)], {}),
    "a class": (lambda: nn.Linear, {}),
}


@pytest.mark.parametrize("name", AS_WRAPPING)
def test_plan_refuses_what_wrapping_refuses_in_the_same_words(name: str) -> None:
    build, settings = AS_WRAPPING[name]
    with pytest.raises((TypeError, ValueError)) as of_wrapping:
        FSDP(build(), **settings)
    with pytest.raises(of_wrapping.type) as of_plan:
        fsdp_c.plan(build(), world_size=4, **settings)
    assert _names(of_plan) == _names(of_wrapping)


def _names(caught: pytest.ExceptionInfo[Exception]) -> list[str]:
    """The words of a message in any order: which of two units comes first is not the same."""
    return sorted(re.findall(r"[\w.]+", str(caught.value)))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no units": (lambda: fsdp_c.summary(nn.Linear(3, 3)), ValueError, "wrap it first, or ask fsdp_c.plan"),
    "no module": (lambda: fsdp_c.summary("model"), TypeError, "expected an nn.Module but got str"),
    "wrapped": (lambda: fsdp_c.plan(FSDP(nn.Linear(3, 3)), world_size=4), ValueError, "ask fsdp_c.summary"),
    "world": (lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=0), ValueError, "at least 1, not 0"),
    "text": (lambda: fsdp_c.plan(nn.Linear(3, 3), world_size="8"), TypeError, "number of ranks, not str '8'"),
    "strategy": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, strategy="FULL_SHARD"),
        TypeError,
        "must be a ShardingStrategy or None, not str 'FULL_SHARD': pass for instance "
        "ShardingStrategy.FULL_SHARD",
    ),
    "limit": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, backward_prefetch_limit=-1),
        ValueError,
        "backward_prefetch_limit must be at least 0, not -1",
    ),
    "a limit in words": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, forward_prefetch_limit="two"),
        TypeError,
        "forward_prefetch_limit must be a number of units, not str 'two'",
    ),
    "offload": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, cpu_offload=True),
        TypeError,
        "CPUOffload",
    ),
    "hybrid": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, strategy=ShardingStrategy.HYBRID_SHARD),
        ValueError,
        "pass ranks_per_node",
    ),
    "uneven nodes": (
        lambda: fsdp_c.plan(
            nn.Linear(3, 3), world_size=4, strategy=ShardingStrategy.HYBRID_SHARD, ranks_per_node=3
        ),
        ValueError,
        "4 ranks do not fill nodes of 3",
    ),
    "uneven nodes of a backward": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, reshard_after_forward=3),
        ValueError,
        "the 4 ranks that share a unit do not fill nodes of 3",
    ),
    "nodes of one rank": (
        lambda: fsdp_c.plan(nn.Linear(3, 3), world_size=4, reshard_after_forward=1),
        ValueError,
        "takes at least 2 ranks, not 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_summarised_or_planned_is_refused(name: str) -> None:
    attempt, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attempt()


# ----------------------------------------------------------------- the command


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


MODEL = "plain_torchrun:build_model"
FLAGS = [
    "--world-size",
    "8",
    "--wrap",
    "TransformerEncoderLayer",
    "--param-dtype",
    "bfloat16",
    "--use-orig-params",
]


@pytest.mark.usefixtures("in_examples")
def test_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    import plain_torchrun

    assert cli.main(["plan", MODEL, *FLAGS]) == 0
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    settings = {"auto_wrap_policy": policy, "mixed_precision": BF16, "use_orig_params": True}
    planned = fsdp_c.plan(plain_torchrun.build_model(), world_size=8, **settings)
    assert capsys.readouterr().out == f"{planned}\n"
    assert len(planned.units) == 4


@pytest.mark.usefixtures("in_examples")
def test_command_takes_what_changes_the_memory_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    import plain_torchrun

    limits = [
        "--backward-prefetch-limit",
        "2",
        "--forward-prefetch",
        "--forward-prefetch-limit",
        "3",
        "--cpu-offload",
    ]
    limits += ["--reshard-after-forward", "4"]
    assert cli.main(["plan", MODEL, *FLAGS[:4], "--device", "cuda", *limits]) == 0
    planned = fsdp_c.plan(
        plain_torchrun.build_model(),
        world_size=8,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        device_type="cuda",
        backward_prefetch_limit=2,
        forward_prefetch=True,
        forward_prefetch_limit=3,
        cpu_offload=CPUOffload(True),
        reshard_after_forward=4,
    )
    assert planned.node_gather_nbytes > 0
    assert capsys.readouterr().out == f"{planned}\n"


BAD_COMMANDS = {
    "no world size": ([MODEL], "arguments are required: --world-size"),
    "no model": (["--world-size", "8"], "arguments are required: MODULE:CALLABLE"),
    "an unknown flag": ([MODEL, *FLAGS, "--fast"], "unrecognized arguments: --fast"),
    "a number of ranks": ([MODEL, "--world-size", "0"], "world_size must be at least 1, not 0"),
    "no number": ([MODEL, "--world-size", "many"], "invalid int value: 'many'"),
    "no callable": (["plain_torchrun", "--world-size", "8"], "'plain_torchrun' is not MODULE:CALLABLE"),
    "no module": (["nowhere:Net", "--world-size", "8"], "no module 'nowhere' here"),
    "no such name": (["plain_torchrun:Net", "--world-size", "8"], "has no attribute 'Net'"),
    "a number": (["plain_torchrun:WIDTH", "--world-size", "8"], "WIDTH is int, which cannot be called"),
    "no module returned": (
        ["builtins:dict", "--world-size", "8"],
        "should return an nn.Module, but returned dict",
    ),
    "a class": (
        [MODEL, *FLAGS, "--wrap", "Block"],
        "--wrap Block: no module of that class, there are Dropout",
    ),
    "two policies": ([MODEL, *FLAGS, "--min-numel", "9"], "not allowed with argument --wrap"),
    "a strategy": ([MODEL, *FLAGS, "--strategy", "ddp"], "invalid choice: 'ddp'"),
    "hybrid": ([MODEL, *FLAGS, "--strategy", "hybrid_shard"], "pass ranks_per_node"),
}


@pytest.mark.usefixtures("in_examples")
@pytest.mark.parametrize("what", BAD_COMMANDS)
def test_bad_command_ends_with_its_reason_and_status_2(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, reason = BAD_COMMANDS[what]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    assert ended.value.code == 2
    assert re.match(f"python -m fsdp_c plan: error: .*{reason}", capsys.readouterr().err.splitlines()[-1])
