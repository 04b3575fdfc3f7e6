"""Warnings and errors for mistakes that torch's FSDP1 accepts silently, and none for similar correct code."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from tests.models import WIDTH, Block, Net
from tests.ranks import both_views, device, device_type, on_ranks
from tests.training import batch


def wrapped(kind: Any = FSDP, net: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(5)
    policy = ModuleWrapPolicy({Block})
    return kind(net or Net(), **({"auto_wrap_policy": policy, "device_id": device()} | options))


def backward(model: nn.Module, rank: int) -> Tensor:
    loss = model(batch(rank)).square().mean()
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def nothing_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_told_here(record: Any) -> None:
    """Assert that the warning has the script's line. On a GPU autograd's own thread warns, without a line."""
    assert record[0].filename == __file__ or device_type() == "cuda"


# ----------------------------------------------------------------- parameters outside every unit


def replace_head(model: Any, rank: int) -> nn.Linear:
    torch.manual_seed(7)
    head = nn.Linear(WIDTH, 3, device=device())
    model.module.head = head
    return head


def add_scale(model: Any, rank: int) -> None:
    scale = model.module.scale = nn.Parameter(torch.ones(1, device=device()))
    model.module.register_forward_hook(lambda module, args, output: output * scale)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("change", "names"), [(replace_head, "'head.weight', 'head.bias'"), (add_scale, "'scale'")]
)
@both_views
@on_ranks(2)
def test_a_parameter_that_no_unit_has_is_told_in_the_next_step_alone(
    rank: int, use_orig_params: bool, change: Callable[[Any, int], Any], names: str, steps_before: int
) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    for _ in range(steps_before):
        backward(model, rank)
    change(model, rank)
    match = rf"rank {rank}, unit Net: \[{names}\] got gradients, but belong to no unit"
    with pytest.warns(UserWarning, match=match) as record:
        backward(model, rank)
    assert_told_here(record)
    with nothing_told():
        backward(model, rank)


@on_ranks(2)
def test_only_a_registration_in_the_model_costs_a_further_check(rank: int) -> None:
    model = wrapped()
    backward(model, rank)
    runtime = model._unit.runtime
    nn.Sequential(nn.Linear(2, 2))
    backward(wrapped(), rank)
    assert not runtime.unchecked
    model.module.added = nn.Identity()
    assert runtime.unchecked
    backward(model, rank)
    assert not runtime.unchecked


def freeze(model: Any, rank: int) -> None:
    replace_head(model, rank).requires_grad_(False)


def reduce_by_hook(model: Any, rank: int) -> None:
    for param in replace_head(model, rank).parameters():
        param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad, dist.ReduceOp.AVG))


def wrap_again(model: Any, rank: int) -> None:
    model.module.head = FSDP(replace_head(model, rank), device_id=device())


def put_ddp_around(model: Any, rank: int) -> None:
    model.module.head = nn.parallel.DistributedDataParallel(replace_head(model, rank))


@pytest.mark.parametrize("done", [freeze, reduce_by_hook, wrap_again, put_ddp_around])
@on_ranks(2)
def test_a_head_that_is_frozen_or_reduced_may_be_replaced(
    rank: int, done: Callable[[Any, int], None]
) -> None:
    model = wrapped()
    done(model, rank)
    with nothing_told():
        backward(model, rank)


def ignoring_head(by_module: bool) -> tuple[Net, Any]:
    net = Net().to(device())
    return net, wrapped(net=net, ignored_states=[net.head] if by_module else list(net.head.parameters()))


@pytest.mark.parametrize("by_module", [True, False], ids=["module", "parameters"])
@on_ranks(2)
def test_what_is_ignored_and_trained_is_told_by_name_in_the_first_step_alone(
    rank: int, by_module: bool
) -> None:
    net, model = ignoring_head(by_module)
    match = rf"rank {rank}, unit Net: the ignored parameters \['head.weight', 'head.bias'\] got gradients, which no"
    with pytest.warns(UserWarning, match=match) as record:
        backward(model, rank)
    assert_told_here(record)
    with nothing_told():
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        backward(model, rank)
    net, model = ignoring_head(by_module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*the ignored parameters")
        backward(model, rank)


@on_ranks(2)
def test_units_of_one_rank_have_nobody_to_drift_from(rank: int, world_size: int) -> None:
    groups = [dist.new_group([one]) for one in range(world_size)]
    model = wrapped(process_group=groups[rank])
    replace_head(model, rank)
    with nothing_told():
        backward(model, rank)


# ----------------------------------------------------------------- an optimizer of before


@pytest.mark.parametrize("kind", [TorchFSDP, FSDP])
@on_ranks(2)
def test_an_optimizer_that_was_made_before_wrapping_trains_nothing(rank: int, kind: Any) -> None:
    net = Net().to(device())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = wrapped(kind, net)
    before = backward(model, rank)
    told = pytest.warns(UserWarning, match=f"rank {rank}, unit Net: SGD was made before wrapping")
    with told if kind is FSDP else contextlib.nullcontext() as record:
        optimizer.step()
    assert not record or record[0].filename == __file__
    optimizer.step()
    with nothing_told():
        assert torch.equal(backward(model, rank), before)


@on_ranks(2)
def test_an_optimizer_of_the_meta_device_is_told(rank: int) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = wrapped(net=net, use_orig_params=True)
    backward(model, rank)
    with pytest.warns(UserWarning, match="SGD was made before wrapping"):
        optimizer.step()


@both_views
@on_ranks(2)
def test_an_optimizer_that_holds_what_is_trained_is_no_mistake(rank: int, use_orig_params: bool) -> None:
    """Original parameters, or others that were put into the optimizer, as by Accelerate."""
    net = Net().to(device())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = wrapped(net=net, use_orig_params=use_orig_params)
    if not use_orig_params:
        optimizer.param_groups[0]["params"] = list(model.parameters())
    with nothing_told():
        before = backward(model, rank)
        optimizer.step()
        assert not torch.equal(backward(model, rank), before)


@both_views
@on_ranks(2)
def test_parameters_in_low_precision_that_are_stepped_without_masters_are_told_once(
    rank: int, use_orig_params: bool
) -> None:
    model = wrapped(net=Net().to(torch.bfloat16), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    match = rf"rank {rank}, unit Net: AdamW steps parameters in torch.bfloat16.*param_dtype=torch.bfloat16"
    model(batch(rank).to(torch.bfloat16)).sum().backward()
    with pytest.warns(UserWarning, match=match) as record:
        optimizer.step()
    assert record[0].filename == __file__
    with nothing_told():
        optimizer.step()
        model(batch(rank).to(torch.bfloat16)).sum().backward()
        precise = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        backward(precise, rank)
        torch.optim.AdamW(precise.parameters(), lr=1e-3).step()


# ----------------------------------------------------------------- torch's clipping


@pytest.mark.parametrize("kind", [TorchFSDP, FSDP])
@both_views
@on_ranks(2)
def test_torchs_clipping_clips_each_rank_by_its_own_norm(
    rank: int, world_size: int, use_orig_params: bool, kind: Any
) -> None:
    model = wrapped(kind, use_orig_params=use_orig_params)
    backward(model, rank)
    told = pytest.warns(
        UserWarning, match=rf"rank {rank}, unit Net: .*Call model.clip_grad_norm_\(max_norm\)"
    )
    with told if kind is FSDP else contextlib.nullcontext() as record:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    norms = [torch.empty_like(norm) for _ in range(world_size)]
    dist.all_gather(norms, norm)
    assert not torch.equal(*norms)
    assert not record or record[0].filename == __file__


@contextlib.contextmanager
def installed() -> Iterator[None]:
    for found in [one for one in gc.get_objects() if type(one) is TorchFSDP]:
        found.__class__ = nn.Module  # units that ran are never collected
    fsdp_c.install()
    try:
        yield
    finally:
        fsdp_c.uninstall()


# ----------------------------------------------------------------- errors about sharded parameters


def encoder(kind: type[nn.Module], use_orig_params: bool) -> FSDP:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return wrapped(net=net, auto_wrap_policy=ModuleWrapPolicy({kind}), use_orig_params=use_orig_params).eval()


@both_views
@on_ranks(2)
def test_a_fast_path_that_reads_past_its_units_names_unit_and_remedy(
    rank: int, use_orig_params: bool
) -> None:
    """torch's FSDP1 raises "expected 2-D `qkv_weight`, got 1-D tensor", or an error about an empty storage.
    Views of freed storage disable torch's fast path.
    """
    if device_type() == "cuda":
        pytest.skip("there is no fast path on a simulated GPU")
    x = torch.ones(2, 3, 8)
    model = encoder(nn.MultiheadAttention, use_orig_params)
    said = "unit TransformerEncoder: .*\"MultiheadAttention at 'layers.0.self_attn'\", .* are sharded now, .*"
    with torch.no_grad():
        if use_orig_params:
            with pytest.raises(RuntimeError, match=rf"rank {rank}, {said}set_fastpath_enabled\(False\)"):
                model(x)
        else:
            fast = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        if not use_orig_params:
            torch.testing.assert_close(fast, expected)
        torch.testing.assert_close(encoder(nn.TransformerEncoderLayer, use_orig_params)(x), expected)
    with pytest.raises(
        RuntimeError,
        match="are sharded now, outside of the forward of their unit.*or the module that reads them",
    ):
        encoder(nn.Linear, use_orig_params).train()(x)


class Waiting(nn.Linear):
    """A layer whose forward lets another thread run."""

    def forward(self, x: Tensor) -> Tensor:
        turn, self.turn = self.turn, None
        if turn is not None:
            turn()
        return super().forward(x)


@both_views
@on_ranks(2)
def test_two_threads_in_one_forward_are_told(rank: int, use_orig_params: bool) -> None:
    net = Waiting(WIDTH, WIDTH)
    model = wrapped(net=net, use_orig_params=use_orig_params)
    errors: list[BaseException] = []

    def forward() -> None:
        try:
            backward(model, rank)
        except RuntimeError as error:
            errors.append(error)

    def another_thread() -> None:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    net.turn = another_thread
    loss = backward(model, rank)
    assert len(errors) == 1
    assert f"rank {rank}, unit Waiting: another thread is inside a forward of this model" in str(errors[0])
    assert torch.equal(backward(model, rank), loss)


@both_views
@on_ranks(2)
def test_a_copy_is_refused_and_its_remedy_named(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    with pytest.raises(
        TypeError,
        match=r"\(Net\) cannot be copied .* AveragedModel, needs no copy: keep one .*examples/ema.py",
    ):
        torch.optim.swa_utils.AveragedModel(model)
