"""torchao's and bitsandbytes' 8-bit and 4-bit optimizers on shards: saved, and resumed with the same or a
different layout.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.optim import WholeParameters
from tests.clients.support import require
from tests.ranks import DEFAULT_TIMEOUT_S, PATIENCE, both_views, device, pool
from tests.ranks import on_ranks as on_ranks_of

require("torchao", "bitsandbytes")

LIBRARY = "quantized_optimizers"
WIDTH = 128
pytestmark = pytest.mark.filterwarnings("ignore")
# Largest change by quantization with different blocks, relative to the largest magnitude: measured 0.013,
# 0.034 and 0.113.
WORST = {
    "torchao AdamW8bit": 0.015,
    "torchao AdamW4bit": 0.12,
    "torchao AdamWFp8": 0.04,
    "bitsandbytes AdamW8bit": 0.015,
    "bitsandbytes Lion8bit": 0.015,  # has a single average per parameter, the others have two
}
FORMS = ("full", "full on rank 0", "sharded", "checkpoint")
all_kinds = pytest.mark.parametrize("kind", WORST)
some_kinds = pytest.mark.parametrize("kind", ["torchao AdamW8bit", "bitsandbytes AdamW8bit"])


on_ranks = functools.partial(
    on_ranks_of, label=LIBRARY
)  # torchao's steps are not compiled in these processes


def optimizer_of(kind: str, model: nn.Module, **options: Any) -> Optimizer:
    library, name = kind.split()
    if library == "torchao":
        import torchao.optim as optimizers

        torch.compiler.set_stance("force_eager")  # compiling a step takes seconds and gives the same results
    else:
        import bitsandbytes.optim as optimizers

        if device().type != "cpu" and torch.version.cuda is None:
            pytest.skip("bitsandbytes has no kernels for the simulated GPU")
    made: Optimizer = getattr(optimizers, name)(model.parameters(), lr=0.01, **options)
    return made


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a model. On 2 ranks torchao quantizes nothing of the first block: 14,448 elements are no multiple
    of 256.
    """
    # torchao would create its steps on the default device, but users have them on the CPU
    torch.set_default_device(None)
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh(), nn.Linear(WIDTH, 96, bias=bias))
        for bias in (True, False)
    ]
    return nn.Sequential(blocks[0], nn.Linear(96, WIDTH), blocks[1]).to(dtype)


def wrapped(
    use_orig_params: bool = True, blocks: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    policy = ModuleWrapPolicy({nn.Sequential}) if blocks else None
    return FSDP(
        plain_model(dtype),
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
        device_id=device(),
        **options,
    )


def train(model: nn.Module, optimizer: Optimizer, steps: range, offset: int = 0) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator(device()).manual_seed(100 * step + offset)
        x = torch.randn(8, WIDTH, generator=generator, device=device())
        x = x.to(next(model.parameters()).dtype)
        loss = (model(x) - x[:, :96]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(kind: str, rank: int, *options: Any, **more: Any) -> tuple[Any, Optimizer]:
    model = wrapped(*options, **more)
    optimizer = optimizer_of(kind, model)
    train(model, optimizer, range(3), rank)
    return model, optimizer


def is_quantized(value: object) -> bool:
    return isinstance(value, Tensor) and (hasattr(value, "codes") or value.dtype == torch.uint8)


def raw_state(optimizer: Optimizer) -> list[tuple[int, str, Tensor]]:
    """Return codes, scales and other tensors of the state, by parameter and name."""
    found = []
    for index, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            parts = {"": value}
            if hasattr(value, "codes"):
                parts = {".codes": value.codes, ".scale": value.scale}
            found += [(index, f"{name}{part}", torch.as_tensor(one)) for part, one in parts.items()]
    return found


def assert_same_bits(one: Optimizer, other: Optimizer) -> None:
    ours, theirs = raw_state(one), raw_state(other)
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    for (index, name, value), (_, _, expected) in zip(ours, theirs, strict=True):
        assert value.dtype == expected.dtype, (index, name)
        assert torch.equal(value, expected), (index, name)
    assert any(is_quantized(value) for own in one.state.values() for value in own.values())


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return f"{folder[0]}/checkpoint"


def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


@contextmanager
def state_type(model: Any, form: str) -> Iterator[None]:
    """Set the state dict type of one of FORMS."""
    if form == "sharded":
        configs = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    else:
        on_rank_0 = form == "full on rank 0"
        configs = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=on_rank_0),
        )
    with FSDP.state_dict_type(model, *configs):
        yield


def resume(model: Any, optimizer: Optimizer, other: Any, resumed: Optimizer, form: str) -> dict[str, Any]:
    """Bring values and state to the other model and optimizer, and return the optimizer's state dict."""
    if form == "checkpoint":
        path = shared_folder()
        checkpoint.save(model, optimizer, path, background=True).wait()
        checkpoint.load(other, resumed, path)
        return {}
    with state_type(model, form):
        saved = FSDP.optim_state_dict(model, optimizer)
        weights = model.state_dict()
    with state_type(other, form):
        other.load_state_dict(weights)
        resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, saved))
    return saved


@both_views
@all_kinds
@on_ranks(2)
def test_every_form_resumes_with_the_same_bits(rank: int, kind: str, use_orig_params: bool) -> None:
    averages = ["exp_avg", "exp_avg_sq"] if kind.startswith("torchao") else ["state1", "state2"]
    averages = ["state1"] if "Lion" in kind else averages
    model, optimizer = trained(kind, rank, use_orig_params)
    others = []
    for form in FORMS:
        other = wrapped(use_orig_params)
        resumed = optimizer_of(kind, other)
        if form == "checkpoint":
            train(other, resumed, range(7, 8), rank)  # the load replaces existing state
        saved = resume(model, optimizer, other, resumed, form)
        for name, param in plain_model().named_parameters() if saved else ():
            assert set(saved["state"][name]) == {"step", *averages}
            for key in averages:
                assert saved["state"][name][key].dtype == torch.float32
                assert saved["state"][name][key].shape == param.shape
        assert bool(saved) == (form != "checkpoint" and (form != "full on rank 0" or rank == 0))
        assert_same_bits(resumed, optimizer)
        others.append((other, resumed))
    losses = train(model, optimizer, range(3, 5), rank)
    for other, resumed in others:
        assert train(other, resumed, range(3, 5), rank) == losses
        assert_same_bits(resumed, optimizer)


def write_checkpoint(path: str, kind: str) -> dict[str, Any]:
    model, optimizer = trained(kind, 0)
    checkpoint.save(model, optimizer, path)
    with state_type(model, "full"):
        state = FSDP.optim_state_dict(model, optimizer)["state"]
    return {"state": state, "losses": train(model, optimizer, range(3, 6))}


def check_elsewhere(path: str, kind: str, use_orig_params: bool, expected: dict[str, Any]) -> None:
    model = wrapped(use_orig_params, blocks=False)
    optimizer = optimizer_of(kind, model)
    checkpoint.load(model, optimizer, path)
    with state_type(model, "full"):
        found = FSDP.optim_state_dict(model, optimizer)["state"]
    assert found.keys() == expected["state"].keys()
    for name, own in expected["state"].items():
        assert found[name].keys() == own.keys()
        for key, value in own.items():
            if isinstance(value, Tensor) and value.dim():
                error = (found[name][key] - value).abs().max() / value.abs().max().clamp(min=1e-12)
                assert error <= WORST[kind], (name, key, error)
            else:
                assert found[name][key] == value
    losses = train(model, optimizer, range(3, 6))
    assert losses == pytest.approx(expected["losses"], rel=1e-3)


@both_views
@all_kinds
def test_other_ranks_and_wrapping_resume_within_the_error_of_quantization(
    tmp_path: Path, kind: str, use_orig_params: bool
) -> None:
    def run(world_size: int, body: str, **arguments: Any) -> Any:
        given = {"path": str(tmp_path / "checkpoint"), "kind": kind, **arguments}
        return pool(world_size, LIBRARY).run(__name__, body, given, DEFAULT_TIMEOUT_S * PATIENCE)

    (expected, _) = run(2, "write_checkpoint")
    for world_size in (1, 3):
        run(world_size, "check_elsewhere", use_orig_params=use_orig_params, expected=expected)


@some_kinds
@on_ranks(2)
def test_shards_of_bfloat16_save_float32_on_all_ranks(rank: int, kind: str) -> None:
    """torchao keeps bfloat16 if a rank's shard is no multiple of a block, and quantizes float32 on the other
    rank.
    """
    model, optimizer = trained(kind, rank, True, dtype=torch.bfloat16)
    for form in ("full", "sharded", "checkpoint"):
        other = wrapped(True, dtype=torch.bfloat16)
        resumed = optimizer_of(kind, other)
        resume(model, optimizer, other, resumed, form)
        assert_same_bits(resumed, optimizer)


@both_views
@on_ranks(2)
def test_stochastically_rounded_parameters_resume_in_bfloat16(rank: int, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params, dtype=torch.bfloat16)
    optimizer = optimizer_of("torchao _AdamW", model, bf16_stochastic_round=True)
    train(model, optimizer, range(3), rank)
    other = wrapped(use_orig_params, dtype=torch.bfloat16)
    resumed = optimizer_of("torchao _AdamW", other)
    resume(model, optimizer, other, resumed, "checkpoint")
    for (_, name, value), (_, _, expected) in zip(raw_state(resumed), raw_state(optimizer), strict=True):
        assert value.dtype == (torch.float32 if name == "step" else torch.bfloat16)
        assert torch.equal(value, expected)


@both_views
@some_kinds
@on_ranks(2)
def test_dcp_saves_and_loads_by_get_state_dict(rank: int, kind: str, use_orig_params: bool) -> None:
    with mock.patch("torch.distributed.checkpoint.state_dict.FSDP", FSDP):
        model, optimizer = trained(kind, rank, use_orig_params, device_mesh=mesh())
        weights, state = get_state_dict(model, optimizer)
        path = shared_folder()
        dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
        other = wrapped(use_orig_params, device_mesh=mesh())
        resumed = optimizer_of(kind, other)
        weights, state = get_state_dict(other, resumed)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    assert_same_bits(resumed, optimizer)


@pytest.mark.parametrize("kind", ["torchao AdamW8bit", "bitsandbytes AdamW8bit", "bitsandbytes AdEMAMix8bit"])
@on_ranks(2)
def test_whole_parameters_resume_with_the_same_bits(rank: int, kind: str) -> None:
    def made(model: Any) -> Any:
        def inner(named: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
            return [optimizer_of(kind, nn.ParameterList([param for _, param in named]))]

        return WholeParameters(model, inner)

    model = wrapped(True)
    optimizer = made(model)
    train(model, optimizer, range(3), rank)
    found = []
    for form in ("full", "checkpoint"):
        other = wrapped(True)
        resumed = made(other)
        resume(model, optimizer, other, resumed, form)
        found.append((train(other, resumed, range(3, 4), rank), resumed._inner[0]))
    losses = train(model, optimizer, range(3, 4), rank)
    for of_other, resumed in found:
        assert of_other == losses
        assert_same_bits(resumed, optimizer._inner[0])


@both_views
@on_ranks(2)
def test_state_of_another_tensor_subclass_is_refused_on_all_ranks(rank: int, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    train(model, optimizer, range(1), rank)
    if rank == 1:
        for own in optimizer.state.values():
            own["momentum_buffer"] = TwoTensor(own["momentum_buffer"], own["momentum_buffer"])
    words = r"optimizer state 'momentum_buffer' of \S+ is a TwoTensor.* a separate file"
    with state_type(model, "full"), pytest.raises(ValueError, match=words):
        FSDP.optim_state_dict(model, optimizer)
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=words):
        checkpoint.save(model, optimizer, shared_folder())
