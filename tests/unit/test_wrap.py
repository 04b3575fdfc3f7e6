"""Auto wrapping: the chosen modules, their arguments, and errors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision
from fsdp_c import wrap as fsdp_wrap
from fsdp_c.sharding import wrap as sharding_wrap
from fsdp_c.sharding.sharded_module import units_with_paths
from fsdp_c.sharding.traversal import clean_path
from tests.collectives import fake_ranks

_group = fake_ranks(1, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(3)


BLOCKS = ["blocks.0", "blocks.1"]
PER_BLOCK = fsdp_wrap.ModuleWrapPolicy({Block})
LAYERS = functools.partial(fsdp_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})


def paths(model: nn.Module) -> list[str]:
    return [clean_path(path) for path, _ in units_with_paths(model)]


def test_policies_are_the_objects_of_torch() -> None:
    for name in set(fsdp_wrap.__all__) - {"split_frozen"}:
        assert getattr(fsdp_wrap, name) is getattr(torch_wrap, name)


@pytest.mark.parametrize(
    "policy",
    [
        PER_BLOCK,
        fsdp_wrap.CustomPolicy(lambda module: isinstance(module, Block) and {"forward_prefetch": True}),
        LAYERS,
        functools.partial(fsdp_wrap.lambda_auto_wrap_policy, lambda_fn=lambda one: isinstance(one, Block)),
        functools.partial(fsdp_wrap.size_based_auto_wrap_policy, min_num_params=25),
        lambda module, recurse, nonwrapped_numel: recurse or type(module).__name__ == "OptimizedModule",
    ],
    ids=["classes", "custom", "transformer", "lambda", "size", "compiled"],
)
def test_a_policy_that_chooses_a_compiled_module_makes_it_a_unit(policy: object) -> None:
    """The compiled module calls the original one directly, without any unit around it."""
    model = Model()
    model.blocks = nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(2))
    blocks = list(model.blocks)
    precision = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(Block,))
    with pytest.warns(UserWarning, match="Both mixed precision"):
        model = FSDP(model, auto_wrap_policy=policy, mixed_precision=precision, limit_all_gathers=False)
    assert paths(model) == ["", *BLOCKS]
    assert [unit.module for unit in model.blocks] == blocks
    assert [unit.mixed_precision.param_dtype for unit in model.blocks] == [None, None]
    assert model.blocks[0].forward_prefetch == isinstance(policy, fsdp_wrap.CustomPolicy)
    assert model.forward_prefetch is False and model.blocks[0].limit_all_gathers is False


def test_what_the_root_ignores_is_ignored_by_the_units_around_it() -> None:
    plain = Model()
    weight = plain.blocks[0].first.weight
    model = FSDP(plain, auto_wrap_policy=PER_BLOCK, ignored_states=[weight])
    assert model.blocks[0].module.first.weight is weight and weight.shape == (5, 3)
    assert model.blocks[0]._flat_param._fqns == ["first.bias", "second.weight", "second.bias"]
    plain = Model()
    ignored = [plain.blocks[0].first, plain.blocks[1]]
    model = FSDP(plain, auto_wrap_policy=PER_BLOCK, ignored_modules=ignored)
    assert paths(model) == ["", "blocks.0"]
    assert model.blocks[0]._flat_param._fqns == ["second.weight", "second.bias"]


@pytest.mark.parametrize("policy", [PER_BLOCK, LAYERS], ids=["object", "function"])
def test_batch_norm_becomes_a_unit_without_mixed_precision(policy: Any) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = FSDP(Model(), auto_wrap_policy=policy, mixed_precision=precision)
    assert paths(model) == ["", *BLOCKS, "norm"]
    assert model.norm.mixed_precision == MixedPrecision()
    assert model.blocks[0].mixed_precision is precision


def test_full_precision_module_answers_in_the_dtype_of_its_input() -> None:
    norm = nn.BatchNorm1d(3)
    seen = []
    sharding_wrap._keep_in_full_precision(nn.Sequential(norm), ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding_wrap._keep_in_full_precision(nn.Sequential(norm), (nn.BatchNorm1d,))
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert norm(torch.randn(4, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert norm(torch.randn(4, 3)).dtype is torch.float32
    assert seen == [torch.float32, torch.float32]


@contextlib.contextmanager
def nothing_warned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("split", ["use_orig_params", "split_frozen", "dtype"])
def test_partly_frozen_module_of_several_flat_parameters_gives_no_warning(split: str) -> None:
    plain = Model()
    plain.blocks[1].first.requires_grad_(False)
    if split == "dtype":
        plain.blocks[1].second.double()
    with nothing_warned(), fsdp_wrap.split_frozen() if split == "split_frozen" else contextlib.nullcontext():
        model = FSDP(plain, auto_wrap_policy=PER_BLOCK, use_orig_params=split != "use_orig_params")
    trainable, frozen = model.blocks[1].params
    assert trainable.requires_grad and not frozen.requires_grad


def test_a_frozen_parameter_of_two_modules_is_of_neither() -> None:
    plain = Model()
    plain.blocks[1].first = plain.blocks[0].first.requires_grad_(False)
    with nothing_warned():
        model = FSDP(plain, auto_wrap_policy=PER_BLOCK, use_orig_params=True)
    assert "blocks.0._fsdp_wrapped_module.first.weight" in model._flat_param._fqns


def test_wholly_frozen_module_is_wrapped_without_a_warning() -> None:
    plain = Model()
    plain.blocks[1].requires_grad_(False)
    with nothing_warned():
        model = FSDP(plain, auto_wrap_policy=PER_BLOCK)
    assert not model.blocks[1]._flat_param.requires_grad


def test_enable_wrap_builds_units_with_its_arguments() -> None:
    with fsdp_wrap.enable_wrap(wrapper_cls=FSDP, forward_prefetch=True):
        inner = fsdp_wrap.wrap(nn.Linear(2, 2))
    assert isinstance(inner, FSDP) and inner.forward_prefetch
    assert isinstance(fsdp_wrap.wrap(nn.Linear(2, 2)), nn.Linear)
