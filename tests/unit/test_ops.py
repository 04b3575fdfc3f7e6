"""torch.ops.fsdp_c.*: schemas, fake tensors, compilation and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map_only

import fsdp_c  # noqa: F401  (registers the ops)

OPS = torch.ops.fsdp_c

EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "pack_gradients": lambda: (torch.empty(16), [torch.randn(3), torch.randn(2, 2).bfloat16()], [0, 8], 3.0),
    "accumulate_shard": lambda: (torch.randn(8), torch.randn(8).bfloat16(), 2.0),
    "join_ranges": lambda: (
        [torch.empty(1, 2, dtype=torch.float64), torch.empty(())],
        [torch.randn(8), torch.arange(6)],
        [0, 4, 8, 1, 0, 8, 0, 0, 4],
        [2, 1],
    ),
}


def overload(name: str) -> Any:
    return getattr(OPS, name).default


@pytest.mark.parametrize("name", EXAMPLES)
def test_op_passes_opcheck(name: str) -> None:
    results = opcheck(overload(name), EXAMPLES[name]())
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_op_accepts_meta_tensors(name: str) -> None:
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), EXAMPLES[name]())
    assert overload(name)(*on_meta) is None


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_op_compiles_in_one_graph(name: str, dynamic: bool) -> None:
    arguments = EXAMPLES[name]()
    copies = tree_map_only(Tensor, torch.Tensor.clone, arguments)

    def call(*inputs: Any) -> Any:
        return overload(name)(*inputs), inputs

    torch.compiler.reset()
    expected = call(*arguments)
    actual = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*copies)
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


F = torch.ones(4)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("join_ranges", ([torch.ones(3)], [F], [0, 8, 12], [1]), r"elements \[8, 20\) lie outside of its"),
        ("join_ranges", ([F], [F], [1, 0, 4], [1]), "range 0 is of source 1 of 1"),
        ("join_ranges", ([F], [F], [0, 0], [1]), "a range is three numbers"),
        (
            "join_ranges",
            ([torch.ones(2)], [F], [0, 0, 4], [1]),
            "the ranges leave 4 bytes of output 0 unwritten",
        ),
        (
            "join_ranges",
            ([torch.ones(2)], [F], [0, 0, 4, 0, 0, 8], [2]),
            "range 1 has 8 bytes, but output 0 has 4 left",
        ),
        ("join_ranges", ([F], [F], [0, 0, 4], [2]), "more ranges counted than given"),
        ("join_ranges", ([torch.ones(0)], [F], [0, 0, 4], [0]), "ranges are left over"),
        ("join_ranges", ([F], [F], [0, 0, 16], []), "1 outputs, but 0 counts"),
        ("join_ranges", ([torch.ones(8)[::2]], [F], [0, 0, 16], [1]), "outputs must be contig"),
        ("pack_gradients", (torch.ones(2, 2), [], [], 1.0), "out must have one dimension, not 2"),
        ("pack_gradients", (torch.ones(8)[::2], [], [], 1.0), "out must be contiguous"),
        ("pack_gradients", (F.int(), [F], [0], 1.0), "out must be float32"),
        ("pack_gradients", (F, [F.int()], [0], 1.0), "each of grads must be float32"),
        ("pack_gradients", (torch.ones(8), [F, F], [0, 3], 1.0), "grad 1 begins at 3, before the end"),
        ("pack_gradients", (torch.ones(8), [F], [5], 1.0), "lie outside of out, which has 8"),
        ("pack_gradients", (torch.ones(8), [F], [], 1.0), "1 grads, but 0 offsets"),
        ("pack_gradients", (F, [F], [0], 0.0), "divisor must be positive, not 0"),
        ("accumulate_shard", (F, torch.ones(5), 1.0), "accumulator has 4 elements, shard 5"),
    ],
)
def test_refused_argument_is_named(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"fsdp_c::{name}: .*{message}"):
        overload(name)(*arguments)


def test_freed_storage_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="fsdp_c::pack_gradients: the storage of each of grads is freed"):
        OPS.pack_gradients(torch.ones(4), [tensor], [0], 1.0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_op_keeps_no_reference_to_its_inputs(name: str) -> None:
    arguments = EXAMPLES[name]()
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    before = [tensor._use_count() for tensor in tensors]
    overload(name)(*arguments)
    assert [tensor._use_count() for tensor in tensors] == before


def test_refusal_releases_every_input() -> None:
    out, grad = torch.ones(8), torch.ones(4)
    before = out._use_count(), grad._use_count()
    with pytest.raises(RuntimeError, match="before the end"):
        OPS.pack_gradients(out, [grad, grad], [0, 3], 1.0)
    assert (out._use_count(), grad._use_count()) == before


def test_the_op_of_views_is_refused_outside_of_fsdp_c() -> None:
    with pytest.raises(RuntimeError, match="segment_views is internal"):
        OPS.segment_views(torch.zeros(4))
