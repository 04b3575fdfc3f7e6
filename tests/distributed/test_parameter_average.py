"""fsdp_c.optim.ParameterAverage: the values of AveragedModel over the plain model, from shards alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from fsdp_c.optim import ParameterAverage
from tests.distributed.test_hybrid import groups
from tests.models import WIDTH, Block, Net
from tests.ranks import all_strategies, both_views, device, on_ranks

LARGE = 600  # width of a matrix above 1 MiB


class Mixed(nn.Module):
    """Units, a large matrix, tied weights, buffers, and a parameter that no unit manages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.into, self.out = nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, LARGE, bias=False)
        self.again = nn.Linear(LARGE, LARGE, bias=False)
        self.again.weight = self.out.weight
        self.norm = nn.BatchNorm1d(LARGE)
        self.apart = nn.Linear(LARGE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(self.net(x)))
        result: Tensor = self.apart(self.again(self.out(x)))
        return result


def wrapped(plain: nn.Module, **options: Any) -> FSDP:
    model = copy.deepcopy(plain)
    ignored = [model.apart] if isinstance(model, Mixed) else None
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_states=ignored,
        device_id=device(),
        **options,
    )


def train(model: nn.Module, averages: list[Any], steps: range = range(4)) -> Iterator[int]:
    """Steps that change each element alike, whichever rank has it."""
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator(device()).manual_seed(step), device=device())
        with torch.no_grad():
            model(x.to(next(model.parameters()).dtype))  # buffers move
            for param in model.parameters():
                param.mul_(1.0 + 0.1 * (step + 1)).sub_(0.01)
        for average in averages:
            average.update() if isinstance(average, ParameterAverage) else average.update_parameters(model)
        yield step


def averaged(plain: nn.Module, decay: float | None, use_buffers: bool = False) -> AveragedModel:
    function = None if decay is None else get_ema_multi_avg_fn(decay)
    return AveragedModel(plain, multi_avg_fn=function, use_buffers=use_buffers)


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.device), value), name


@pytest.mark.parametrize("use_buffers", [False, True], ids=["buffers kept", "buffers averaged"])
@pytest.mark.parametrize("decay", [0.9, None])
@both_views
@all_strategies
@on_ranks(2)
def test_average_is_that_of_averaged_model(
    strategy: str, use_orig_params: bool, decay: float | None, use_buffers: bool
) -> None:
    torch.manual_seed(1)
    plain = Mixed().to(device())
    model = wrapped(plain, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
    average, expected = ParameterAverage(model, decay, use_buffers=use_buffers), None
    expected = averaged(plain, decay, use_buffers)
    if device().type == "cuda" and decay is None and use_buffers:
        with pytest.raises(RuntimeError, match="Integer division"):  # torch's own fails there
            list(train(plain, [expected]))
        return
    for _ in zip(train(plain, [expected]), train(model, [average]), strict=True):
        pass
    equal(average.state_dict(), expected.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, WIDTH, generator=torch.Generator(device()).manual_seed(9), device=device())
    with average.shown():
        shown = {name: value.clone() for name, value in model.state_dict().items()}
        model.eval(), expected.eval()
        with torch.no_grad():
            assert torch.equal(model(x), expected(x))
        model.train()
    equal(
        {f"module.{name}": value for name, value in shown.items()},
        dict(expected.module.named_parameters(prefix="module", remove_duplicate=False))
        | {f"module.{name}": value for name, value in expected.module.named_buffers()},
    )
    equal(model.state_dict(), before)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_state_dict_goes_on_in_another_wrapping(kind: str) -> None:
    torch.manual_seed(1)
    plain = Mixed().to(device())
    model, expected = wrapped(plain, use_orig_params=True), averaged(plain, 0.9, True)
    average = ParameterAverage(model, 0.9, use_buffers=True)
    for _ in zip(train(plain, [expected]), train(model, [average]), strict=True):
        pass
    FSDP.set_state_dict_type(model, StateDictType[kind])
    saved = average.state_dict()
    other = wrapped(plain, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    FSDP.set_state_dict_type(other, StateDictType[kind])
    resumed = ParameterAverage(other, 0.9, use_buffers=True)
    resumed.load_state_dict(saved)
    assert resumed.n_averaged == 4
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    equal(resumed.state_dict(), expected.state_dict())


@on_ranks(2)
def test_state_dict_of_averaged_model_is_loaded() -> None:
    torch.manual_seed(1)
    plain = Mixed().to(device())
    expected = averaged(plain, None)
    list(train(plain, [expected]))
    average = ParameterAverage(wrapped(plain), None)
    average.load_state_dict(copy.deepcopy(expected.state_dict()))
    equal(average.state_dict(), expected.state_dict())
    lacking = {name: value for name, value in expected.state_dict().items() if "out" not in name}
    with pytest.raises(KeyError, match=r"lacks \['module.out.weight'\]"):
        average.load_state_dict(lacking)
    with pytest.raises(ValueError, match="apart.bias|of shape"):
        average.load_state_dict({**expected.state_dict(), "module.apart.bias": torch.zeros(7)})
    equal(average.state_dict(), expected.state_dict())


@on_ranks(2)
def test_parameters_that_share_a_tensor_outside_units_have_one_average() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device())
    plain[2].weight = plain[1].weight
    model = copy.deepcopy(plain)
    model[0] = FSDP(model[0], device_id=device())
    expected, average = averaged(plain, 0.9), ParameterAverage(model, 0.9)
    for _ in zip(train(plain, [expected]), train(model, [average]), strict=True):
        pass
    equal(average.state_dict(), expected.state_dict())
    other = ParameterAverage(model, 0.9)
    other.load_state_dict(average.state_dict())
    equal(other.state_dict(), expected.state_dict())
    with average.shown():
        shown = model[1].weight.detach().clone()
    assert torch.equal(shown, expected.module[1].weight)


@pytest.mark.parametrize("kept_on", [None, "cpu"])
@on_ranks(2)
def test_small_changes_of_16_bits_are_kept_in_32(kept_on: str | None) -> None:
    torch.manual_seed(1)
    plain = Mixed().to(device(), torch.bfloat16)
    model = wrapped(plain, use_orig_params=True)
    average = ParameterAverage(model, 0.999, dtype=torch.float32, device=kept_on)
    expected: dict[str, Tensor] = {}
    for step in range(5):
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                param.mul_(1.25)
        average.update()
        for name, param in plain.named_parameters(remove_duplicate=False):
            now = param.detach().float().cpu()
            expected[name] = now if step == 0 else expected[name].lerp(now, 1 - 0.999)
    saved = average.state_dict()
    before = [param.clone() for param in model.parameters()]
    for name, value in expected.items():
        assert torch.equal(saved[f"module.{name}"].cpu(), value), name
    with average.shown():
        for name, value in model.state_dict().items():
            if name in expected:
                assert torch.equal(value.cpu(), expected[name].bfloat16()), name
    assert all(map(torch.equal, before, model.parameters()))
    equal(average.state_dict(), saved)


@pytest.mark.parametrize("option", ["hybrid", "mixed precision", "offload"])
@on_ranks(4)
def test_average_under_further_options(option: str) -> None:
    torch.manual_seed(1)
    options: dict[str, dict[str, Any]] = {
        "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups(2, 2)},
        "mixed precision": {"mixed_precision": MixedPrecision(torch.bfloat16), "use_orig_params": True},
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    }
    plain = Net().to(device())
    model = wrapped(plain, **options[option])
    average, expected = ParameterAverage(model, 0.9), averaged(plain, 0.9)
    for _ in zip(train(plain, [expected]), train(model, [average]), strict=True):
        pass
    equal(average.state_dict(), expected.state_dict())


@on_ranks(2)
def test_training_and_averages_are_kept_apart() -> None:
    torch.manual_seed(1)
    model = wrapped(Mixed().to(device()), use_orig_params=True)
    average = ParameterAverage(model, 0.5)
    with pytest.raises(RuntimeError, match="no average before the first update"), average.shown():
        pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH, device=device())
    start = copy.deepcopy(model.state_dict())
    losses: list[list[float]] = []
    for look in (False, True):  # what is computed does not depend on a look at the average
        model.load_state_dict(start)
        losses.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            losses[-1].append(loss.item())
            if look:
                with average.shown(), torch.no_grad():
                    model.eval()(x)
                    model.train()
                with pytest.raises(KeyError, match="user's"), average.shown():
                    raise KeyError("user's")
    assert losses[0] == losses[1]
    hook = model.net.register_forward_hook(lambda *_: average.update())
    with pytest.raises(AssertionError, match="during forward or backward"):
        model(x)
    hook.remove()
    with average.shown():
        for wrong in (average.update, average.state_dict, lambda: average.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"inside shown\(\)"):
                wrong()


@on_ranks(2)
def test_what_cannot_be_averaged_is_refused_in_words() -> None:
    model = wrapped(Net().to(device()))
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        ParameterAverage(model, 1.5)
    with pytest.raises(ValueError, match="Net has no FullyShardedDataParallel"):
        ParameterAverage(Net())
    with pytest.raises(ValueError, match="of floating point, not torch.int64"):
        ParameterAverage(model, dtype=torch.int64)
    average = ParameterAverage(model)
    with pytest.raises(RuntimeError, match=r"Expected state_dict_config of type .*ShardedStateDictConfig"):
        FSDP.set_state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig(rank0_only=True)
        )
    model.module.head.register_parameter("late", nn.Parameter(torch.zeros(1, device=device())))
    with pytest.raises(RuntimeError, match=r"\['head.late'\] came or went"):
        average.update()


@on_ranks(2)
def test_what_takes_the_place_of_an_unmanaged_module_is_averaged() -> None:
    model = nn.Sequential(wrapped(Net().to(device())), nn.BatchNorm1d(3).to(device()))
    average = ParameterAverage(model, 0.5, use_buffers=True)
    for value in (1.0, 3.0):
        model[1] = nn.BatchNorm1d(3).to(device())
        for tensor in (model[1].weight, model[1].running_mean):
            tensor.data.fill_(value)
        average.update()
    others = average.held()[1]
    assert others["1.weight"].tolist() == others["1.running_mean"].tolist() == [2.0] * 3
    model[1].register_buffer("late", torch.zeros(1, device=device()))
    with pytest.raises(RuntimeError, match=r"\['1.late'\] came or went"):
        average.update()


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@on_ranks(2)
def test_checkpoint_has_averages_for_another_wrapping(background: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Mixed().to(device(), torch.bfloat16)
    model = wrapped(plain, use_orig_params=True)
    averages = {
        "ema": ParameterAverage(model, 0.9, dtype=torch.float32, use_buffers=True),
        "mean": ParameterAverage(model, None),
    }
    list(train(model, list(averages.values())))
    expected = {name: average.state_dict() for name, average in averages.items()}
    handle = checkpoint.save(model, None, tmp_path / "saved", averages=averages, background=background)
    list(train(model, list(averages.values())))  # goes on beside it
    if background:
        handle.wait()

    other = wrapped(plain, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    resumed = {
        "ema": ParameterAverage(other, 0.9, dtype=torch.float32, use_buffers=True),
        "mean": ParameterAverage(other, None),
    }
    checkpoint.load(other, None, tmp_path / "saved", averages=resumed)
    for name, average in resumed.items():
        equal(average.state_dict(), expected[name])
        assert average.n_averaged == 4
    before = resumed["mean"].state_dict()
    with pytest.raises(CheckpointError, match=r"averages.other.n_averaged is missing"):
        checkpoint.load(other, None, tmp_path / "saved", averages={"other": resumed["mean"]})
    equal(resumed["mean"].state_dict(), before)
    checkpoint.load(other, None, tmp_path / "saved")  # who wants none of them has none
