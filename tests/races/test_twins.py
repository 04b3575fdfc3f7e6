"""The rows of ``benchmarks.timeline --standard`` as tiny models that compute, on real ranks of the simulated
GPU.

Each is wrapped as its row is, over ranks that stand for the row's nodes, and gives the bits of torch's FSDP1
there. The harness of the ranks looks for races and for memory that is given back early.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import simulated_gpu as device
from tests.models import HIDDEN, WIDTH
from tests.ranks import on_ranks
from tests.simulated_gpu import races

if not device.is_on():
    pytest.skip("needs the simulated GPU: python -m tests.simulated_gpu", allow_module_level=True)

import simulated_gpu  # noqa: E402

from benchmarks import timeline_models  # noqa: E402
from benchmarks.model_shapes import MODELS, Model  # noqa: E402
from benchmarks.timeline import STANDARD  # noqa: E402
from benchmarks.timeline_row import Row, machine_of  # noqa: E402
from tests.cuda.nccl_on_one_gpu import nccl_group  # noqa: E402

STEPS = 3
TIMEOUT_S = 180.0
GPU = torch.device("cuda", 0)


def row_of(settings: dict[str, Any], implementation: str = "fsdp_c") -> Row:
    return Row(implementation=implementation, **settings)


def is_on_one_node(settings: dict[str, Any]) -> bool:
    machine = machine_of(row_of(settings).machine)
    return machine["world_size"] == machine["gpus_per_node"]


def name_of(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


ON_ONE_NODE = [settings for settings in STANDARD if is_on_one_node(settings)]
ON_NODES = [settings for settings in STANDARD if not is_on_one_node(settings)]


def twin_of(model: Model) -> Model:
    """Of odd sizes, so that flat parameters are padded; the more blocks, the more there are."""
    sizes = {"width": WIDTH // 2 * 2 + 2, "hidden": HIDDEN, "blocks": model.blocks // 8, "vocabulary": 11}
    return replace(model, heads=1, sequence=4, **sizes)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of tensors that the CPU computes with as well."""
    after = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).triu(1)
    scores = (query.flatten(0, 1) @ key.flatten(0, 1).transpose(1, 2)).masked_fill(after, -torch.inf)
    return (scores.softmax(-1) @ value.flatten(0, 1)).view_as(value)


@functools.cache
def group_of(rows: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """This rank's among several, over NCCL, once per process. Collective."""
    nccl_group()  # which says how ranks of one GPU may use NCCL
    groups = [(ranks, dist.new_group(list(ranks), backend="nccl")) for ranks in rows]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def groups_of(row: Row) -> Any:
    """Shards within a node of two ranks and replicas across, or shards over all."""
    if row.strategy == "HYBRID_SHARD":
        return group_of(((0, 1), (2, 3))), group_of(((0, 2), (1, 3)))
    return nccl_group()


def train(row: Row, rank: int) -> list[Tensor]:
    """Everything a user can see, on the CPU."""
    torch.manual_seed(7)
    shape = twin_of(MODELS[row.model])
    with GPU:
        model: Any = timeline_models.Llama(shape, shape.sequence)
    for name in ("cosine", "sine"):
        getattr(model, name).copy_(
            torch.linspace(-1, 1, getattr(model, name).numel()).view_as(getattr(model, name))
        )
    model = timeline_models.fsdp1(row, model, process_group=groups_of(row))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen: list[Tensor] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(shape.vocabulary, (row.batch, shape.sequence), generator=generator).to(GPU)
        loss = model(tokens, tokens)
        loss.backward()
        seen += [loss.detach().cpu()]
        seen += [param.grad.cpu().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().cpu().clone() for param in model.parameters()]
    return seen


def assert_same_bits(rank: int, settings: dict[str, Any]) -> None:
    torch.cuda.set_device(GPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timeline_models, "attention", attention)
        expected = train(row_of(settings, "torch.fsdp1"), rank)
        races.forget()
        actual = train(row_of(settings), rank)
    assert len(expected) == len(actual) > 10 * STEPS
    assert all(
        one.isfinite().all() and torch.equal(one, other) for one, other in zip(expected, actual, strict=True)
    )
    seen = [one.double().sum().item() for one in actual]  # a loss in bf16 alone may be that of another step
    each = len(seen) // STEPS
    assert len({tuple(seen[at : at + each]) for at in range(0, len(seen), each)}) == STEPS


def reports_without_waits(rank: int, settings: dict[str, Any]) -> list[str]:
    """What is found where one wait after another is left out."""
    found = []
    for nth in range(20, 30):
        simulated_gpu.drop_wait(nth)
        train(row_of(settings), rank)
        torch.cuda.synchronize()
        found += simulated_gpu.reports()
    simulated_gpu.drop_wait(-1)
    return found


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_twin_that_waits_for_less_is_found(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timeline_models, "attention", attention)
        assert any(line.startswith("race") for line in reports_without_waits(rank, ON_ONE_NODE[0]))


@pytest.mark.parametrize("settings", ON_ONE_NODE, ids=name_of)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_rows_on_one_node_are_in_order(rank: int, settings: dict[str, Any]) -> None:
    assert_same_bits(rank, settings)


@pytest.mark.parametrize("settings", ON_NODES, ids=name_of)
@on_ranks(4, TIMEOUT_S, label="nccl")
def test_rows_on_several_nodes_are_in_order(rank: int, settings: dict[str, Any]) -> None:
    assert_same_bits(rank, settings)
