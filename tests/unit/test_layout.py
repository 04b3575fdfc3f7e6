"""FlatLayout compared with torch's FlatParamHandle. tests/native/test_fuzz_layout.c compares single elements."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

from fsdp_c._C import FlatLayout

# no deadline, as an example may take long on a busy machine; fixed examples in every run
settings.register_profile(
    "fsdp_c", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fsdp_c")

NUMELS = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=8)


def upstream_flat_param(
    numels: list[int], group: Any, sharded: bool, use_orig_params: bool, param_dtype: torch.dtype
) -> Any:
    """Return the sharded flat parameter that torch's FSDP1 makes of fp32 parameters of these sizes."""
    module = nn.ParameterList(torch.zeros(numel) for numel in numels)
    strategy = HandleShardingStrategy.FULL_SHARD if sharded else HandleShardingStrategy.NO_SHARD
    dtypes = (param_dtype, None, False)
    device = torch.device("cpu")
    handle = FlatParamHandle(list(module), module, device, strategy, False, *dtypes, group, use_orig_params)
    handle.shard()
    return handle.flat_param


@given(
    NUMELS.filter(any),  # torch fails an assertion for a unit without elements
    st.integers(1, 7),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_layout_equals_upstream_metadata(
    numels: list[int],
    world_size: int,
    data: st.DataObject,
    sharded: bool,
    use_orig_params: bool,
    param_dtype: torch.dtype,
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    group = FakeProcessGroup._create_internal(rank=rank, world_size=world_size)
    upstream = upstream_flat_param(numels, group, sharded, use_orig_params, param_dtype)
    aligned_numel = 16 // param_dtype.itemsize if use_orig_params else 0
    layout = FlatLayout(numels, aligned_numel, world_size, rank, sharded)

    assert layout.num_params == upstream._num_params
    assert layout.numel == upstream._unpadded_unsharded_size.numel()
    assert layout.shard_numel == upstream._sharded_size.numel()
    assert layout.shard_numel_padded == upstream._shard_numel_padded
    assert layout.param_numels == upstream._numels
    assert layout.numels_with_padding == upstream._numels_with_padding
    assert layout.is_padding_mask == tuple(upstream._is_padding_mask)
    infos = [
        (info.in_shard, info.offset_in_shard or 0, info.numel_in_shard or 0, info.intra_param_start_idx or 0)
        for info in upstream._shard_param_infos
    ]
    assert layout.shard_ranges() == tuple(infos)


def test_constructor_takes_keywords() -> None:
    layout = FlatLayout(param_numels=(9, 3, 6), aligned_numel=4, world_size=3, rank=2, sharded=True)
    assert (layout.world_size, layout.rank, layout.sharded, layout.num_params) == (3, 2, True, 3)
    assert layout.param_offsets == (0, 12, 16) and layout.padded_numel == 24
    assert (layout.shard_start, layout.shard_numel_valid) == (16, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([], 4, 2, 0, True), ValueError, "non-empty `param_numels`"),
        (([3, -1], 4, 2, 0, True), ValueError, r"`param_numels\[1\]` is -1"),
        (([3], -4, 2, 0, True), ValueError, "non-negative `aligned_numel` but got -4"),
        (([3], 4, 0, 0, True), ValueError, "positive `world_size` but got 0"),
        (([3], 4, 2, 2, True), ValueError, r"`rank` in \[0, 2\) but got 2"),
        (([3], 4, 2, -1, True), ValueError, r"`rank` in \[0, 2\) but got -1"),
        *(((one, 4, 2, 0, True), TypeError, "is not iterable") for one in (5, None)),
        *(((one, 4, 2, 0, True), TypeError, "interpreted as an integer") for one in (["a"], [1.5])),
        (([2**63], 4, 2, 0, True), OverflowError, "int too big"),
        (([2**62, 2**62], 4, 2, 0, True), OverflowError, "more elements than a 64-bit integer counts"),
        (([2**63 - 1, 0], 4, 2, 0, True), OverflowError, "more elements than a 64-bit integer counts"),
    ],
)
def test_impossible_argument_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        FlatLayout(*arguments)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranges_of_a_rank_outside_the_world_are_a_value_error(rank: int) -> None:
    with pytest.raises(ValueError, match=r"`rank` in \[0, 2\)"):
        FlatLayout([3], 4, 2, 0, True).shard_ranges(rank)


def test_layout_and_its_type_are_immutable() -> None:
    layout = FlatLayout([3], 4, 2, 0, True)
    for name in ("numel", "sharded", "param_numels", "anything"):
        with pytest.raises(AttributeError):
            setattr(layout, name, 1)
    with pytest.raises(TypeError):
        FlatLayout.numel = 1
    with pytest.raises(TypeError):
        type("Derived", (FlatLayout,), {})


def test_lists_of_a_layout_are_cached() -> None:
    """Lists are cached: a loop over n parameters that reads the list in each pass takes linear time."""
    layout = FlatLayout([3, 0, 5], 4, 2, 1, True)
    for name in ("param_numels", "param_offsets", "numels_with_padding", "is_padding_mask"):
        assert getattr(layout, name) is getattr(layout, name)
    assert layout.shard_ranges() is layout.shard_ranges() is layout.shard_ranges(1)
    assert layout.shard_ranges(0) == FlatLayout([3, 0, 5], 4, 2, 0, True).shard_ranges()
