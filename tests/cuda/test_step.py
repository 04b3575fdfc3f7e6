"""Properties of a step that only a GPU shows: memory, waits, and results independent of timing."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c._runtime_utils import _lazy_init
from tests.cuda.test_parity import CPU, GPU, TIMEOUT_S, Upstream, over_nccl
from tests.ranks import all_strategies, both_views, on_ranks

WIDTH = 1024
LAYERS = 8
UNIT_NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TRANSFERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": BF16, "forward_prefetch": True, "limit_all_gathers": False},
    "offload": {"cpu_offload": CPUOffload(True)},
    "offload, bf16": {"cpu_offload": CPUOffload(True), "mixed_precision": BF16},
}


def requested(kind: str = "current") -> int:
    torch.cuda.init()
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])


def failures() -> int:
    """Return how often an allocation failed at first: torch's allocator then freed cached memory, or raised."""
    stats = torch.cuda.memory_stats()
    return int(stats["num_alloc_retries"] + stats["num_ooms"])


def large(fsdp: Any = FSDP, **options: Any) -> Any:
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    chosen = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": True}
    return fsdp(layers, device_id=GPU, **chosen | options)


@pytest.fixture
def one_of_four() -> Iterator[None]:
    """Make this process one rank of a group whose collectives send nothing. Memory and time are realistic,
    numbers are not.
    """
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()
    gc.collect()


def step(model: nn.Module) -> None:
    model(torch.randn(64, WIDTH, device=GPU)).square().mean().backward()
    model.zero_grad()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.usefixtures("one_of_four")
def test_a_step_takes_no_memory_that_the_first_ones_did_not_take(name: str, strategy: str) -> None:
    model = large(**TRANSFERS[name], sharding_strategy=ShardingStrategy[strategy])
    counts = []
    for steps in (3, 5):
        for _ in range(steps):
            step(model)
        gc.collect()
        counts.append(torch.cuda.memory_stats())
    for count in ("num_device_alloc", "reserved_bytes.all.peak", "allocated_bytes.all.current"):
        assert counts[0][count] == counts[1][count]


@pytest.mark.usefixtures("one_of_four")
def test_peak_memory_does_not_depend_on_timing() -> None:
    """The peak is equal whether the host runs far ahead of the device or waits for it after every unit."""
    peaks = []
    for slow in (False, True):
        model = large()
        for module in model.modules() if slow else ():
            module.register_forward_hook(lambda *_: torch.cuda.synchronize())
        step(model)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        base = requested()
        step(model)
        peaks.append(requested("peak") - base)
        del model
        gc.collect()
    assert peaks[0] == peaks[1]


@pytest.mark.usefixtures("one_of_four")
def test_a_step_never_waits_for_the_device() -> None:
    model = large(limit_all_gathers=False)
    step(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device=GPU).item()
        step(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("one_of_four")
def test_a_resized_tensor_of_freed_parameters_does_not_disturb_the_next_unshard() -> None:
    """Memory that grows is copied, on a stream that the cast of the shard does not wait for."""
    model, kept = large(**TRANSFERS["bf16"]), []
    model.module[0][0].module.register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()))
    step(model)
    kept[0].resize_(1)
    step(model)


@pytest.mark.usefixtures("one_of_four")
def test_steps_go_on_when_the_pool_can_grow_no_further() -> None:
    """Memory that another stream has freed is returned to the driver to make room."""
    step(large())
    gc.collect()  # otherwise freed memory of that model may make room during the step
    model = large()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(2**28, dtype=torch.uint8, device=GPU)  # freed at once, and cached by torch's allocator
    total = torch.cuda.get_device_properties(GPU).total_memory
    before = failures()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        step(model)
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures() > before  # the pool could not grow


@both_views
@pytest.mark.parametrize("name", ["plain", "bf16"])
@pytest.mark.usefixtures("one_of_four")
def test_gradients_of_no_sync_go_as_units_are_reduced(name: str, use_orig_params: bool) -> None:
    """At the end of the backward there are the gradients' shards, one unit in reduction, the next unit's
    gradients, and its parameters.
    """
    model = large(**TRANSFERS[name] | {"use_orig_params": use_orig_params})
    step(model)
    gc.collect()
    base, at_end = requested(), []
    batch = torch.randn(64, WIDTH, device=GPU, requires_grad=True)
    batch.register_hook(lambda _: at_end.append(requested() - base))
    with model.no_sync():
        model(batch).square().mean().backward()
    accumulated = requested() - base
    assert accumulated >= LAYERS * UNIT_NBYTES * (0.5 if name == "bf16" else 1)
    torch.cuda.reset_peak_memory_stats()
    model(batch).square().mean().backward()
    assert at_end[-1] <= (LAYERS / 4 + 4) * UNIT_NBYTES
    assert requested("peak") - base <= accumulated + 4 * UNIT_NBYTES


POLICIES: dict[str, Any] = {
    "by class": ModuleWrapPolicy({nn.Linear}),
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=WIDTH),
}


@pytest.fixture(params=[0.02, 0.2], ids=["late", "later than the script waits"])
def let_go_late(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Delay autograd's thread in freeing a backward that raised, until the script has gone on.

    ``raises`` is a tensor hook. The hook keeps the backward's Hook objects alive until a timer releases them; until
    then nothing of that backward is freed.
    """
    held: list[Any] = []

    def raises(gradient: Tensor) -> None:
        held.extend(one for one in gc.get_objects() if type(one).__name__ == "Hook")
        threading.Timer(request.param, held.clear).start()
        raise ArithmeticError("in backward")

    yield raises
    while held:
        time.sleep(0.001)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.usefixtures("one_of_four")
def test_an_optimizer_after_a_failed_backward_finds_the_gradients_of_before(
    strategy: str, let_go_late: Any
) -> None:
    """Gradients cleared by the optimizer stay cleared, however late the backward is freed."""
    model = large(sharding_strategy=ShardingStrategy[strategy])
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    batch = torch.ones(2, WIDTH, device=GPU)
    model(batch).sum().backward()
    gradients = [param.grad for param in params]
    handle = model.module[LAYERS // 2].register_forward_hook(
        lambda *told: told[-1].register_hook(let_go_late) and None
    )
    with pytest.raises(ArithmeticError, match="in backward"):
        model(batch).sum().backward()
    handle.remove()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(param.grad for param in params))
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.3)
    assert [one is other for one, other in zip(seen, gradients, strict=True)] == [True] * len(params)
    assert [param.grad for param in params] == [None] * len(params)


@both_views
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"cpu_offload": CPUOffload(True)}], ids=["plain", "offload"])
@pytest.mark.usefixtures("one_of_four")
def test_auto_wrapping_brings_a_model_to_the_device_unit_by_unit(
    options: dict[str, Any], policy: str, use_orig_params: bool
) -> None:
    """Besides the finished shards only one unit's parameters and flat parameter are on the device."""
    gc.collect()
    base = requested()
    torch.cuda.reset_peak_memory_stats()
    model = large(auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params, **options)
    shards = 0 if options else LAYERS * UNIT_NBYTES // 4
    assert requested() - base <= shards + 512 * LAYERS
    assert requested("peak") - base <= shards + 3 * UNIT_NBYTES
    del model


# ---- ranks


def results(model: Any, delay: int) -> list[Tensor]:
    """Return gradients, and parameters after each step, on a delayed device: a missing wait changes the
    numbers.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for index in range(4):
        if delay:
            torch.cuda._sleep(index * delay)
        model(torch.randn(64, WIDTH)).square().mean().backward()
        if delay:
            torch.cuda._sleep(delay)
        found += [param.grad.detach().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [param.detach().clone() for param in model.parameters()]
    return [one.cpu() for one in found]


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert [place for place, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("name", TRANSFERS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_results_do_not_depend_on_timing(name: str) -> None:
    group = over_nccl()
    options = TRANSFERS[name] | group
    assert_alike(results(large(**options), 0), results(large(**options), 3_000_000))


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_steps_under_streams_of_the_user_give_the_same() -> None:
    group = over_nccl()
    expected = results(large(**group), 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        actual = results(large(**group), 3_000_000)
    assert_alike(expected, actual)


FULL = (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig())
SHARDED = (
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(),
    ShardedOptimStateDictConfig(offload_to_cpu=True),
)


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_sharded_state_dict_on_the_cpu_takes_as_little_of_the_device_as_torch_s() -> None:
    def taken(fsdp: Any) -> tuple[int, list[Tensor]]:
        model = large(fsdp, use_orig_params=False, **group)
        step(model)
        gc.collect()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with fsdp.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
        ):
            values = model.state_dict()
        return torch.cuda.max_memory_allocated() - base, [value.local_tensor() for value in values.values()]

    group = over_nccl()
    (theirs, their_rows), (ours, our_rows) = taken(Upstream), taken(FSDP)
    assert ours < 1.1 * theirs, (ours, theirs)
    assert {row.device.type for row in our_rows} == {"cpu"}
    assert_alike(their_rows, our_rows)


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@pytest.mark.parametrize("name", ["plain", "offload"])
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_state_dicts_restore_model_and_optimizer_over_nccl(name: str, kind: Any) -> None:
    """NCCL sends from the GPU only, whether shards and state dicts are on the GPU or the CPU."""
    group = over_nccl()
    model = large(**TRANSFERS[name] | group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with FSDP.state_dict_type(model, *kind):
        train_once(model, optimizer)
        saved, saved_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        train_once(model, optimizer)
        expected = state_of(model, optimizer)
        train_once(model, optimizer)
        model.load_state_dict(saved)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved_optimizer))
        train_once(model, optimizer)
    assert_alike(state_of(model, optimizer), expected)


def train_once(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(2)
    model(torch.randn(8, WIDTH, device=GPU)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [param.detach() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for _, value in sorted(state.items())]
    return [tensor.cpu().clone() for tensor in tensors]


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_summon_full_params_writes_back_over_nccl() -> None:
    group = over_nccl()
    for options in TRANSFERS.values():
        model = large(**options | group)
        with FSDP.summon_full_params(model):
            for param in model.parameters():
                param.data.fill_(0.5)
        with FSDP.summon_full_params(model, writeback=False):
            assert all(bool((param == 0.5).all()) and param.device == GPU for param in model.parameters())


# ---- models moved off the device between steps


def move(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the model between devices as libraries for reinforcement learning do around a rollout, checks
    included.
    """
    _lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        if handle._offload_params:
            continue
        flat_param = handle.flat_param
        assert flat_param.data.data_ptr() == flat_param._local_shard.data_ptr()
        assert flat_param.data.size() == flat_param._local_shard.size()
        handle.flat_param_to(device, non_blocking=True)
        flat_param._local_shard = flat_param.data
        assert flat_param.device == device
    for state in optimizer.state.values():
        state.update({key: value.to(device) for key, value in state.items() if key != "step"})
    torch.cuda.empty_cache()


@both_views
@pytest.mark.parametrize("name", TRANSFERS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_model_that_leaves_the_device_between_steps_trains_as_one_that_stays(
    name: str, use_orig_params: bool
) -> None:
    seen = []
    group = over_nccl()
    for leaves in (False, True):
        model = large(**TRANSFERS[name] | group | {"use_orig_params": use_orig_params})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            train_once(model, optimizer)
            if leaves and name.startswith("offload"):
                move(model, optimizer, CPU)
            elif leaves:
                move(model, optimizer, CPU)
                with pytest.raises(AssertionError, match=r"compute device cuda:0, was on cpu.*flat_param_to"):
                    model(torch.randn(8, WIDTH))
                move(model, optimizer, GPU)
        seen.append(state_of(model, optimizer))
    assert_alike(*seen)


@pytest.mark.parametrize("name", ["plain", "bf16"])
@pytest.mark.usefixtures("one_of_four")
def test_model_that_leaves_the_device_leaves_nothing_there(name: str) -> None:
    """empty_cache() also returns the memory of the pool for all-gathers."""
    # cuBLAS's workspace
    train_once(plain := nn.Linear(WIDTH, WIDTH, device=GPU), torch.optim.SGD(plain.parameters()))
    del plain
    torch.cuda.empty_cache()
    before = held()
    model = large(**TRANSFERS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_once(model, optimizer)
    move(model, optimizer, CPU)
    del optimizer
    gc.collect()
    torch.cuda.empty_cache()
    live, reserved = (now - then for now, then in zip(held(), before, strict=True))
    assert live < 2**19 and reserved <= 2 * 2**20  # at most one of the allocator's segments for small tensors
    move(model, torch.optim.SGD(model.parameters()), GPU)
    step(model)


def small(strategy: str, **options: Any) -> Any:
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    how = ShardingStrategy[strategy]
    return FSDP(
        layers,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=GPU,
        sharding_strategy=how,
        **options,
    )


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_handles_may_outlive_their_model() -> None:
    """As in a mock that has recorded its arguments. The collector clears the first unit before the root's streams."""
    model = small("FULL_SHARD")
    model(torch.ones(4, 6, device=GPU)).sum().backward()
    model(torch.ones(4, 6, device=GPU))  # the memory of its last unit stays held
    handles = [unit._handle for unit in FSDP.fsdp_modules(model) if unit._handle]
    gone = weakref.ref(model)
    model.itself = [model]
    del model
    gc.collect()
    assert gone() is None
    overwritten = [bytearray(b"\xff" * nbytes) for nbytes in range(64, 1 << 14, 8) for _ in range(4)]
    handles.clear()
    assert overwritten


def accumulate(model: Any, rank: int, step: int, sync: bool) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(GPU)
    with contextlib.nullcontext() if sync else model.no_sync():
        model(batch).square().mean().backward()


@pytest.mark.parametrize("sync", [True, False], ids=["reduced", "no_sync"])
@all_strategies
@both_views
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_gradients_leave_the_device_with_the_parameters(
    rank: int, use_orig_params: bool, strategy: str, sync: bool
) -> None:
    seen = []
    group = over_nccl()
    for leaves in (False, True):
        model = small(strategy, use_orig_params=use_orig_params, **group)
        accumulate(model, rank, 0, sync)
        before = [None if param.grad is None else param.grad.cpu() for param in model.parameters()]
        if leaves:
            model.cpu()
            for param, grad in zip(model.parameters(), before, strict=True):
                assert param.device == CPU and (param.grad is None) == (grad is None)
                assert param.grad is None or (param.grad.device == CPU and torch.equal(param.grad, grad))
            model.cuda()
        accumulate(model, rank, 1, sync)
        accumulate(model, rank, 2, sync=True)
        seen.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
        assert seen[-1]
    assert_alike(*seen)


@pytest.mark.parametrize("after", ["construction", "a backward"])
@both_views
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_whole_parameters_can_be_saved_where_they_have_been_moved_to(
    rank: int, use_orig_params: bool, after: str
) -> None:
    """torch can save after a step with use_orig_params. If an all-gather is needed, the error names a remedy."""
    group = over_nccl()
    model = small("NO_SHARD", use_orig_params=use_orig_params, **group)
    if after == "a backward":
        accumulate(model, rank, 0, sync=True)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    saved = model.cpu().state_dict()
    assert list(saved) == list(expected) and len(saved) == 4
    assert all(value.device == CPU and torch.equal(value, expected[name]) for name, value in saved.items())
    model.cuda().load_state_dict(saved)
    accumulate(model, rank, 1, sync=True)
    with pytest.raises(
        RuntimeError, match="unexpectedly has parameters on cpu. Make sure to move the module"
    ):
        small("FULL_SHARD", use_orig_params=use_orig_params, **group).cpu().state_dict()


def refusal(module: nn.Module, **options: Any) -> str:
    with pytest.raises(
        ValueError, match="^The module has CPU parameters or buffers when `sync_module_states=True`"
    ) as one:
        FSDP(module, sync_module_states=True, **options)
    return str(one.value)


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_values_on_the_cpu_that_the_group_cannot_send_are_refused(rank: int) -> None:
    """NCCL cannot send tensors on the CPU. A group that also has gloo can."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    group = over_nccl()
    assert f"'0.weight' of unit 'Sequential' on rank {rank}, whose" in refusal(module.cpu(), **group)
    module.to(GPU)[1].running_var = torch.full((4,), float(rank), device="cpu")
    assert f"'1.running_var' of unit 'Sequential' on rank {rank}, whose process group" in refusal(
        module, **group
    )
    assert "Pass device_id" in refusal(module, **group)
    assert FSDP(module, sync_module_states=True, device_id=GPU, **group).module[1].running_var.device == GPU
    other = nn.Linear(2, 2, device="cpu")
    other.register_buffer("own", torch.full((4,), float(rank), device="cpu"))
    FSDP(other, sync_module_states=True)
    assert torch.equal(other.own.cpu(), torch.zeros(4))


def held() -> tuple[int, int]:
    """Return the allocated bytes and the bytes reserved from the driver."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.usefixtures("one_of_four")
def test_streams_awaited_by_the_computation_have_high_priority(strategy: str) -> None:
    """torch uses high-priority streams for hybrid strategies only."""
    raised = {}
    for which, implementation in (("torch", Upstream), ("fsdp_c", FSDP)):
        options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = large(implementation, **options)
        with mock.patch.object(torch.cuda, "Stream", wraps=torch.cuda.Stream) as made:
            step(model)
        raised[which] = sum(-1 in (*call.args, *call.kwargs.values()) for call in made.call_args_list)
    assert raised == {"torch": 3 if strategy == "HYBRID_SHARD" else 0, "fsdp_c": 3}
