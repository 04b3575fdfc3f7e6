"""FlatAdamW: bitwise torch's fused AdamW but for what its vectors leave over, and its state dicts both
ways."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import _C
from fsdp_c.optim import FlatAdamW

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 17, 32, 10_001]  # tails, no tail, several blocks and threads
VECTOR = 32  # elements that torch's widest vector takes at once
# Measured over 20 steps: torch's own tails round another product first.
TAIL_RTOL = {torch.float32: 1e-6, torch.float64: 2e-15, torch.bfloat16: 1e-2, torch.float16: 2e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "small beta": {"betas": (0.3, 0.9), "weight_decay": 0.0, "eps": 1e-6, "lr": torch.tensor(0.02)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
has_fused_products = "avx2" in _C.cpu_capabilities() and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
# Elsewhere, as on aarch64, thousands of elements round as a tail does, and the worst is 9 times as far off.
FURTHER = 1 if has_fused_products else 16


@contextmanager
def capability_of(name: str | None) -> Iterator[None]:
    """The kernels of one instruction set."""
    try:
        _C.use_cpu_capability(name)
        yield
    finally:
        _C.use_cpu_capability(None)


def params_of(dtype: torch.dtype, numels: list[int] = NUMELS) -> list[nn.Parameter]:
    return [nn.Parameter(randn(numel, numel).to(dtype)) for numel in numels]


def randn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def train(optimizer: torch.optim.Optimizer, steps: int = 20, first: int = 0) -> None:
    """Steps with gradients over several orders of magnitude, the same for every optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        for index, param in enumerate(params):
            numbers = randn(param.numel(), 100 * step + index)
            param.grad = (
                (numbers * 10 ** (2 * randn(param.numel(), step))).clamp(-1e3, 1e3).view_as(param).to(param)
            )
        optimizer.step()


def copy_params(target: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    for one, other in zip(*(each.param_groups[0]["params"] for each in (target, source)), strict=True):
        one.data.copy_(other)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and state, in the order of the parameters."""
    found = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state[param]
        found += [param.detach(), *(state[name] for name in sorted(state))]
    return found


def assert_same(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for one, other in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@every_option
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_those_of_torchs_fused_adamw(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, theirs = (
        FlatAdamW(params_of(dtype), **options),
        torch.optim.AdamW(params_of(dtype), fused=True, **options),
    )
    train(ours)
    train(theirs)
    for actual, expected in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert actual.dtype == expected.dtype
        if actual.dim() == 0:  # the number of steps
            assert actual == expected == 20
            continue
        whole = actual.numel() // VECTOR * VECTOR if has_fused_products else 0
        assert torch.equal(actual[:whole], expected[:whole])
        torch.testing.assert_close(actual, expected, rtol=TAIL_RTOL[dtype] * FURTHER, atol=0.0)


@every_option
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_and_number_of_threads_steps_alike(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert_alike_everywhere(dtype, options)


def assert_alike_everywhere(dtype: torch.dtype, options: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for capability, count in itertools.product(_C.cpu_capabilities(), (1, 2)):
            torch.set_num_threads(count)
            results.append(FlatAdamW(params_of(dtype), **options))
            with capability_of(capability):
                train(results[-1], steps=3)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("capability", _C.cpu_capabilities())
def test_a_fused_product_is_rounded_once(capability: str) -> None:
    """A sum 2**-70 below the middle of two float32 numbers, where rounding to float64 first would round to
    even."""
    grad, exp_avg, unused = torch.full((32,), 2.0), torch.full((32,), 1 + 2.0**-23), torch.zeros(32)
    beta1 = 1 - 2.0**-24 - 2.0**-47  # the average moves by (1 + 2**-23) 2**-24 of 1 - 2**-23
    with capability_of(capability):
        torch.ops.fsdp_c.adamw_(
            [unused],
            [grad],
            [exp_avg],
            [unused.clone()],
            [],
            [],
            [],
            [torch.zeros(())],
            [],
            0.0,
            beta1,
            0.9,
            1e-8,
            0.0,
            False,
            [],
            [],
        )
    assert exp_avg.tolist() == [1 + 2.0**-23] * 32


# ----------------------------------------------------------------- state dicts


@every_option
def test_state_dicts_are_exchanged_with_torchs_adamw(options: dict[str, Any]) -> None:
    foreach = not isinstance(options.get("lr"), Tensor)
    makers: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: FlatAdamW(params_of(torch.float32), **options),
        lambda: torch.optim.AdamW(params_of(torch.float32), fused=True, **options),
        lambda: torch.optim.AdamW(params_of(torch.float32), foreach=foreach, **options),
    ]
    for first, second in itertools.product(makers, makers[:2]):
        saving, loading = first(), second()
        train(saving, steps=3)
        copy_params(loading, saving)
        loading.load_state_dict(copy.deepcopy(saving.state_dict()))
        assert_same(loading, saving)
        train(saving, steps=2, first=3)
        train(loading, steps=2, first=3)
        for one, other in zip(tensors_of(loading), tensors_of(saving), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_state_has_torchs_names_shapes_and_dtypes() -> None:
    ours, theirs = (kind(params_of(torch.bfloat16), amsgrad=True) for kind in (FlatAdamW, torch.optim.AdamW))
    for optimizer in (ours, theirs):
        train(optimizer, steps=1)
    described = [
        {
            key: {name: (value.shape, value.dtype) for name, value in state.items()}
            for key, state in states.items()
        }
        for states in (optimizer.state_dict()["state"] for optimizer in (ours, theirs))
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda optimizer: optimizer], ids=["copied", "as made"])
def test_float32_state_of_16_bit_parameters_survives_loading(make_copy: Any) -> None:
    saving = FlatAdamW(params_of(torch.bfloat16), state_dtype=torch.float32)
    train(saving, steps=3)
    state = saving.state[saving.param_groups[0]["params"][-1]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert not torch.equal(state["exp_avg"], state["exp_avg"].bfloat16().float())
    loading = make_copy(FlatAdamW(params_of(torch.bfloat16), state_dtype=torch.float32))
    copy_params(loading, saving)
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert_same(loading, saving)
    plain = FlatAdamW(params_of(torch.bfloat16))
    plain.load_state_dict(saving.state_dict())
    assert plain.param_groups[0]["state_dtype"] is None
    assert plain.state[plain.param_groups[0]["params"][-1]]["exp_avg"].dtype == torch.bfloat16


def test_state_in_float32_keeps_updates_that_16_bits_lose() -> None:
    """The average of the squares moves by a thousandth a step: less than bfloat16 can hold."""
    squares = {}
    for dtype in (None, torch.float32):
        param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = FlatAdamW([param], lr=0.0, state_dtype=dtype)
        for _ in range(500):
            param.grad = torch.ones_like(param)
            optimizer.step()
        squares[dtype] = optimizer.state[param]["exp_avg_sq"][0].item()
    exact = 1 - 0.999**500
    assert squares[torch.float32] == pytest.approx(exact, rel=1e-4)
    assert squares[None] < 0.9 * exact


def test_hooks_on_loading_are_followed_before_the_state_is_restored() -> None:
    optimizer = FlatAdamW(params_of(torch.bfloat16, [40]), state_dtype=torch.float32)
    train(optimizer, steps=1)
    saved, seen = copy.deepcopy(optimizer.state_dict()), []

    def halve(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        halved = copy.deepcopy(state_dict)
        halved["state"][0]["exp_avg"] /= 2
        return halved

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append(loaded.state[param]["exp_avg"].dtype)
    )
    param = optimizer.param_groups[0]["params"][0]
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[param]["exp_avg"], saved["state"][0]["exp_avg"] / 2)
    assert seen == [torch.float32]


@pytest.mark.parametrize("state_dtype", [None, torch.uint8])
def test_hooks_on_saving_have_the_state_itself_and_what_is_saved_of_it(
    state_dtype: torch.dtype | None,
) -> None:
    (param,) = params = params_of(torch.float32, [40])
    optimizer, seen = FlatAdamW(params, state_dtype=state_dtype), []
    optimizer.register_state_dict_pre_hook(lambda own: own.state[param].setdefault("noted", torch.ones(1)))
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(dict(saved["state"][0])))
    assert "noted" in optimizer.state_dict()["state"][0] and "noted" in optimizer.state[param]
    optimizer.state.clear()
    train(optimizer, steps=1)
    optimizer.state_dict()
    assert seen[1]["exp_avg"].dtype == torch.float32 and "noted" in seen[1]


# ----------------------------------------------------------------- masters

MASTERS = {"master_dtype": torch.float32}


def masters_of(optimizer: FlatAdamW) -> list[Tensor]:
    return [optimizer.master(param) for group in optimizer.param_groups for param in group["params"]]


def assert_nearest(param: Tensor, master: Tensor) -> None:
    """As a cast rounds, but for what lies in the middle."""
    nearest, is_tie = master.bfloat16(), (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[~is_tie], nearest[~is_tie])
    assert (param[is_tie].float().abs() > master[is_tie].abs()).all()


@every_option
def test_masters_step_with_the_bits_of_float32_parameters(options: dict[str, Any]) -> None:
    halves = params_of(torch.bfloat16)
    wholes = [nn.Parameter(param.detach().float()) for param in halves]
    ours, exact = FlatAdamW(halves, **MASTERS, **options), FlatAdamW(wholes, **options)
    assert masters_of(ours)[3].equal(wholes[3])  # before the first step
    for step in range(20):
        for optimizer in (ours, exact):
            train_in_bfloat16(optimizer, step)
        for half, master, whole in zip(halves, masters_of(ours), wholes, strict=True):
            assert torch.equal(master, whole)
            assert_nearest(half.detach(), master)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(ours.state[half][name], exact.state[whole][name])
    assert not torch.equal(halves[-1].float(), wholes[-1])


def train_in_bfloat16(optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = randn(param.numel(), 100 * step + index).bfloat16().to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("capability", _C.cpu_capabilities())
def test_a_master_is_both_halves_of_any_bits(capability: str) -> None:
    """A step of no length, over every low half below zeros, denormals, powers of two, the largest numbers,
    infinities and NaN of both signs."""
    highs = torch.tensor([0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0])
    bits = ((highs[:, None] << 16) + torch.arange(1 << 16)).reshape(-1)
    bits = torch.cat((bits, bits + (1 << 31))).to(torch.int32)  # which wraps
    masters = bits.view(torch.float32)
    bits = torch.where(masters.isnan(), 0x7FC00000, bits)
    low = bits.to(torch.int16)
    param = ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16)
    assert (low.int() + (param.view(torch.int16).int() << 16)).equal(bits)
    started = (torch.where(masters.isnan(), masters.bfloat16(), param), torch.where(masters.isnan(), 0, low))
    zeros, stepped = torch.zeros(bits.numel()), [tensor.clone() for tensor in started]
    numbers = (0.0, 0.9, 0.99, 1e-8, 0.0, False, [], [])
    with capability_of(capability):
        torch.ops.fsdp_c.adamw_(
            stepped[:1], [zeros], [zeros], [zeros], [], stepped[1:], [], [torch.zeros(())], [], *numbers
        )
    assert torch.equal(stepped[0].view(torch.int16), param.view(torch.int16))
    assert torch.equal(stepped[1], low)
    is_number = ~masters.isnan()
    assert_nearest(param[is_number], masters[is_number])


def test_masters_step_alike_on_every_instruction_set_and_number_of_threads() -> None:
    assert_alike_everywhere(torch.bfloat16, MASTERS | {"amsgrad": True})


def test_resumed_masters_go_on_to_the_bit_and_torchs_state_begins_at_the_parameters() -> None:
    saving = FlatAdamW(params_of(torch.bfloat16), **MASTERS)
    train(saving, steps=3)
    loading = FlatAdamW(params_of(torch.bfloat16), **MASTERS)
    theirs = torch.optim.AdamW(params_of(torch.bfloat16))
    for other in (loading, theirs):
        copy_params(other, saving)
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    for optimizer in (saving, loading):
        train(optimizer, steps=2, first=3)
    assert_same(loading, saving)
    theirs.load_state_dict(copy.deepcopy(saving.state_dict()))
    train(theirs, steps=1, first=3)
    for state in theirs.state.values():  # of an optimizer that knows no masters
        del state["master_low"]
    saving.load_state_dict(copy.deepcopy(theirs.state_dict()))
    param = saving.param_groups[0]["params"][-1]
    assert saving.param_groups[0]["master_dtype"] == torch.float32
    assert torch.equal(saving.master(param), param.float())
    assert saving.state[param]["exp_avg"].dtype == torch.float32
    train(saving, steps=1, first=4)
    assert not torch.equal(saving.master(param), param.float())
    plain = FlatAdamW(params_of(torch.bfloat16))
    plain.load_state_dict(saving.state_dict())
    assert not any("master_low" in state for state in plain.state.values())


# ----------------------------------------------------------------- averages in 8 bits

IN_8_BITS: dict[str, Any] = {"state_dtype": torch.uint8}
BLOCK = 256
# half a cell, of the largest magnitude, and the part of a cell in each further decade
SQUARES_RTOL, SIGNED_RTOL, PER_DECADE = 0.45 / 128, 0.45 / 64, 1 / 5


def kept(values: Tensor, first: int = 0, capability: str | None = None) -> dict[str, Tensor]:
    """Averages in 8 bits after a step that makes them ``values`` and their squares, as a state dict has them,
    and their codes and scales."""
    param = nn.Parameter(torch.zeros_like(values))
    param.grad, param._first_index = values.clone(), first  # type: ignore[attr-defined]
    optimizer = FlatAdamW([param], betas=(0.0, 0.0), **IN_8_BITS)
    with capability_of(capability):
        optimizer.step()
    state = optimizer.state[param]
    codes = {f"{name}_codes": state[name] for name in ("exp_avg", "exp_avg_sq")}
    return state | codes | optimizer.state_dict()["state"][0]


def in_blocks(values: Tensor, first: int = 0) -> Tensor:
    padded = nn.functional.pad(values, (first % BLOCK, -(first + values.numel()) % BLOCK))
    return padded.view(-1, BLOCK)


def over_decades(numel: int) -> Tensor:
    return randn(numel, 3) * 10 ** (3 * randn(numel, 4)).clamp(-8, 8)


@pytest.mark.parametrize("capability", _C.cpu_capabilities())
@pytest.mark.parametrize("first", [0, 255, (1 << 40) + 77])
def test_averages_in_8_bits_are_off_by_half_a_cell_at_most(first: int, capability: str) -> None:
    values = over_decades(20_001)
    found = kept(values, first, capability)
    for name, exact, rtol in (
        ("exp_avg", values, SIGNED_RTOL),
        ("exp_avg_sq", values.square(), SQUARES_RTOL),
    ):
        assert found[f"{name}_codes"].dtype == torch.uint8 and found[name].dtype == torch.float32
        blocks, actual = in_blocks(exact, first).double(), in_blocks(found[name], first).double()
        largest = blocks.abs().amax(1, keepdim=True)
        assert torch.equal(actual.abs().amax(1, keepdim=True), largest)
        decade = (blocks.abs() / largest).clamp(min=1e-7).log10().neg().floor().clamp(0, 6)
        error = (actual - blocks).abs() / largest
        is_counted = (blocks.abs() >= 1e-7 * largest) & (blocks.abs() < largest)
        bound = rtol * PER_DECADE**decade
        assert (error <= 1.0001 * bound)[is_counted].all()
        assert (error > 0.99 * bound)[is_counted].any()  # it is the bound
        assert (error <= 3.3e-7).logical_or(is_counted).all()
        assert found[f"{name}_scale"].abs().double().equal(largest[:, 0])
        is_small = (blocks.abs() < 1e-7 * largest * (1 - 1e-6)) & (blocks != 0)
        assert is_small.any()
        assert (actual[is_small] == 0).all() if name == "exp_avg" else (actual[is_small] > 0).all()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_are_those_of_the_dynamic_map(name: str) -> None:
    """Of Dettmers et al., who take the middles of even cells in each decade, zero and 1."""
    counts = [2**n for n in (range(1, 8) if name == "exp_avg_sq" else range(7))]
    middles = []
    for count, end in zip(counts, (10.0**n for n in range(-6, 1)), strict=True):
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64) * end
        middles.append((edges[1:] + edges[:-1]) / 2)
    numbers = torch.cat((torch.zeros(1, dtype=torch.float64), *middles, torch.ones(1, dtype=torch.float64)))
    if name == "exp_avg":
        numbers = torch.cat((-numbers[1:-1].flip(0), numbers))
    assert numbers.numel() == 256
    values = torch.cat((numbers.float().sqrt() if name == "exp_avg_sq" else numbers.float(), torch.ones(256)))
    found = kept(values)
    assert found[f"{name}_codes"][:256].unique().numel() == 256
    torch.testing.assert_close(found[name][:256].double(), numbers, rtol=1e-5, atol=0)


def test_what_is_not_finite_is_its_blocks_and_the_smallest_scales_are_zero() -> None:
    values = over_decades(5 * BLOCK)
    values[10], values[BLOCK + 3], values[2 * BLOCK : 3 * BLOCK] = math.inf, math.nan, 1e-39
    values[3 * BLOCK : 4 * BLOCK] = -0.0
    for capability in _C.cpu_capabilities():
        found = kept(values, capability=capability)
        for name in ("exp_avg", "exp_avg_sq"):
            blocks = found[name].view(-1, BLOCK)
            assert blocks[:2].isnan().all()
            assert (blocks[2:4] == 0).all()
            assert (blocks[4] != 0).any() and blocks[4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=str)
def test_averages_in_8_bits_are_alike_on_every_instruction_set_and_number_of_threads(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert_alike_everywhere(dtype, IN_8_BITS | options)


@pytest.mark.parametrize("options", [MASTERS, {"rounding": "stochastic"}], ids=str)
def test_averages_in_8_bits_go_with_what_bfloat16_parameters_keep(options: dict[str, Any]) -> None:
    assert_alike_everywhere(torch.bfloat16, IN_8_BITS | options)
    ours, exact = (
        FlatAdamW(params_of(torch.bfloat16), lr=1e-3, **options | state)
        for state in (IN_8_BITS, {"state_dtype": torch.float32})
    )
    for step in range(20):
        for optimizer in (ours, exact):
            train_in_bfloat16(optimizer, step)
    whole = [optimizer.master(optimizer.param_groups[0]["params"][-1]) for optimizer in (ours, exact)]
    start = params_of(torch.bfloat16)[-1].float()
    assert 0 < (whole[0] - whole[1]).norm() < 0.15 * (whole[1] - start).norm()  # 0.10, on random gradients


def test_a_tensor_in_parts_steps_as_the_whole_where_no_block_is_divided() -> None:
    """Of more than 1 MiB, at addresses that no vector has."""
    whole = nn.Parameter(randn(300_001, 1))
    cuts = [0, 3 * BLOCK, 3 * BLOCK, 200 * BLOCK, whole.numel()]
    parts = [nn.Parameter(whole.detach()[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    offset = nn.Parameter(torch.cat((torch.zeros(1), whole.detach()))[1:])  # type: ignore[arg-type]
    for part, first in zip(parts, cuts, strict=False):
        part._first_index = first  # type: ignore[attr-defined]
    groups = [[whole], parts, [offset]]
    optimizers = [FlatAdamW(params, lr=0.1, **IN_8_BITS) for params in groups]
    for step in range(3):
        grad = randn(whole.numel(), 10 + step)
        for part, (a, b) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = grad[a:b].clone()
        whole.grad = offset.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        one, *others = (
            torch.cat([optimizer.state[param][name] for param in params])
            for optimizer, params in zip(optimizers, groups, strict=True)
        )
        assert all(torch.equal(one, other) for other in others)
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole)
    assert torch.equal(offset, whole)


def test_state_in_8_bits_is_saved_in_float32_and_comes_back_to_the_same_bits() -> None:
    options = {"amsgrad": True, **IN_8_BITS}
    saving, loading = (FlatAdamW(params_of(torch.bfloat16), **options) for _ in range(2))
    train(saving, steps=3)
    saved = copy.deepcopy(saving.state_dict())
    theirs = torch.optim.AdamW(params_of(torch.float32), amsgrad=True)
    train(theirs, steps=1)
    assert {key: value.dtype for key, value in saved["state"][4].items()} == {
        key: value.dtype for key, value in theirs.state_dict()["state"][4].items()
    }
    for other in (loading, theirs):
        copy_params(other, saving)
        other.load_state_dict(saved)
    assert_same(loading, saving)
    assert loading.param_groups[0]["state_dtype"] == torch.uint8
    for optimizer in (saving, loading, copied := copy.deepcopy(saving)):
        train(optimizer, steps=2, first=3)
    assert_same(loading, saving)
    assert_same(copied, saving)
    train(theirs, steps=1, first=3)
    loading.load_state_dict(theirs.state_dict())
    state, exact = loading.state_dict()["state"][4], theirs.state_dict()["state"][4]
    assert state["exp_avg_sq"].dtype == torch.float32
    largest = in_blocks(exact["exp_avg_sq"]).amax(1).max()
    assert (state["exp_avg_sq"] - exact["exp_avg_sq"]).abs().max() <= 1.01 * SQUARES_RTOL * largest
    plain = FlatAdamW(params_of(torch.bfloat16), amsgrad=True)
    plain.load_state_dict(saving.state_dict())
    assert not any("exp_avg_scale" in state for state in plain.state.values())


def test_training_with_averages_in_8_bits_is_near_that_in_float32() -> None:
    """A regression of noisy numbers, whose features differ by an order of magnitude; to its least loss."""
    features = randn(256 * 64, 1).view(256, 64) * 10 ** torch.linspace(-0.5, 0.5, 64)
    wanted = features @ randn(64, 2) + randn(256, 3)
    losses: dict[str, list[float]] = {"float32": [], "8 bits": []}
    for found, options in zip(losses.values(), ({}, IN_8_BITS), strict=True):
        param = nn.Parameter(torch.zeros(64))
        optimizer = FlatAdamW([param], lr=3e-2, weight_decay=0.0, **options)
        for _ in range(300):
            optimizer.zero_grad()
            loss = (features @ param - wanted).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    exact, ours = losses.values()
    assert exact[99] < exact[0] / 50 and exact[299] < exact[99] / 1.5
    assert ours != exact
    assert ours[99] < 1.2 * exact[99] and ours[299] < 1.001 * exact[299]


def test_no_step_is_divided_by_eps_alone_where_a_square_is_small() -> None:
    """The gradients of one element are small and then none, while its block's others stay large."""
    params = [nn.Parameter(torch.zeros(BLOCK)) for _ in range(2)]
    optimizers = [
        FlatAdamW([param], lr=1.0, weight_decay=0.0, **options)
        for param, options in zip(params, ({}, IN_8_BITS), strict=True)
    ]
    for step in range(4):
        grad = torch.ones(BLOCK)
        grad[0] = 0 if step else 2e-4  # whose square is 4e-8 of the others'
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad
            optimizer.step()
    exact, ours = (param[0].item() for param in params)
    assert abs(ours) <= abs(exact) < 4


# ----------------------------------------------------------------- stochastic rounding

STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}
MANY = 1 << 16


def decayed(start: Tensor, weight_decay: float, stream: int = 1, step: int = 0, first: int = 0) -> Tensor:
    """bfloat16 parameters times 1 - weight_decay, rounded by chance."""
    param, zeros = start.clone(), torch.zeros(start.numel())
    numbers = (1.0, 0.9, 0.99, 1e-8, weight_decay, False, [stream], [first])
    states = [zeros.clone()], [zeros.clone()], [], [], [], [torch.tensor(float(step))]
    torch.ops.fsdp_c.adamw_([param], [zeros], *states, [], *numbers)
    return param


def went_up(weight_decay: float, value: float = 1.0, **of: int) -> Tensor:
    """Which of many equal elements went to the larger one of their two neighbours."""
    found = decayed(torch.full((MANY,), value, dtype=torch.bfloat16), weight_decay, **of)
    neighbours = found.unique().tolist()
    assert len(neighbours) == 2 and neighbours[0] <= value * (1 - weight_decay) <= neighbours[1]
    return found == neighbours[1]


@pytest.mark.parametrize("part", [1 / 4, 1 / 2, 1 / 16, 15 / 16])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_number_goes_up_as_often_as_it_is_near(part: float, value: float) -> None:
    share = went_up(part * 2.0**-8, value).double().mean().item()  # just below 1 the last place is 2**-8
    expected = part if value < 0 else 1 - part
    assert share == pytest.approx(expected, abs=4 * math.sqrt(part * (1 - part) / MANY))


def test_draws_of_elements_steps_and_streams_know_nothing_of_each_other() -> None:
    decay = 2.0**-9
    start = went_up(decay)
    others = {
        "neighbour": start.roll(1),
        "eighth": start.roll(8),
        "step": went_up(decay, step=1),
        "stream": went_up(decay, stream=2),
        "position": went_up(decay, stream=1 + (1 << 32)),
        "far index": went_up(decay, first=1 << 32),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((start, other)).double())[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(MANY), name
    spectrum = torch.fft.rfft(start.double() - start.double().mean()).abs().square()
    assert spectrum.max() < 25 * spectrum.mean()  # no period: above, by chance, once in a million


def test_any_two_draws_of_an_element_know_nothing_of_each_other() -> None:
    """Of parameter, average, square and largest square: each goes from 1 down by 16 parts of its last place,
    and how many of these move it says how high its number is."""
    went: list[Tensor] = []
    for part in (1 - 2.0**-8 * torch.linspace(1 / 32, 31 / 32, 16)).tolist():
        param, average, square, largest = ([torch.ones(MANY, dtype=torch.bfloat16)] for _ in range(4))
        largest[0].zero_()
        grad, step = torch.zeros(MANY, dtype=torch.bfloat16), torch.zeros(())
        numbers = (1.0, part, part, 1e30, 1 - part, False, [1], [0])
        torch.ops.fsdp_c.adamw_(param, [grad], average, square, largest, [], [], [step], [], *numbers)
        went.append(torch.stack(param + average + square + largest) < 1)
    draws = torch.stack(went).sum(0)
    for one, other in itertools.combinations(draws, 2):
        found = (17 * one + other).bincount(minlength=17 * 17).view(17, 17).double()
        expected = found.sum(1, keepdim=True) * found.sum(0) / MANY
        chi = ((found - expected).square() / expected).sum().item()
        assert abs(chi - 256) < 5 * math.sqrt(2 * 256)


def test_draws_follow_the_index_in_the_whole_over_its_32nd_bit() -> None:
    start, first = randn(5000, 1).bfloat16(), (1 << 32) - 2017
    whole = decayed(start, 0.3, first=first)
    parts = [decayed(start[at : at + 617], 0.3, first=first + at) for at in range(0, 5000, 617)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(decayed(start, 0.3, first=first + 1), whole)


@pytest.mark.parametrize("capability", _C.cpu_capabilities())
def test_what_is_not_finite_stays_so(capability: str) -> None:
    start = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0] * 20, dtype=torch.bfloat16)
    with capability_of(capability):
        assert torch.equal(decayed(start, 0.5).view(torch.int16), start.view(torch.int16))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"state_dtype": torch.float32}], ids=str)
def test_stochastic_steps_are_alike_on_every_instruction_set_and_number_of_threads(options: Any) -> None:
    assert_alike_everywhere(torch.bfloat16, STOCHASTIC | options)


def test_float32_parameters_have_state_in_bfloat16_rounded_by_chance() -> None:
    assert_alike_everywhere(torch.float32, STOCHASTIC | {"state_dtype": torch.bfloat16})
    ours, exact = (
        FlatAdamW(params_of(torch.float32), **options)
        for options in (STOCHASTIC | {"state_dtype": torch.bfloat16}, {})
    )
    for optimizer in (ours, exact):
        train(optimizer, steps=1)
    for one, other in zip(*(optimizer.param_groups[0]["params"] for optimizer in (ours, exact)), strict=True):
        assert torch.equal(one, other)  # of which the first step knows nothing
        average, true = ours.state[one]["exp_avg"], exact.state[other]["exp_avg"]
        assert average.dtype == torch.bfloat16
        assert ((average.float() - true).abs() <= true.abs() * 2**-7).all()


def test_small_steps_are_lost_but_for_masters_and_stochastic_rounding() -> None:
    means = {}
    for name, options in {"nearest": {}, "master": MASTERS, "stochastic": STOCHASTIC}.items():
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = FlatAdamW([param], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(500):
            param.grad = torch.ones_like(param)
            optimizer.step()
        means[name] = param.detach().float().mean().item()
    assert means["nearest"] == 1.0
    assert means["master"] == pytest.approx(0.95, abs=2.0**-9)
    assert means["stochastic"] == pytest.approx(0.95, abs=1e-3)


def test_averages_rounded_by_chance_are_right_on_average() -> None:
    """Where rounding to nearest loses them: as in the test of state in float32."""
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = FlatAdamW([param], lr=0.0, **STOCHASTIC)
    for _ in range(500):
        param.grad = torch.ones_like(param)
        optimizer.step()
    square = optimizer.state[param]["exp_avg_sq"]
    assert square.dtype == torch.bfloat16
    assert square.float().mean().item() == pytest.approx(1 - 0.999**500, rel=2e-3)


def test_stochastic_training_goes_on_to_the_bit_and_another_seed_draws_otherwise() -> None:
    trained = []
    for seed in (0, 0, 1):
        optimizer = FlatAdamW(params_of(torch.bfloat16), seed=seed, **STOCHASTIC)
        train(optimizer, steps=2)
        if trained:  # the second one is a resumed one
            fresh = FlatAdamW(optimizer.param_groups[0]["params"], seed=seed, **STOCHASTIC)
            fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = fresh
        train(optimizer, steps=2, first=2)
        trained.append(optimizer)
    assert_same(trained[1], trained[0])
    params = [optimizer.param_groups[0]["params"][-1] for optimizer in trained]
    assert not torch.equal(params[2], params[0])


# ----------------------------------------------------------------- parameters of any kind


def test_strided_parameters_and_gradients_step_as_contiguous_ones() -> None:
    shape = (4, 6, 5, 7)
    start, grad = randn(840, 1).view(shape), randn(840, 2).view(shape)
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.clone(memory_format=torch.channels_last))]
    optimizers = [FlatAdamW([weight], amsgrad=True) for weight in weights]
    for _ in range(3):
        weights[0].grad = grad
        weights[1].grad = grad.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        for optimizer in optimizers:
            optimizer.step()
    assert weights[1].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(tensors_of(optimizers[1]), tensors_of(optimizers[0]), strict=True):
        assert torch.equal(one, other)


def test_groups_have_options_of_their_own_and_parameters_without_gradient_wait() -> None:
    fast, slow, idle = (nn.Parameter(torch.ones(5)) for _ in range(3))
    optimizer = FlatAdamW(
        [{"params": [fast], "lr": 0.5}, {"params": [slow, idle]}], lr=0.25, weight_decay=0.0
    )
    for param in (fast, slow):
        param.grad = torch.ones(5)
    optimizer.step()
    assert (fast[0].item(), slow[0].item(), idle[0].item()) == pytest.approx((0.5, 0.75, 1.0))
    assert idle not in optimizer.state


def test_a_step_counts_as_a_change_of_the_parameter() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    FlatAdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(3))

    def closure() -> float:
        loss = (weight * 2).sum()
        loss.backward()
        return loss.item()

    assert FlatAdamW([weight]).step(closure) == 6.0
    assert (weight < 1).all()


def test_the_scheduler_and_the_gradient_scaler_of_torch_drive_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = FlatAdamW([weight], lr=0.5, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert weight[0].item() == pytest.approx(1 - 0.5 - 0.125)


# ----------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0 and finite, not -1.0"),
        ({"lr": math.nan}, "lr must be at least 0 and finite, not nan"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one element, not of 2"),
        ({"eps": -1e-8}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), not \(0.9, 1.0\)"),
        ({"state_dtype": torch.int64}, "state_dtype must be None, float32, .*, not torch.int64"),
        ({"master_dtype": torch.float64}, "master_dtype must be None or torch.float32, not torch.float64"),
        ({"rounding": "up"}, 'rounding must be "nearest" or "stochastic", not \'up\''),
        ({"state_dtype": torch.int8}, "state_dtype must be None, .* or uint8, not torch.int8"),
        (MASTERS | STOCHASTIC, 'give master_dtype or rounding="stochastic", not both'),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*31 - 1, not -1"),
    ],
)
def test_numbers_out_of_their_domain_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatAdamW(params_of(torch.float32), **options)
    optimizer = FlatAdamW(params_of(torch.float32))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1


def test_parameters_of_other_dtypes_are_refused() -> None:
    complex_one = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = FlatAdamW(params_of(torch.float32))
    with pytest.raises(TypeError, match="parameter 0 of group 1 is torch.complex64"):
        optimizer.add_param_group({"params": [complex_one]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "dtype", "why"),
    [
        (MASTERS, torch.float32, "masters of bfloat16"),
        (MASTERS, torch.float16, "masters of bfloat16"),
        (STOCHASTIC, torch.float32, 'rounding="stochastic" is for bfloat16'),
        (STOCHASTIC, torch.float16, 'rounding="stochastic" is for bfloat16'),
        (STOCHASTIC, torch.float64, 'rounding="stochastic" is for bfloat16'),
        (IN_8_BITS, torch.float64, "stepped in float32"),
    ],
    ids=str,
)
def test_options_for_other_dtypes_are_refused(options: dict[str, Any], dtype: torch.dtype, why: str) -> None:
    with pytest.raises(TypeError, match=f"{why} ?.*, but parameter 0 of group 0 is {dtype}"):
        FlatAdamW(params_of(dtype), **options)


@pytest.mark.parametrize(
    ("spoilt", "error", "message"),
    [
        (
            lambda: _with_grad(torch.ones(3), torch.ones(3).to_sparse()),
            RuntimeError,
            "gradient 0 of group 1 is one",
        ),
        (
            lambda: _with_grad(torch.ones(3, device="meta"), torch.ones(3, device="meta")),
            NotImplementedError,
            "on meta",
        ),
    ],
    ids=["sparse", "meta"],
)
def test_a_refused_gradient_leaves_every_parameter_as_it_was(spoilt: Any, error: type, message: str) -> None:
    good = _with_grad(torch.ones(3), torch.ones(3))
    optimizer = FlatAdamW([{"params": [good]}, {"params": [spoilt()]}])
    with pytest.raises(error, match=message):
        optimizer.step()
    assert good.tolist() == [1.0, 1.0, 1.0] and not optimizer.state


def _with_grad(value: Tensor, grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = grad
    return param
