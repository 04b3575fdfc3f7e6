"""Units with parameters of several dtypes, or frozen and trained ones: one flat parameter for each kind.

torch's FSDP1 refuses some of these units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision, StateDictType
from fsdp_c.wrap import ModuleWrapPolicy, split_frozen
from tests.distributed.test_collectives import calls
from tests.ranks import both_views, device, on_ranks
from tests.training import assert_same, average_gradients, full_state, wrap

WIDTH, RANK = 12, 3


class Packed(nn.Parameter):
    """A frozen parameter of a quantiser: two numbers in a byte, and how to read them as an attribute."""

    quant_state: dict[str, Any]

    def __new__(cls, data: Tensor, quant_state: dict[str, Any]) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        data = torch.randint(0, 256, (WIDTH * WIDTH // 2, 1), dtype=torch.uint8)
        self.weight = Packed(data, {"scale": 0.05, "shape": (WIDTH, WIDTH)})
        self.used = nn.Parameter(torch.rand(WIDTH) > 0.2, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH).to(torch.int16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        packed = self.weight.view(-1).as_subclass(Tensor)  # type: ignore[arg-type]
        weight = torch.stack([packed & 15, packed >> 4], -1).view(state["shape"]).to(x.dtype) - 7.5
        return nn.functional.linear(x, weight * state["scale"])[:, self.order.long()] * self.used


class Block(nn.Module):
    """A base that is frozen, an adapter, a norm."""

    def __init__(self, base: nn.Module, adapter_dtype: torch.dtype, trained: bool = False) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, RANK, bias=False, dtype=adapter_dtype)
        self.up = nn.Linear(RANK, WIDTH, bias=False, dtype=adapter_dtype)
        self.norm = nn.LayerNorm(WIDTH)
        self.base.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        inner = x.to(self.down.weight.dtype)
        adapted = self.base(x if isinstance(self.base, PackedLinear) else x.to(self.base.weight.dtype))
        both = adapted.to(x.dtype) + self.up(torch.tanh(self.down(inner))).to(x.dtype)
        return x + self.norm(both.to(self.norm.weight.dtype)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, block: Callable[[], Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(3)))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# a block, and its flat parameters under split_frozen()
KINDS: dict[str, tuple[Callable[[], Block], int]] = {
    "lora": (lambda: Block(linear(), torch.float32), 2),
    "two dtypes": (lambda: Block(linear(), torch.float64, trained=True), 2),
    "quantised": (lambda: Block(PackedLinear(), torch.float64), 5),
    "qlora": (lambda: Block(PackedLinear(), torch.bfloat16), 5),
    "frozen dtypes": (lambda: Block(linear(), torch.float64).requires_grad_(False), 2),
}


def plain(kind: str) -> Model:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Model(KINDS[kind][0])
    return model.to(device())


def wrapped(kind: str, use_orig_params: bool, split: bool = True, **arguments: Any) -> FSDP:
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Block})} | arguments
    with split_frozen() if split else nullcontext():
        return wrap(plain(kind), use_orig_params=use_orig_params, **arguments)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, device="cpu").to(device())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=0.05)


def train(model: nn.Module, rank: int, steps: int = 3, start: int = 0, optimizer: Any = None) -> Any:
    optimizer = optimizer or optimizer_of(model)
    for step in range(start, start + steps):
        model(batch(rank, step)).square().mean().backward()
        if not isinstance(model, FSDP):
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# ----------------------------------------------------------------- training


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(2)
def test_frozen_parts_apart_change_no_bit(rank: int, low: torch.dtype) -> None:
    precision = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
    model = wrapped("lora", True, mixed_precision=precision)
    together = wrapped("lora", True, mixed_precision=precision, split=False)
    assert len(model.blocks[0].params) == 2 and len(together.blocks[0].params) == 1
    train(model, rank)
    train(together, rank)
    assert_same(full_state(model), full_state(together))


@both_views
@on_ranks(2)
def test_integers_are_never_cast(rank: int, use_orig_params: bool) -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    model, reference = wrapped("quantised", use_orig_params, mixed_precision=precision), plain("quantised")
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, _: object) -> None:
        seen.update(tensor.dtype for tensor in (module.weight, module.used, module.order))
        assert type(module.weight) is Packed and module.weight.quant_state["scale"] == 0.05

    for block in model.blocks:
        block.module.base.register_forward_pre_hook(look)
    train(model, rank)
    assert seen == {torch.uint8, torch.bool, torch.int16}
    found, expected = full_state(model), reference.state_dict()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        if not value.is_floating_point():
            assert torch.equal(found[name], value), name


# ----------------------------------------------------------------- traffic and memory


@both_views
@on_ranks(2)
def test_frozen_parameters_cost_no_gradient(rank: int, use_orig_params: bool) -> None:
    model = wrapped("lora", use_orig_params)
    optimizer = train(model, rank, steps=1)
    with calls() as seen:
        train(model, rank, steps=1, optimizer=optimizer)
    gathered, reduced = ([4 * numel for kind, numel in seen if kind == which] for which in ("AG", "RS"))
    trainable = sum(param.numel() for param in plain("lora").parameters() if param.requires_grad)
    every = sum(param.numel() for param in plain("lora").parameters())
    assert sum(reduced) <= 1.05 * 4 * trainable + 3 * 64
    assert len(reduced) == 4
    assert 8 * every <= sum(gathered) + 4 * 2 * (WIDTH * WIDTH + WIDTH) <= 1.05 * 8 * every + 4096


# ----------------------------------------------------------------- state dicts and names


@pytest.mark.parametrize("kind", KINDS)
@both_views
@on_ranks(2)
def test_segments_train_as_the_plain_model_and_load_with_the_other_use_orig_params(
    rank: int, kind: str, use_orig_params: bool
) -> None:
    model, reference = wrapped(kind, use_orig_params), plain(kind)
    trained = [flat_param.requires_grad for flat_param in model.blocks[0].params]
    assert len(trained) == KINDS[kind][1] and trained == sorted(trained, reverse=True)
    optimizer = train(model, rank)
    train(reference, rank)
    assert list(full_state(model)) == list(reference.state_dict())
    assert_same(full_state(model), reference.state_dict())
    names = {name for name, param in reference.named_parameters() if param.requires_grad}
    state = FSDP.optim_state_dict(model, optimizer)
    assert set(state["state"]) == names
    other = wrapped(kind, not use_orig_params)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(full_state(model))
    resumed = optimizer_of(other)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, copy.deepcopy(state)))
    train(model, rank, optimizer=optimizer, start=3)
    train(other, rank, optimizer=resumed, start=3)
    assert_same(full_state(other), full_state(model))


@both_views
@on_ranks(2)
def test_parameters_of_segments_are_listed_once(use_orig_params: bool) -> None:
    model = wrapped("quantised", use_orig_params)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    flat = {id(handle.flat_param) for handle in model._all_handles}
    assert len(flat) == 1 + 3 * KINDS["quantised"][1]
    assert model.blocks[0]._flat_param is model.blocks[0].params[0]
    assert model.blocks[0]._flat_param.requires_grad
    assert len(FSDP.fsdp_modules(model)) == 4
    if not use_orig_params:
        assert {id(param) for param in model.parameters()} == flat


@both_views
@on_ranks(2)
def test_segments_train_on_after_casts(rank: int, use_orig_params: bool) -> None:
    model, reference = wrapped("quantised", use_orig_params), plain("quantised")
    for one in (model, reference):
        train(one, rank)
        one.half()
        one.float()
        train(one, rank, start=3)
    assert_same(full_state(model), reference.state_dict())


@on_ranks(2)
def test_warning_about_frozen_parameters_names_split_frozen() -> None:
    with pytest.warns(UserWarning, match=r"wrap under fsdp_c\.wrap\.split_frozen"):
        wrapped("lora", True, split=False)
