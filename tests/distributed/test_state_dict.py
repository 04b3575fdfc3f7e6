"""FULL_STATE_DICT: names, values, memory and errors, compared with torch's FSDP1 and the plain module."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests import training
from tests.errors import collected
from tests.models import WIDTH, Block, Net
from tests.pairwise import pairwise
from tests.parity.engine import implementation
from tests.ranks import VIEWS, all_strategies, both_views, device, on_ranks
from tests.training import FULL, LOCAL, SHARDED, assert_same


def plain(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(2, tied_head=True, tied=True, **options)


def wrap(
    module: nn.Module, use_orig_params: bool = True, which: str = "fsdp_c", mesh: bool = False, **options: Any
) -> Any:
    """Wrap a Net with a unit per block; ``mesh``: over a device mesh of one dimension."""
    options = {"auto_wrap_policy": training.PER_BLOCK, "device_id": device()} | options
    if isinstance(options.get("sharding_strategy"), str):
        options["sharding_strategy"] = ShardingStrategy[options["sharding_strategy"]]
    if mesh:
        options["device_mesh"] = init_device_mesh(device().type, (dist.get_world_size(),))
    return implementation(which)(module, use_orig_params=use_orig_params, **options)


def train(model: nn.Module, rank: int) -> None:
    training.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def full_state_dict(model: Any, **config: Any) -> dict[str, Tensor]:
    with type(model).state_dict_type(model, FULL, FullStateDictConfig(**config)):
        return model.state_dict()


@pairwise(source=["torch", "fsdp_c", "plain"], target=["torch", "fsdp_c", "plain"], use_orig_params=VIEWS)
@on_ranks(2)
def test_dict_loads_into_every_implementation(source: str, target: str, use_orig_params: bool) -> None:
    def build(which: str, seed: int) -> nn.Module:
        return plain(seed) if which == "plain" else wrap(plain(seed), use_orig_params, which)

    saved = build(source, 1).state_dict()
    model = build(target, 2)
    result = model.load_state_dict(saved)
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert_same(plain(1).state_dict(), saved)
    assert_same(saved, model.state_dict())


@all_strategies
@both_views
@on_ranks(2)
def test_values_own_their_memory(rank: int, strategy: str, use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params, sharding_strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strategy != "NO_SHARD" else "ignore")
        saved = model.state_dict(keep_vars=True)
        model.load_state_dict(saved)
    before = {key: value.clone() for key, value in saved.items()}
    train(model, rank)
    assert_same(before, saved)
    params = [saved[name] for name, _ in plain().named_parameters(remove_duplicate=False)]
    assert len({value.untyped_storage().data_ptr() for value in params}) == len(params)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in params)
    assert not any(value.requires_grad or isinstance(value, nn.Parameter) for value in params)


@both_views
@on_ranks(2)
def test_copies_on_every_rank_are_warned_of_once_per_save(use_orig_params: bool) -> None:
    """torch warns once per unit. On a CPU device the warnings of both cannot be compared."""

    def warned(module: Any, **config: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            full_state_dict(module, **config)
        return [
            one.filename for one in caught if str(one.message).startswith("offload_to_cpu=True and rank0")
        ]

    model = wrap(plain(), use_orig_params)
    assert warned(model, offload_to_cpu=True) == [__file__]
    assert warned(model, offload_to_cpu=True, rank0_only=True) == warned(model) == []
    assert warned(wrap(plain(), use_orig_params, sharding_strategy="NO_SHARD"), offload_to_cpu=True) == []


@all_strategies
@both_views
@on_ranks(2)
def test_rank0_only_keeps_unmanaged_entries_on_the_other_ranks(
    rank: int, strategy: str, use_orig_params: bool
) -> None:
    module = plain()
    model = wrap(module, use_orig_params, sharding_strategy=strategy, ignored_states=[module.inp.bias])
    saved = full_state_dict(model, offload_to_cpu=True, rank0_only=True)
    if rank == 0:
        assert_same(plain().state_dict(), saved)
    else:
        assert list(saved) == ["inp.bias"]


@both_views
@on_ranks(2)
def test_save_holds_one_unit_at_a_time(rank: int, use_orig_params: bool) -> None:
    """Modules get no unsharded parameters, and a transfer's buffers are at most as large as the largest unit."""
    from fsdp_c import _C
    from fsdp_c.state import redistribution, sharded_values

    model = wrap(plain(), use_orig_params)
    train(model, rank)
    largest = max(unit._handle.layout.padded_numel for unit in type(model).fsdp_modules(model))
    received = []
    all_gather = redistribution._all_gather_single

    def watched(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(output.numel())
        return all_gather(output, *args, **kwargs)

    before = _C.live_unsharded_nbytes()
    _C.peak_unsharded_nbytes(reset=True)
    with (
        mock.patch.object(redistribution, "_all_gather_single", watched),
        mock.patch.object(sharded_values, "FULL_BATCH_NBYTES", 1),
    ):
        full_state_dict(model)
    assert _C.peak_unsharded_nbytes() <= before
    assert len(received) == 2  # the root is as large as the first block; the second one follows
    assert max(received) <= 2 * largest


class Unread:
    """A tensor in a file, as in Lightning's lazy checkpoints: any function of torch reads it."""

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most_alive = 0

    def __init__(self, tensor: Tensor) -> None:
        self.array, self.shape, self.dtype = tensor.cpu().numpy(), tensor.shape, tensor.dtype

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        read = [torch.from_numpy(arg.array.copy()) if isinstance(arg, cls) else arg for arg in args]
        cls.alive.update(new for new, arg in zip(read, args, strict=True) if new is not arg)
        cls.most_alive = max(cls.most_alive, len(cls.alive))
        return function(*read, **(kwargs or {}))


@both_views
@on_ranks(2)
def test_lazy_tensors_of_files_are_read_one_at_a_time(use_orig_params: bool) -> None:
    Unread.most_alive = 0
    saved = plain(seed=1).state_dict()
    model = wrap(plain(), use_orig_params)
    model.load_state_dict({name: Unread(value) for name, value in saved.items()})
    assert_same(saved, full_state_dict(model))
    assert Unread.most_alive == 1


@both_views
@on_ranks(2)
def test_wrong_shape_names_the_entry_and_loads_nothing(use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params)
    other = plain(3).state_dict()
    other["blocks.1.down.weight"] = other["blocks.1.down.weight"][:1]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="size mismatch for blocks.1.down.weight"):
            model.load_state_dict(other, strict=strict)
    assert_same(plain().state_dict(), full_state_dict(model))
    model.load_state_dict(plain(3).state_dict())
    assert_same(plain(3).state_dict(), full_state_dict(model))


class Counted(nn.Module):
    """A block with buffers, one of them shared with another block."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("shared", shared)
        self.register_buffer("repeated", torch.zeros(1).expand(4))  # cannot be copied into
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Late(nn.Module):
    """A layer that may register a buffer in its first forward, or assign to one that was None."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("early", torch.tensor([1 / 3, 2 / 3]))
        self.register_buffer("unset", None)
        self.registers = registers

    def forward(self, x: Tensor) -> Tensor:
        if self.registers and self.unset is None:
            self.register_buffer("late", torch.tensor([1 / 7]))
            self.unset = torch.tensor([1 / 9])
        return self.layer(x)


def in_forward(_: list[Any]) -> None:
    """Do nothing: the forward has made the change."""


def after_forward(layers: list[Any]) -> None:
    layers[1].register_buffer("after", torch.tensor([1 / 5]))
    layers[1].register_buffer("hidden", torch.tensor([1 / 5]), persistent=False)


def removed(layers: list[Any]) -> None:
    del layers[0].early


def replaced(layers: list[Any]) -> None:
    layers[1].early = torch.tensor([1 / 11], dtype=torch.float64)


FORMS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "one unit": lambda net: {"auto_wrap_policy": None},
    "nested": lambda net: {"auto_wrap_policy": ModuleWrapPolicy({Late})},
    "ignored": lambda net: {"auto_wrap_policy": None, "ignored_modules": [net[1]]},
}


@pairwise(change=[in_forward, after_forward, removed, replaced], form=tuple(FORMS), use_orig_params=VIEWS)
@on_ranks(2)
def test_buffers_registered_after_wrapping_are_saved_as_by_torch(
    change: Callable[[list[Any]], None], form: str, use_orig_params: bool
) -> None:
    def built(which: str) -> Any:
        torch.manual_seed(1)
        with torch.device(device()):
            layers = [Late(registers=False), Late(registers=True)]
        net = nn.Sequential(*layers)
        options = FORMS[form](net) | {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}
        model = net if which == "plain" else wrap(net, use_orig_params, which, **options)
        model(torch.ones(1, WIDTH)).sum().backward()
        change(layers)
        return model

    def buffers_in(model: Any) -> dict[str, Tensor]:
        state = model.state_dict().items()
        return {name: value for name, value in state if type(value) is Tensor and "layer" not in name}

    dtypes = {name: value.dtype for name, value in buffers_in(built("plain")).items()}
    for kind in (FULL, SHARDED, LOCAL):
        found = {}
        for which in ("torch", "fsdp_c"):
            model, other = built(which), built(which)
            with type(model).state_dict_type(model, kind), type(other).state_dict_type(other, kind):
                found[which] = {name: value.clone() for name, value in buffers_in(model).items()}
                if which == "fsdp_c":
                    other.load_state_dict(model.state_dict())
                    assert_same(found[which], buffers_in(other))
        assert_same(found["torch"], found["fsdp_c"])
        # torch casts a replacement to the dtype of the replaced buffer
        if kind != LOCAL and change is not replaced:
            assert {name: value.dtype for name, value in found["fsdp_c"].items()} == dtypes


@pytest.mark.parametrize("is_watched", [False, True])
@on_ranks(2)
def test_loads_give_the_buffers_and_errors_of_the_plain_module(is_watched: bool) -> None:
    seen: dict[str, list[str]] = {"plain": [], "fsdp_c": []}

    def loaded(which: str) -> tuple[dict[str, Tensor], list[list[str]], str]:
        torch.manual_seed(0)
        with torch.device(device()):
            shared = torch.zeros(2)
            module = nn.Sequential(Counted(shared), Counted(shared))
        if is_watched:
            note = lambda _, keys: seen[which].extend(keys.missing_keys)  # noqa: E731
            module[1].register_load_state_dict_post_hook(note)
        state = module.state_dict().items()
        entries = {name: torch.full_like(value, 1 + index) for index, (name, value) in enumerate(state)}
        entries["1.none"] = entries.pop("0.count")
        model = module if which == "plain" else wrap(module)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(entries)
        for index in range(2):
            module[index].repeated = torch.zeros(4, device=device())
        found = model.load_state_dict(entries, strict=False)
        return model.state_dict(), [*found], str(caught.value)

    (expected, keys, words), (values, own_keys, own_words) = loaded("plain"), loaded("fsdp_c")
    assert_same(expected, values)
    assert values["0.shared"][0] == values["1.shared"][0] == 1 + list(expected).index("1.shared")
    assert own_keys == keys == [["0.count"], ["1.none"]] and seen["fsdp_c"] == seen["plain"]
    assert words.splitlines()[1:] == own_words.replace("_fsdp_wrapped_module.", "").splitlines()[1:]
    assert "1.repeated" in words


@on_ranks(2)
def test_load_hooks_of_an_inner_unit_see_its_buffers() -> None:
    model, found, missing = wrap(plain()), [], []
    block = model.blocks[0].module
    loads = block._load_from_state_dict
    block._load_from_state_dict = lambda *args: (found.extend(args[0]), loads(*args))
    state = full_state_dict(model)
    model.load_state_dict(state)
    assert len(found) == len(dict(block.named_buffers()))
    model.blocks[1].register_load_state_dict_post_hook(lambda _, keys: missing.extend(keys.missing_keys))
    model.load_state_dict(state)
    buffers = {f"blocks.1.{name}" for name, _ in block.named_buffers()}
    assert buffers <= state.keys() and not buffers.intersection(missing)


@both_views
@on_ranks(2)
def test_strict_load_names_missing_and_unexpected_keys_as_the_user_does(use_orig_params: bool) -> None:
    model = wrap(plain(), use_orig_params)
    other = plain(3).state_dict()
    del other["blocks.0.up.bias"]
    other["blocks.1.nothing"] = torch.zeros(1)
    result = model.load_state_dict(other, strict=False)
    assert result.missing_keys == ["blocks.0.up.bias"] and result.unexpected_keys == ["blocks.1.nothing"]
    expected = plain(3).state_dict() | {"blocks.0.up.bias": plain().state_dict()["blocks.0.up.bias"]}
    assert_same(expected, full_state_dict(model))
    with pytest.raises(RuntimeError, match="blocks.0.up.bias") as caught:
        model.load_state_dict(other)
    assert "_fsdp_wrapped_module" not in str(caught.value)


@on_ranks(2)
def test_selection_returns_the_previous_settings_and_warns() -> None:
    holder = nn.Sequential(wrap(plain()), nn.Linear(1, 1))
    fsdp = implementation("fsdp_c")
    with pytest.warns(
        FutureWarning, match=r"FSDP.state_dict_type\(\) and FSDP.set_state_dict_type\(\) are being deprecated"
    ):
        previous = fsdp.set_state_dict_type(holder, SHARDED)
    assert (previous.state_dict_type, previous.state_dict_config) == (FULL, FullStateDictConfig())
    current = fsdp.get_state_dict_type(holder)
    assert type(current.state_dict_config) is ShardedStateDictConfig
    assert type(current.optim_state_dict_config) is ShardedOptimStateDictConfig
    assert fsdp.get_state_dict_type(nn.Linear(1, 1)) is None
    assert fsdp.set_state_dict_type(nn.Linear(1, 1), FULL).state_dict_type is None


class Refuses(nn.Linear):
    """A module that cannot be saved."""

    def get_extra_state(self) -> object:
        raise ZeroDivisionError

    def set_extra_state(self, state: object) -> None: ...


@on_ranks(2)
def test_failed_save_leaves_the_model_as_it_was() -> None:
    """torch leaves the parameters unsharded."""
    module = Refuses(3, 3)
    model = wrap(module, auto_wrap_policy=None)
    shown = module.weight
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model.state_dict()
        assert module.weight is shown


@on_ranks(2)
def test_saved_entries_are_logged_at_info() -> None:
    logger = logging.getLogger("fsdp_c.state.state_dict")
    with collected(logger.name) as found, mock.patch.object(logger, "isEnabledFor", lambda level: True):
        state = wrap(plain()).state_dict()
    records = [one.text for one in found if one.kind is logging.LogRecord]
    assert len(records) == len(state)
    assert any(text.startswith("inp.weight: shape=(") for text in records)


# ----------------------------------------------------------------- versions of modules


class Versioned(nn.Module):
    """Records the version of its entry in a loaded dict."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Layer(Versioned, nn.Linear):
    _version = 3


class Tower(Versioned):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(Layer(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.blocks = nn.Sequential(inner, Layer(WIDTH, 1))


def versions_seen(model: nn.Module) -> list[int]:
    return [module.seen for module in model.modules() if isinstance(module, Versioned)]


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@both_views
@on_ranks(2)
def test_modules_see_the_version_that_their_dict_was_saved_with(
    use_orig_params: bool, kind: StateDictType
) -> None:
    def wrapped(which: str = "fsdp_c") -> Any:
        policy = ModuleWrapPolicy({nn.Sequential, Layer})
        model = wrap(Tower(), use_orig_params, which, auto_wrap_policy=policy)
        type(model).set_state_dict_type(model, kind)
        return model

    expected = Tower().state_dict()._metadata
    state = wrapped().state_dict()
    assert list(state._metadata.items()) == list(expected.items())
    assert "_fsdp_wrapped_module.blocks" in wrapped("torch").state_dict()._metadata
    for loaded in (state, wrapped("torch").state_dict()):
        model = wrapped()
        model.load_state_dict(loaded)
        assert versions_seen(model) == [2, 3, 3]
    assert list(state._metadata.items()) == list(expected.items())
    if kind == FULL:
        module, model = Tower(), wrapped()
        module.load_state_dict(state)
        assert versions_seen(module) == [2, 3, 3]
        model.load_state_dict(state_dict=module.state_dict(), strict=True)
        assert versions_seen(model) == [2, 3, 3]
        del state._metadata
        model.load_state_dict(state)
        assert versions_seen(model) == [None] * 3
    outer = nn.ModuleList([wrapped(), nn.Linear(1, 1)])
    outer.load_state_dict(outer.state_dict())
    assert versions_seen(outer) == [2, 3, 3]
