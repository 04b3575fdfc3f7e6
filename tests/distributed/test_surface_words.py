"""Where what is private, printed or counted is not torch's: both results, as docs/behaviour.md has them."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _init_utils
from torch.distributed.fsdp._common_utils import TrainingState

from tests.collectives import ALL_GATHER
from tests.models import WIDTH
from tests.parity.engine import implementation
from tests.ranks import device, on_ranks
from tests.training import wrap

BOTH = ("torch", "fsdp_c")
X = (2, WIDTH)


def two_units(which: str, **arguments: Any) -> Any:
    inner = wrap(nn.Linear(WIDTH, WIDTH), which, **arguments)
    return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which, **arguments)


@on_ranks(2)
def test_a_wrong_training_state_is_said_in_the_error_alone(rank: int) -> None:
    printed, errors = {}, {}
    for which in BOTH:
        model = wrap(nn.Linear(WIDTH, WIDTH), which)
        out, trace = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(trace),
            pytest.raises(ValueError) as raised,
        ):
            model._assert_state(TrainingState.FORWARD_BACKWARD)
        printed[which], errors[which] = bool(out.getvalue() and trace.getvalue()), str(raised.value)
    assert printed == {"torch": rank == 0, "fsdp_c": False}
    assert errors["fsdp_c"] == f"{errors['torch']} (Linear, rank {rank})"


@on_ranks(2)
def test_the_mask_of_missing_gradients_stays_as_it_was_made(rank: int) -> None:  # B-031
    """Half of the two equal layers is each rank's shard: its first parameter with elements there is a
    weight."""
    masks = {}
    for which in BOTH:
        model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), which)
        model(torch.ones(X)).sum().backward()
        next(parameter for parameter in model.parameters() if parameter.numel()).grad = None
        model(torch.ones(X))
        masks[which] = model._handle.flat_param._is_grad_none_mask
    assert masks["torch"] == [index == 2 * rank for index in range(4)]
    assert masks["fsdp_c"] == [False] * 4


@on_ranks(2)
def test_a_flat_parameter_behind_frozen_ones_requires_a_gradient() -> None:  # B-037
    requires_grad = {}
    for which in BOTH:
        model = two_units(which)
        model(torch.ones(X)).sum().backward()
        model.zero_grad()
        model[1].requires_grad_(False)
        model(torch.ones(X)).sum().backward()
        requires_grad[which] = model[1]._handle.flat_param.requires_grad
        assert not any(parameter.requires_grad for parameter in model[1].parameters())
        assert all(parameter.grad is None for parameter in model[1].parameters())
    assert requires_grad == {"torch": False, "fsdp_c": True}


@on_ranks(2)
def test_what_gathers_is_the_same_on_every_device() -> None:  # C-056
    """Whoever replaces a collective finds the calls of a GPU on a CPU as well."""
    called = {}
    for which in BOTH:
        model = wrap(nn.Linear(WIDTH, WIDTH), which)
        model(torch.ones(X)).sum().backward()
        with contextlib.ExitStack() as replaced:
            functions = {
                name: replaced.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in ("all_gather", ALL_GATHER)
            }
            model(torch.ones(X))
        called[which] = {name for name, function in functions.items() if function.called}
    assert called == {
        "torch": {"all_gather" if device().type == "cpu" else ALL_GATHER},
        "fsdp_c": {ALL_GATHER},
    }


@on_ranks(2)
def test_the_roots_part_of_a_forward_is_a_range_of_the_root() -> None:  # D-130
    counts = {}
    for which in BOTH:
        model = two_units(which)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            model(torch.ones(X)).sum().backward()
        ranges = {event.key: event.count for event in profiler.key_averages()}
        counts[which] = [
            ranges[f"FullyShardedDataParallel.{name}"] for name in ("forward", "_root_pre_forward")
        ]
    assert counts == {"torch": [2, 2], "fsdp_c": [2, 1]}


@on_ranks(2)
def test_parameters_in_a_backward_hook_are_all_there_and_without_gradients(rank: int) -> None:
    """C-096: in a hook of the root's own layer, to which the backward comes when it has reduced the inner
    unit."""
    seen = {}
    for which in BOTH:
        model, shown = two_units(which), []

        def look(module: nn.Module, *grads: Any, model: Any = model, shown: list[Any] = shown) -> None:
            for name, parameter in model.named_parameters():
                has_gradient = parameter.is_leaf and parameter.grad is not None
                shown.append((name.rpartition(".")[2], parameter.is_leaf, has_gradient))

        model.module[0].register_full_backward_hook(look)
        model(torch.ones(X, requires_grad=True)).sum().backward()
        seen[which] = shown
    assert seen["torch"] == [("weight", True, True), ("bias", True, rank == 1)]
    assert seen["fsdp_c"] == [
        ("weight", False, False),
        ("bias", False, False),
        ("weight", True, False),
        ("bias", True, False),
    ]


@on_ranks(2)
def test_a_model_without_units_has_no_optimizer_state() -> None:
    errors: dict[str, list[type]] = {}
    plain = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for which in BOTH:
        errors[which] = []
        for name in ("full_optim_state_dict", "optim_state_dict"):
            with pytest.raises((IndexError, AttributeError)) as raised:
                getattr(implementation(which), name)(plain, optimizer)
            errors[which].append(raised.type)
    assert errors == {"torch": [IndexError, AttributeError], "fsdp_c": [IndexError, IndexError]}


@on_ranks(2)
def test_uses_are_not_counted() -> None:  # J-040
    counted = {}
    for which in BOTH:
        with mock.patch.object(torch._C, "_log_api_usage_once") as count:
            two_units(which)
        counted[which] = {call.args[0] for call in count.call_args_list if "fsdp" in call.args[0]}
    assert counted == {"torch": {"torch.distributed.fsdp"}, "fsdp_c": set()}


@on_ranks(2)
def test_torchdistx_is_not_asked() -> None:
    made = {}
    for which in BOTH:
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(_init_utils, "_TORCHDISTX_AVAIL", True))
            fake = patches.enter_context(mock.patch.object(_init_utils, "fake", create=True))
            deferred = patches.enter_context(mock.patch.object(_init_utils, "deferred_init", create=True))
            fake.is_fake.return_value = True
            wrap(nn.Linear(WIDTH, WIDTH), which)
            made[which] = deferred.materialize_module.call_count
    assert made == {"torch": 1, "fsdp_c": 0}


def memory_view(which: str) -> Any:
    """Asked again where the profiler of any rank has mixed up events of its own, which it refuses: now and
    then."""
    for _ in range(4):
        model = two_units(which, use_orig_params=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profiler:
            for _ in range(2):
                model(torch.ones(X)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        view = None
        with contextlib.suppress(AssertionError):
            view = profiler._memory_profile()
        refused = torch.tensor(int(view is None))
        dist.all_reduce(refused)
        if not refused:
            return view
    raise AssertionError("the profiler refused its own events four times in a row")


@on_ranks(2)
def test_the_memory_view_files_unsharded_gradients_under_input() -> None:
    """Sizes in bytes of what torch's profiler takes for gradients: those of whole units are torch's alone."""
    if device().type != "cpu":
        pytest.skip("the view is asked for the CPU")
    whole = 4 * (WIDTH * WIDTH + WIDTH)
    sizes = {}
    for which in BOTH:
        view = memory_view(which)
        found = {(str(view._categories.get(*version)), size) for _, _, version, size in view.timeline}
        sizes[which] = {size for category, size in found if category == "Category.GRADIENT"}
        assert which == "torch" or ("Category.INPUT", whole) in found
    assert {size for size in sizes["torch"] if size >= whole // 2} == {whole, whole // 2}
    assert {size for size in sizes["fsdp_c"] if size >= whole // 2} == {whole // 2}
