"""The order of the collectives of a step, beside that of torch.

Collectives are recorded by replacing functions of ``torch.distributed``. Such a replacement is itself under test: it
is called in place of the native path.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

from benchmarks.common import NoopGroup
from tests.collectives import ALL_GATHER, ALL_GATHERS, REDUCE_SCATTER, REDUCE_SCATTERS
from tests.pairwise import pairwise
from tests.ranks import STRATEGIES, VIEWS, device, on_ranks
from tests.training import wrap

UNITS = 4
WIDTHS = (5, 6, 7, 8, 9)  # every unit has another size, which identifies its collectives
KINDS = {
    "all_gather": "AG",  # torch's way on the CPU
    "all_gather_single": "AG",
    "all_gather_into_tensor": "AG",
    "reduce_scatter_single": "RS",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
}


def build(which: str, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    """Return a root that owns the first layer, with three units that it calls one after the other."""
    torch.manual_seed(11)
    unit = functools.partial(wrap, which=which, strategy=strategy, **arguments)
    first, *others = (nn.Linear(*WIDTHS[index : index + 2]) for index in range(UNITS))
    return unit(nn.Sequential(first, *map(unit, others)))


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTHS[0], generator=torch.Generator(device()).manual_seed(rank))


def step(model: Any, rank: int) -> None:
    model(batch(rank)).square().mean().backward()


@contextmanager
def calls() -> Iterator[list[Any]]:
    """(kind, elements of all ranks together) of each collective."""
    seen: list[Any] = []

    def logged(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Tensor | list[Tensor], *rest: Any, **options: Any) -> Any:
            tensors = [first, *rest] if isinstance(first, Tensor) else [torch.cat(first)]
            seen.append((KINDS[name], max(one.numel() for one in tensors if isinstance(one, Tensor))))
            return original(first, *rest, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", ALL_GATHER, REDUCE_SCATTER, "all_reduce"):
            patch.setattr(dist, name, logged(name, getattr(dist, name)))
        yield seen


def counted(seen: list[Any]) -> dict[str, int]:
    return dict(Counter(kind for kind, _ in seen))


# ----------------------------------------------------------------- replacements


@pytest.mark.parametrize("name", ALL_GATHERS)
@on_ranks(2)
def test_replaced_all_gather_fills_the_parameters(rank: int, name: str) -> None:
    model = build("fsdp_c")
    before = model(batch(rank)).detach()
    original = dist.all_gather_into_tensor

    def zeros(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
        original(output, input, group=group)
        output.zero_()

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dist, name, zeros)
        assert model(batch(rank)).count_nonzero() == 0
    with torch.no_grad():
        assert torch.equal(model(batch(rank)), before)


@pytest.mark.parametrize(
    "strategy, name", [*(("FULL_SHARD", name) for name in REDUCE_SCATTERS), ("NO_SHARD", "all_reduce")]
)
@on_ranks(2)
def test_replaced_reduction_makes_the_gradients(rank: int, world_size: int, strategy: str, name: str) -> None:
    model = build("fsdp_c", strategy, use_orig_params=False)

    def rank_number(output: Tensor, *inputs: Tensor, group: Any = None, **options: Any) -> None:
        assert group is dist.group.WORLD
        assert [one.numel() for one in inputs] == [world_size * output.numel()] * (strategy != "NO_SHARD")
        output.fill_(rank + 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, rank_number)
        step(model, rank)
    (value,) = {value for parameter in model.parameters() for value in parameter.grad.tolist()}
    assert value == pytest.approx((rank + 1.0) / model._gradient_postdivide_factor)
    native = build("fsdp_c", strategy, use_orig_params=False)
    for one in (model, native):  # no longer replaced
        one.zero_grad()
        step(one, rank)
    for one, other in zip(model.parameters(), native.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# ----------------------------------------------------------------- order


def orders(which: str, rank: int, **arguments: Any) -> list[list[Any]]:
    """Return, for each of four steps, the third in no_sync, the collectives and the layers' forwards and backwards in
    order, and the gradients.
    """
    model = build(which, **arguments)
    steps = []
    with calls() as seen:

        def note(direction: str, index: int) -> Callable[..., None]:
            return lambda *ignored: seen.append((direction, index))

        first, *units = model.module
        for index, layer in enumerate([first, *(unit.module for unit in units)]):
            layer.register_forward_hook(note("forward", index))
            layer.register_full_backward_hook(note("backward", index))
        for index in range(4):
            seen.clear()
            with model.no_sync() if index == 2 else contextlib.nullcontext():
                step(model, rank)
            grads = [None if param.grad is None else param.grad.tolist() for param in model.parameters()]
            steps.append([*seen, ("gradients", grads)])
    return steps


def forward_part(order: list[Any]) -> list[Any]:
    last = max(index for index, event in enumerate(order) if event[0] == "forward")
    return order[: last + 1]


PREFETCH: dict[str, dict[str, Any]] = {
    "backward_pre": {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
    "backward_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "backward_none": {"backward_prefetch": None},
    "forward": {"forward_prefetch": True},
}


@pairwise(use_orig_params=VIEWS, strategy=STRATEGIES, mode=tuple(PREFETCH))
@on_ranks(2)
def test_collectives_and_computation_are_in_the_order_of_torch(
    rank: int, use_orig_params: bool, strategy: str, mode: str
) -> None:
    options = {"strategy": strategy, "use_orig_params": use_orig_params} | PREFETCH[mode]
    found = {which: orders(which, rank, **options) for which in ("torch", "fsdp_c")}
    # torch's views of a prefetched unit come early in the graph, so it reduces a layer late
    if mode == "forward":
        assert [sorted(one) for one in found["fsdp_c"]] == [sorted(one) for one in found["torch"]]
        found = {which: [forward_part(one) for one in steps] for which, steps in found.items()}
    assert found["fsdp_c"] == found["torch"]


class Telling(NoopGroup):
    """Writes down how its collectives are called."""

    def __init__(self) -> None:
        super().__init__(2)
        self.options: list[tuple[str, bool]] = []

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.options.append(("AG", opts is not None and opts.asyncOp))
        return super()._allgather_base(output, input, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.options.append(("RS", opts.asyncOp))
        return super()._reduce_scatter_base(output, input, opts)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self.options.append(("AR", opts.asyncOp))
        return self.broadcast(tensors)


@pytest.mark.parametrize("strategy, kinds", [("FULL_SHARD", {"AG", "RS"}), ("NO_SHARD", {"AR"})])
@on_ranks(1)
def test_collectives_are_not_async_so_nccl_runs_on_the_current_stream(
    rank: int, strategy: str, kinds: set[str]
) -> None:
    group = Telling()
    model = build("fsdp_c", strategy, process_group=group)
    group.options.clear()
    step(model, rank)
    step(model, rank)
    assert {kind for kind, _ in group.options} >= kinds
    assert {kind for kind, is_async in group.options if is_async} == set()
