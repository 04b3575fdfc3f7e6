"""DTensors of several ranks' files are put together, whichever version of torch saved them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_c.checkpoint.pickles import Value
from fsdp_c.checkpoint.rank_files import Shape, Sharded, flat_places, is_flat, put_together
from fsdp_c.sharding.traversal import is_flat_param_name

WHOLE = torch.arange(12.0).view(4, 3)


def value(**attributes: Any) -> Value:
    made = Value()
    made.__setstate__(attributes)
    return made


LAYOUTS = {  # of a mesh of two dimensions: that of torch until 2.12, and torch 2.13's with either kind of shape
    "one shape": value(shape=(2, 2), stride=(2, 1)),
    "axes of numbers": value(axes=(value(shape=2, stride=2), value(shape=2, stride=1))),
    "axes of tuples": value(axes=(value(shape=(2,), stride=(2,)), value(shape=(2,), stride=(1,)))),
}
FLAT_LAYOUTS = {
    "a number": value(shape=4, stride=1),
    "one shape": value(shape=(4,), stride=(1,)),
    "axes": value(axes=(value(shape=4, stride=1),)),
}


def files(layout: Value, placements: list[Any], parts: list[torch.Tensor]) -> list[Sharded]:
    """The same DTensor as each rank's file has it."""
    mesh = value(_layout=layout, _rank_map=torch.arange(len(parts)))
    spec = value(mesh=mesh, placements=placements)
    args = (None, WHOLE.dtype, WHOLE.shape)
    return [Sharded(None, DTensor, args, {"_local_tensor": part, "_spec": spec}) for part in parts]


def assert_whole(found: Any) -> None:
    assert torch.equal(torch.cat([part.tensor for part in found.parts]), WHOLE)
    assert [part.offsets for part in found.parts] == [
        (4 * i // len(found.parts), 0) for i in range(len(found.parts))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_of_a_mesh_of_two_dimensions_are_taken_once(layout: str) -> None:
    first, second = WHOLE.chunk(2)
    parts = [first, second, first * 0, second * 0]
    found = put_together("w", files(LAYOUTS[layout], [Replicate(), Shard(0)], parts), {})
    assert len(found.parts) == 2
    assert_whole(found)


@pytest.mark.parametrize("layout", FLAT_LAYOUTS)
def test_shards_of_a_mesh_of_one_dimension_are_in_order(layout: str) -> None:
    assert_whole(put_together("w", files(FLAT_LAYOUTS[layout], [Shard(0)], list(WHOLE.chunk(4))), {}))


def test_a_mesh_of_another_size_than_the_files_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on a mesh of \[2, 2\] in 2 files"):
        put_together("w", files(LAYOUTS["one shape"], [Replicate(), Shard(0)], list(WHOLE.chunk(2))), {})


@pytest.mark.parametrize("name", ["_flat_param", "_flat_param_1", "_flat_param_12"])
def test_flat_parameters_are_known_by_their_names(name: str) -> None:
    assert is_flat_param_name(name) and is_flat(f"blocks.0.{name}")


@pytest.mark.parametrize(
    "name", ["0", "12", "_flat_param_", "_flat_param1", "_flat_param_x", "flat_param_1", "weight"]
)
def test_other_parameters_are_not(name: str) -> None:
    assert not is_flat_param_name(name) and not is_flat(name)


def test_several_flat_parameters_of_a_unit_are_refused() -> None:
    flats = {"0._flat_param": (4, 4), "0._flat_param_1": (6, 4)}
    with pytest.raises(
        ValueError, match=r"^0\._flat_param_1 is one of several .* save that as FULL_STATE_DICT"
    ):
        flat_places(flats, {"0.weight": Shape((4,), (1,))}, 2)
