"""Where fsdp_c differs from torch's FSDP1 on purpose: torch's result and ours, one test per row of the parity table.

Row numbers are those of "Refuse or be right". Where torch kills the process, the docstring says so and only our result
is tested.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.models import WIDTH, Block, Net
from tests.parity.engine import implementation
from tests.ranks import on_ranks

CPU = torch.device("cpu")
BOTH = ("torch", "fsdp_c")


def wrap(which: str, module: nn.Module, **arguments: Any) -> Any:
    if "strategy" in arguments:
        arguments["sharding_strategy"] = ShardingStrategy[arguments.pop("strategy")]
    return implementation(which)(module, **({"device_id": CPU, "use_orig_params": True} | arguments))


def per_block(which: str, *, net: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return wrap(which, plain(**(net or {})), auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def plain(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def batch(rank: int, index: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * index + rank))


def full_gradients(model: Any) -> list[Tensor]:
    with type(model).summon_full_params(model, with_grads=True):
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_gradients(world_size: int, forwards: Callable[[nn.Module, int], Tensor], **options: Any) -> list[Tensor]:
    """The gradients of the unsharded model, averaged over the batches of all ranks."""
    model = plain(**options)
    sum(forwards(model, rank) / world_size for rank in range(world_size)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients_or_error(step: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    try:
        return step()
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)


# ----------------------------------------------------------------- reductions


@on_ranks(2)
def test_row_1_hybrid_shard_over_one_rank_reduces_over_its_replicas(rank: int, world_size: int) -> None:
    found = {}
    for which in BOTH:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        layer = nn.Linear(1, 1, bias=False)
        model = wrap(which, layer, strategy="HYBRID_SHARD", device_mesh=mesh)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        found[which] = [parameter.grad.item() for parameter in model.parameters()]
    assert found == {"torch": [0.5 * (1 + rank)], "fsdp_c": [1.5]}


@on_ranks(2)
def test_row_2_norm_after_an_inf_norm_is_right_on_a_rank_without_gradients(rank: int, world_size: int) -> None:
    """Torch writes the reduced inf norm into a zero that it keeps, and counts it in the next norm."""
    norms = {}
    for which in BOTH:
        model = wrap(which, nn.Linear(1, 1, bias=False))  # rank 1 holds none of its one element
        model(torch.full((1, 1), 3.0)).sum().backward()
        norms[which] = [model.clip_grad_norm_(100.0, float("inf")).item(), model.clip_grad_norm_(100.0, 2.0).item()]
    assert norms == {"torch": [3.0, pytest.approx(18**0.5)], "fsdp_c": [3.0, 3.0]}


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@on_ranks(2)
def test_row_3_offloaded_gradients_accumulate_outside_no_sync(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """Torch has no CPU offload on a CPU (row 7), so the expected sum is that of its training without offload."""
    with pytest.raises(RuntimeError, match="Cannot access accelerator device"):
        model = per_block("torch", cpu_offload=CPUOffload(offload_params=True), use_orig_params=use_orig_params)
        model(batch(rank)).sum().backward()
    models = [
        per_block("torch", use_orig_params=use_orig_params),
        per_block("fsdp_c", use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_params=True)),
    ]
    for model in models:
        for index in range(2):
            model(batch(rank, index)).sum().backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_row_4_evaluation_sees_the_optimizer_step_before_it(rank: int, world_size: int, strategy: str) -> None:
    stale = {}
    for which in BOTH:
        model = wrap(which, nn.Linear(WIDTH, WIDTH), strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(batch(rank)).sum().backward()
        with torch.no_grad():
            before = model(batch(rank))
            optimizer.step()
            after = model(batch(rank))
        stale[which] = torch.equal(before, after)
    assert stale == {"torch": True, "fsdp_c": False}


# ----------------------------------------------------------------- state dicts and summon


@on_ranks(2)
def test_row_5_full_state_dict_offloaded_on_a_cpu_is_returned_alive(rank: int, world_size: int) -> None:
    """Torch frees the storage that it returns and dies with SIGSEGV."""
    model = per_block("fsdp_c")
    config = FullStateDictConfig(offload_to_cpu=True)
    with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    for name, value in plain().state_dict().items():
        assert torch.equal(state[name], value), name


@on_ranks(2)
def test_row_5_summon_offloaded_on_a_cpu_works(rank: int, world_size: int) -> None:
    """Torch dies with SIGSEGV."""
    model = per_block("fsdp_c")
    with type(model).summon_full_params(model, offload_to_cpu=True, rank0_only=True, writeback=False):
        if rank == 0:
            for one, other in zip(model.parameters(), plain().parameters(), strict=True):
                assert torch.equal(one, other)
    loss = model(batch(rank)).sum()
    assert torch.equal(loss, plain()(batch(rank)).sum())


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"device_id": None}, "needs a non-CPU accelerator"),
        ({"device_id": None, "sync_module_states": True}, "needs a non-CPU accelerator"),
        ({"device_id": None, "cpu_offload": CPUOffload(offload_params=True)}, "needs a non-CPU accelerator"),
        ({"sync_module_states": True}, "requires them to be on GPU"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "Cannot access accelerator device"),
    ],
    ids=["no device", "no device, sync", "no device, offload", "sync", "offload"],
)
@on_ranks(2)
def test_row_7_the_cpu_is_a_device_like_others(
    rank: int, world_size: int, arguments: dict[str, Any], refusal: str
) -> None:
    def step(which: str) -> Tensor:
        torch.manual_seed(rank if "sync_module_states" in arguments else 0)
        model = wrap(which, nn.Linear(WIDTH, WIDTH), **arguments)
        model(batch(rank)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        with torch.no_grad():
            return model(batch(0))

    with pytest.raises((RuntimeError, ValueError), match=refusal):
        step("torch")
    outputs = [torch.empty(3, WIDTH) for _ in range(world_size)]
    dist.all_gather(outputs, step("fsdp_c"))
    assert torch.equal(*outputs)


@on_ranks(2)
def test_row_8_state_dict_type_is_restored_when_the_body_raises(rank: int, world_size: int) -> None:
    found = {}
    for which in BOTH:
        model = per_block(which)
        with pytest.raises(KeyError), type(model).state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            raise KeyError
        found[which] = type(model).get_state_dict_type(model).state_dict_type
    assert found == {"torch": StateDictType.SHARDED_STATE_DICT, "fsdp_c": StateDictType.FULL_STATE_DICT}


@on_ranks(2)
def test_row_9_no_shard_honours_rank0_only(rank: int, world_size: int) -> None:
    sizes = {}
    for which in BOTH:
        model = per_block(which, strategy="NO_SHARD")
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with type(model).state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            sizes[which] = len(model.state_dict())
    everything = len(plain().state_dict())
    assert sizes == {"torch": everything, "fsdp_c": everything if rank == 0 else 0}


@pytest.mark.parametrize("query", ["check_is_root", "state_dict"])
@on_ranks(2)
def test_row_11_a_query_on_an_inner_unit_decides_nothing(rank: int, world_size: int, query: str) -> None:
    def nested(which: str) -> Tensor:
        inner = wrap(which, plain())
        getattr(inner, query)()
        outer = wrap(which, nn.Sequential(nn.Linear(WIDTH, WIDTH), inner))
        loss = outer(batch(rank)).sum()
        loss.backward()
        assert outer.check_is_root() and not inner.check_is_root()
        return loss

    with pytest.raises(AssertionError, match="`_is_root` should not have been set yet"):
        nested("torch")
    assert nested("fsdp_c").isfinite()


# ----------------------------------------------------------------- autograd


@on_ranks(2)
def test_row_12_a_unit_trained_on_its_own_leaves_the_whole_model_right(rank: int, world_size: int) -> None:
    """Torch: what the unit's own backward left behind is added to the gradients of the next step."""

    def step(which: str) -> list[Tensor]:
        model = per_block(which)
        model(batch(rank)).sum().backward()
        model.zero_grad()
        model.module.blocks[0](batch(rank, 1)).square().sum().backward()
        model.zero_grad()
        model(batch(rank)).sum().backward()
        return full_gradients(model)

    expected = plain_gradients(world_size, lambda model, one: model(batch(one)).sum())
    with pytest.raises(AssertionError):
        assert_close(step("torch"), expected)
    assert_close(step("fsdp_c"), expected)


@on_ranks(2)
def test_row_12_gradients_of_a_unit_trained_on_its_own_are_handed_over(rank: int, world_size: int) -> None:
    model = per_block("fsdp_c")
    model(batch(rank)).sum().backward()
    model.zero_grad()
    unit = model.module.blocks[0]
    unit(batch(rank, 1)).square().sum().backward()
    expected = plain_gradients(world_size, lambda model, one: model.blocks[0](batch(one, 1)).square().sum())
    assert_close(full_gradients(unit), expected)


RETAINED: dict[str, str | None] = {
    "FULL_SHARD": "storage of size 0",
    "SHARD_GRAD_OP": "storage of size 0",
    "NO_SHARD": None,
}


@pytest.mark.parametrize("strategy", RETAINED)
@on_ranks(2)
def test_row_13_a_graph_can_be_walked_twice(rank: int, world_size: int, strategy: str) -> None:
    """Torch: freed storage is read, or, where nothing is freed, the second gradient is not reduced."""

    def step(which: str) -> list[Tensor]:
        model = per_block(which, strategy=strategy)
        loss = model(batch(rank)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return full_gradients(model)

    expected = plain_gradients(world_size, lambda model, one: 2 * model(batch(one)).sum())
    assert_close(step("fsdp_c"), expected)
    found = gradients_or_error(lambda: step("torch"))
    if RETAINED[strategy] is not None:
        assert RETAINED[strategy] in found
    else:
        with pytest.raises(AssertionError):
            assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_row_13_a_graph_can_be_walked_in_no_sync_and_then_reduced(rank: int, world_size: int, strategy: str) -> None:
    """Torch: freed storage, an assertion about `_saved_grad_shard`, or gradients that are not reduced."""

    def step(which: str) -> list[Tensor]:
        model = per_block(which, strategy=strategy)
        loss = model(batch(rank)).sum()
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        return full_gradients(model)

    expected = plain_gradients(world_size, lambda model, one: 2 * model(batch(one)).sum())
    assert_close(step("fsdp_c"), expected)
    found = gradients_or_error(lambda: step("torch"))
    if strategy == "NO_SHARD":
        with pytest.raises(AssertionError):
            assert_close(found, expected)
    else:
        assert {"FULL_SHARD": "storage of size 0", "SHARD_GRAD_OP": "_saved_grad_shard"}[strategy] in found


class OrderedOutput(collections.OrderedDict):
    """What model libraries return."""


class DictOutput(dict):
    """A dict with a name."""


@dataclasses.dataclass
class DataOutput:
    value: Tensor


class Returns(nn.Module):
    """Returns its output in a container, and remembers it."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.make = make
        self.returned: Any = None

    def forward(self, x: Tensor) -> Any:
        self.returned = self.make(self.layer(x))
        return self.returned


class Unknown:
    """An object that holds a tensor, of a class that nobody has told of."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class AroundUnknown(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        inner = Returns(Unknown)
        self.inner = inner if which == "plain" else wrap(which, inner)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).value)


@on_ranks(2)
def test_row_14_a_tensor_in_an_object_is_trained(rank: int, world_size: int) -> None:
    """D-044, X-082: torch puts no hook on it, and the backward reads storage that was freed."""

    def step(which: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(which, AroundUnknown(which))
        model(batch(rank).requires_grad_()).square().sum().backward()
        return full_gradients(model)

    torch.manual_seed(3)
    plain_model = AroundUnknown("plain")
    sum(plain_model(batch(other)).square().sum() / world_size for other in range(world_size)).backward()
    assert "storage" in gradients_or_error(lambda: step("torch"))
    assert_close(step("fsdp_c"), [parameter.grad for parameter in plain_model.parameters()])


@pytest.mark.parametrize(
    ("container", "type_of_torch"), [(OrderedOutput, OrderedOutput), (DictOutput, dict), (DataOutput, DataOutput)]
)
@on_ranks(2)
def test_row_15_outputs_are_returned_as_they_were(
    rank: int, world_size: int, container: type, type_of_torch: type
) -> None:
    for which in BOTH:
        unit = Returns(lambda value: container(value=value))
        output = wrap(which, unit)(batch(rank))
        assert (output is unit.returned) == (which == "fsdp_c")
        assert type(output) is (type_of_torch if which == "torch" else container)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, 4)

    def forward(self, sequence: PackedSequence) -> Tensor:
        return self.layer(sequence)[0].data


@on_ranks(2)
def test_row_16_a_packed_sequence_is_cast(rank: int, world_size: int) -> None:
    def run(which: str) -> Tensor:
        model = wrap(which, Recurrent(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        return model(pack_sequence([torch.ones(3, WIDTH), torch.ones(2, WIDTH)]))

    with pytest.raises(RuntimeError, match="must have the same dtype"):
        run("torch")
    assert run("fsdp_c").dtype == torch.bfloat16


@on_ranks(2)
def test_row_18_a_parameter_of_two_units_is_refused_by_name(rank: int, world_size: int) -> None:
    def run(which: str) -> None:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        wrap(which, nn.Sequential(wrap(which, first), nn.Sequential(wrap(which, second))))(batch(rank))

    with pytest.raises(RuntimeError, match="mat2 must be a matrix, got 1-D tensor"):
        run("torch")
    with pytest.raises(ValueError, match="'weight' of Linear.*wrap the module that contains both"):
        run("fsdp_c")


@on_ranks(2)
def test_row_19_gradients_missing_on_one_rank_are_zeros_of_their_own_dtype(rank: int, world_size: int) -> None:
    """Torch gathers float32 zeros among float64 gradients, and the process dies in the collective (SIGABRT)."""
    model = wrap("fsdp_c", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double())
    model(batch(rank).double()).sum().backward()
    own = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = None
    with type(model).summon_full_params(model, with_grads=True):
        found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.dtype == torch.float64 for gradient in found)
    assert found[0].count_nonzero() and not found[-1].count_nonzero()
    assert list(own.values()) == ([True, True, False, False] if rank == 0 else [False, False, True, True])


class Generator(nn.Linear):
    """A model that is used by another method than forward."""

    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x)


@on_ranks(2)
def test_row_17_error_of_an_unregistered_method_names_the_remedy(rank: int, world_size: int) -> None:
    messages = {}
    for which in BOTH:
        model = wrap(which, Generator(WIDTH, WIDTH))
        with pytest.raises(RuntimeError) as found:
            model.generate(batch(rank))
        messages[which] = str(found.value)
    assert "must be a matrix" in messages["torch"] and "must be a matrix" in messages["fsdp_c"]
    assert ["Generator" in message and "register_forward_method" in message for message in messages.values()] == [
        False,
        True,
    ]


@on_ranks(2)
def test_row_20_data_put_where_the_rank_holds_nothing_is_refused(rank: int, world_size: int) -> None:
    outputs = {}
    for which in BOTH:
        model = wrap(which, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        for parameter in model.parameters():
            if parameter.numel() == 0:
                parameter.data = torch.full((4,), 100.0)
        with torch.no_grad():
            outputs[which] = gradients_or_error(lambda model=model: [model(batch(rank))])
    assert outputs["torch"][0].abs().max() < 50  # lost
    assert f"rank {rank}" in outputs["fsdp_c"] and "summon_full_params(module, writeback=True)" in outputs["fsdp_c"]


@on_ranks(2)
def test_row_25_low_precision_gradients_of_tied_weights_are_kept(rank: int, world_size: int) -> None:
    keep = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)

    def step(which: str) -> set[torch.dtype]:
        model = per_block(which, net={"tied": True}, mixed_precision=keep)
        model(batch(rank)).sum().backward()
        return {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}

    failures = [isinstance(gradients_or_error(lambda: list(step("torch"))), str)]
    dist.all_gather_object(everywhere := [None] * world_size, failures[0])
    assert any(everywhere)
    assert step("fsdp_c") == {torch.bfloat16}


@on_ranks(2)
def test_new_data_of_a_flat_parameter_stays(rank: int, world_size: int) -> None:
    """Torch gathers from it once and then returns to the old shard without a word."""
    losses = {}
    for which in BOTH:
        model = wrap(which, nn.Linear(WIDTH, WIDTH), use_orig_params=False)
        model(batch(rank)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
        losses[which] = []
        for _ in range(3):
            loss = model(batch(rank)).sum()
            loss.backward()
            losses[which].append(loss.item() == 0.0)
    assert losses == {"torch": [True, False, False], "fsdp_c": [True, True, True]}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_row_26_two_forwards_through_a_reentrant_checkpoint_meet_in_one_backward(
    rank: int, world_size: int, strategy: str
) -> None:
    """Torch runs the second recomputation on parameters that are sharded again, or does not reduce its gradients."""

    def forwards(model: nn.Module, one: int) -> Tensor:
        return model(batch(one)).sum() + model(batch(one, 1)).sum()

    def step(which: str) -> list[Tensor]:
        model = per_block(which, net={"checkpoint_mode": "reentrant"}, strategy=strategy)
        forwards(model, rank).backward()
        return full_gradients(model)

    expected = plain_gradients(world_size, forwards)
    found = gradients_or_error(lambda: step("torch"))
    if strategy == "NO_SHARD":
        with pytest.raises(AssertionError):
            assert_close(found, expected)
    else:
        assert isinstance(found, str)
    assert_close(step("fsdp_c"), expected)
