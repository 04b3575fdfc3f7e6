"""``reshard_after_forward``: a backward gathers within the node what the forward has gathered over all ranks.

Two nodes of two ranks. Whatever a program does, bits are those of torch's FSDP1.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.utils.checkpoint import checkpoint as recomputed

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import MixedPrecision
from fsdp_c.sharding import node_groups
from fsdp_c.wrap import ModuleWrapPolicy, reshard_after_forward, split_frozen
from tests.collectives import ALL_GATHER
from tests.distributed.test_checkpoint import folder_of_ranks
from tests.models import EqualBlocks
from tests.parity.engine import Point, compare
from tests.parity.programs import generate
from tests.parity.scenarios import CORE, NARROW, SCENARIOS, WIDE
from tests.parity.test_parity import COMPARED
from tests.parity.test_random_programs import compare_program
from tests.ranks import both_views, device, on_ranks
from tests.storage import HELD_BACK, live_nbytes, live_nbytes_after_a_failure, settled_nbytes

BLOCKS, WIDTH, NODE = 3, 16, 2
SEEDS = [range(10, 20), range(30, 40)]
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(ranks: Any = NODE, use_orig_params: bool = True, **kwargs: Any) -> FSDP:
    """A root and BLOCKS blocks, each a unit of WIDTH * WIDTH + WIDTH elements."""
    torch.manual_seed(0)
    model = EqualBlocks(BLOCKS, WIDTH).to(device())
    kwargs = {"auto_wrap_policy": ModuleWrapPolicy({type(model.blocks[0])}), **kwargs}
    with reshard_after_forward(ranks) if ranks is not None else contextlib.nullcontext():
        return FSDP(model, use_orig_params=use_orig_params, device_id=device(), **kwargs)


@contextlib.contextmanager
def recorded_gathers() -> Iterator[list[int]]:
    """Over how many ranks each all-gather in the body goes."""
    sizes: list[int] = []
    original = getattr(dist, ALL_GATHER)

    def record(output: Tensor, input: Tensor, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        assert output.numel() == input.numel() * group.size()
        sizes.append(group.size())
        return original(output, input, group=group, **kwargs)

    with mock.patch.object(dist, ALL_GATHER, record):
        yield sizes


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator(device()).manual_seed(rank), device=device())


def step(model: FSDP, rank: int) -> list[Tensor]:
    """Parameters after a forward, a backward and a step of an optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(*each) for each in zip(left, right, strict=True))


# ------------------------------------------------------------------ bits are torch's, whatever a program does


def points() -> Iterator[Point]:
    """Each scenario that parity knows, the one with original parameters, the next without, every third one in
    bf16."""
    known = [point for (point,) in (param.values for param in COMPARED) if isinstance(point, Point)]
    for index, scenario in enumerate((*CORE, *WIDE, *NARROW)):
        wanted = [point for point in known if point.scenario == scenario and point.strategy == "FULL_SHARD"]
        precision = "bf16_reduce_fp32" if index % 3 == 0 else "fp32"
        wanted.sort(
            key=lambda point: (point.precision != precision, point.use_orig_params != bool(index % 2))
        )
        yield wanted[0]


@pytest.mark.parametrize("point", [pytest.param(point, id=point.id) for point in points()])
@on_ranks(4)
def test_training_equals_torch(rank: int, world_size: int, point: Point) -> None:
    with reshard_after_forward(NODE):
        compare(point, SCENARIOS[point.scenario], rank, world_size)


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"seeds {seeds[0]} to {seeds[-1]}")
@on_ranks(4, timeout_s=180.0)
def test_random_programs_equal_torch(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        with reshard_after_forward(NODE):
            compare_program(generate(seed), rank, world_size)


# ------------------------------------------------------------------ what travels where


@both_views
@pytest.mark.parametrize("forward_prefetch", [True, False])
@on_ranks(4)
def test_backwards_gather_within_the_node(
    rank: int, world_size: int, forward_prefetch: bool, use_orig_params: bool
) -> None:
    model = build(use_orig_params=use_orig_params, forward_prefetch=forward_prefetch)
    for _ in range(3):
        with recorded_gathers() as sizes:
            step(model, rank)
        assert sizes == [world_size] * (BLOCKS + 1) + [NODE] * BLOCKS


@on_ranks(4)
def test_memory_that_runs_out_for_what_a_node_keeps_is_told_and_nothing_is_kept(rank: int) -> None:
    part_nbytes, resize, refused = (
        4 * (WIDTH * WIDTH + WIDTH) // NODE,
        torch.UntypedStorage.resize_,
        list[int](),
    )

    def refusing(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if nbytes in refused:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, nbytes)

    plain = build(None)
    with mock.patch.object(torch.UntypedStorage, "resize_", lambda *given: refusing(*given)):
        model = build()
        step(model, rank), step(plain, rank)
    before = settled_nbytes()
    refused.append(part_nbytes)
    told = f"rank {rank}, step 1: memory ran out while .* the all-gather of Sequential at 'blocks.0'. Smaller"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        model(batch(rank))
    refused.clear()
    assert live_nbytes() == before
    assert same(step(model, rank), step(plain, rank))


@pytest.mark.parametrize("limit", [1, 2, 3])
@on_ranks(4)
def test_so_they_do_when_several_are_gathered_ahead(rank: int, world_size: int, limit: int) -> None:
    model, plain = build(), build(None)
    for each in (model, plain):
        step(each, rank)
        each._exec_order_data._backward_prefetch_limit = limit
    with recorded_gathers() as sizes:
        found = step(model, rank)
    assert sizes == [world_size] * (BLOCKS + 1) + [NODE] * BLOCKS
    assert same(found, step(plain, rank))


@on_ranks(4)
def test_the_dimension_of_a_mesh_may_say_what_a_node_is(rank: int) -> None:
    mesh = init_device_mesh(device().type, (NODE, 2), mesh_dim_names=("place", "node"))
    across = init_device_mesh(device().type, (2, NODE), mesh_dim_names=("node", "place"))
    expected = step(build(None), rank)
    for node in (mesh["node"], across["node"]):  # ranks 0, 1 and 2, 3; and 0, 2 and 1, 3
        model = build(node)
        with recorded_gathers() as sizes:
            assert same(step(model, rank), expected)
        assert sizes.count(NODE) == BLOCKS


@on_ranks(4)
def test_the_environment_says_it_to_unmodified_scripts(rank: int) -> None:
    with mock.patch.dict("os.environ", {"FSDP_C_RESHARD_AFTER_FORWARD": "2"}):
        model = build(None)
    with recorded_gathers() as sizes:
        step(model, rank)
    assert sizes.count(NODE) == BLOCKS
    for text in ("two", "-2"):
        with (
            mock.patch.dict("os.environ", {"FSDP_C_RESHARD_AFTER_FORWARD": text}),
            pytest.raises(
                ValueError, match=f"FSDP_C_RESHARD_AFTER_FORWARD is '{text}': set it to the number of ranks"
            ),
        ):
            build(None)


@on_ranks(4)
def test_groups_are_made_once(rank: int) -> None:
    node_groups._groups_by_size.clear()
    first, second = build(), build()
    assert first._node_group.size() == NODE and first._node_group.rank() == rank % NODE
    for model in (first, second, build()):
        model(batch(rank))
    assert model._node_group is first._node_group
    assert first._node_group is second._node_group is first.blocks[0]._node_group is not None
    assert dist.get_process_group_ranks(first._node_group) == [rank // NODE * NODE, rank // NODE * NODE + 1]


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.filterwarnings("ignore:The `NO_SHARD`")
@on_ranks(4)
def test_units_that_stay_gathered_are_as_ever(rank: int, strategy: str) -> None:
    model = build(sharding_strategy=ShardingStrategy[strategy])
    with recorded_gathers() as sizes:
        step(model, rank)
    assert NODE not in sizes and model._node_group is None


@on_ranks(4)
def test_hybrid_units_that_shard_over_a_node_are_as_ever() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    assert model._node_group is None
    with pytest.raises(ValueError, match="the 2 ranks that share a unit do not fill nodes of 4"):
        build(4, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


@on_ranks(4)
def test_as_many_ranks_as_there_are_change_nothing(rank: int, world_size: int) -> None:
    model = build(world_size)
    with recorded_gathers() as sizes:
        step(model, rank)
    assert sizes == [world_size] * (2 * BLOCKS + 1)


# ------------------------------------------------------------------ what a backward may not see


def loss_of(model: FSDP, rank: int) -> Tensor:
    return model(batch(rank)).square().mean()


@on_ranks(4)
def test_a_forward_that_no_backward_follows_leaves_nothing_to_the_next(rank: int) -> None:
    """The parameters change in between, so that what was kept of the first forward would be wrong."""
    models = build(), build(None)
    found = []
    for model in models:
        loss_of(model, rank)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        found.append(step(model, rank))
    assert same(*found)


@on_ranks(4)
def test_parameters_written_in_between_are_seen(rank: int) -> None:
    """By a writeback of summon_full_params, or by loading: as under torch, the backward computes with the new
    ones."""
    found = []
    for model in (build(), build(None)):
        loss = loss_of(model, rank)
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        loss.backward()
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    assert found[0] and same(*found)


@pytest.mark.parametrize("how", ["full", "sharded", "checkpoint"])
@on_ranks(4)
def test_parameters_loaded_in_between_are_seen(rank: int, how: str) -> None:
    found = []
    for ranks in (NODE, None):
        model, other = build(ranks), build(ranks)
        with FSDP.summon_full_params(other), torch.no_grad():
            for param in other.parameters():
                param.mul_(1.5)
        kind = StateDictType.FULL_STATE_DICT if how == "full" else StateDictType.SHARDED_STATE_DICT
        loss = loss_of(model, rank)
        if how == "checkpoint":
            folder = folder_of_ranks() / "saved"
            fsdp_c.checkpoint.save(other, None, folder)
            fsdp_c.checkpoint.load(model, None, folder)
        else:
            with FSDP.state_dict_type(other, kind), FSDP.state_dict_type(model, kind):
                model.load_state_dict(other.state_dict())
        loss.backward()
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    assert found[0] and same(*found)


@on_ranks(4)
def test_a_second_backward_of_one_graph_gathers_over_all(rank: int) -> None:
    found, sizes_of = [], []
    for model in (build(), build(None)):
        loss = loss_of(model, rank)
        with recorded_gathers() as sizes:
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        sizes_of.append(sizes)
    assert same(*found)
    assert sizes_of[0].count(NODE) == BLOCKS and len(sizes_of[0]) == len(sizes_of[1])


@on_ranks(4)
def test_an_edit_inside_a_forward_is_lost_as_ever(rank: int) -> None:
    """What a module does to its gathered parameters is gone when they are freed, and the backward does not
    see it."""

    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    found = []
    for ranks in (NODE, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Edits(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(
            device()
        )
        with reshard_after_forward(ranks) if ranks else contextlib.nullcontext():
            wrapped = FSDP(
                model, auto_wrap_policy=ModuleWrapPolicy({Edits}), use_orig_params=True, device_id=device()
            )
        found.append(step(wrapped, rank))
    assert same(*found)


@pytest.mark.parametrize("moment", ["forward", "backward"])
@on_ranks(4)
def test_an_exception_leaves_nothing_behind(rank: int, moment: str) -> None:
    before = settled_nbytes()
    model, plain = build(), build(None)
    step(model, rank), step(plain, rank)
    raising = mock.Mock(side_effect=KeyError(moment))
    middle = model.blocks[1].module
    if moment == "forward":
        hook = middle.register_forward_hook(raising)
    else:
        hook = middle.register_full_backward_hook(raising)
    with pytest.raises(KeyError, match=moment):
        loss_of(model, rank).backward()
    hook.remove()
    assert live_nbytes_after_a_failure(before) == before
    assert same(step(model, rank), step(plain, rank))


# ------------------------------------------------------------------ memory, kinds of units


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_parts_are_kept_from_forward_to_backward_alone(rank: int, precision: MixedPrecision | None) -> None:
    nbytes = 2 if precision else 4
    block = (WIDTH * WIDTH + WIDTH) * nbytes
    base = settled_nbytes()
    model = build(mixed_precision=precision)
    step(model, rank)
    assert live_nbytes() == base
    loss = loss_of(model, rank)
    kept = BLOCKS * block // NODE
    assert live_nbytes() - base == (1 + HELD_BACK) * block + kept  # the root is whole
    loss.backward()
    assert live_nbytes() == base
    with torch.no_grad():
        model(batch(rank))
        assert live_nbytes() == base
    model(batch(rank).requires_grad_(False)).detach()
    step(model, rank)
    assert live_nbytes() == base


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_plan_and_summary_know_it(rank: int, world_size: int, precision: MixedPrecision | None) -> None:
    model = build(mixed_precision=precision)
    plain = EqualBlocks(BLOCKS, WIDTH)
    planned = fsdp_c.plan(
        plain,
        world_size=world_size,
        auto_wrap_policy=ModuleWrapPolicy({type(plain.blocks[0])}),
        mixed_precision=precision,
        use_orig_params=True,
        device_type=device().type,
        reshard_after_forward=NODE,
    )
    found = fsdp_c.summary(model)
    assert found.units == planned.units
    assert [unit.node_ranks for unit in found.units] == [NODE] * (BLOCKS + 1)
    step(model, rank)
    from fsdp_c import _C

    base = settled_nbytes()
    _C.peak_unsharded_nbytes(reset=True)
    step(model, rank)
    assert found.peak_unsharded_nbytes == _C.peak_unsharded_nbytes() - base
    block = found.units[1].all_gather_nbytes
    assert found.all_gather_nbytes == (2 * BLOCKS + 1) * block
    assert found.node_gather_nbytes == BLOCKS * block
    assert f"FULL_SHARD over {world_size} ranks, within {NODE} for its backward" in str(found)
    assert "of them within a node" in str(found)


class Mixed(nn.Module):
    """Frozen and trained parameters, integers, and a recomputation that is not reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        return self.base(x)[:, self.order] + self.adapter(x.double()).to(x.dtype)


@on_ranks(4)
def test_all_parts_of_a_unit_are_kept(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Mixed() for _ in range(3))).to(device())
    found = []
    for ranks in (NODE, None):
        with split_frozen(), reshard_after_forward(ranks) if ranks else contextlib.nullcontext():
            model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Mixed}), device_id=device())
        with recorded_gathers() as sizes:
            found.append([*step(model, rank), *step(model, rank)])
        assert sizes.count(NODE) == (2 * 3 * 3 if ranks else 0)  # steps, units, flat parameters
    assert same(*found)


class Chosen(nn.Module):
    """A root with a layer that a rank may leave out, between two that it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leaves_out = False
        fsdp_c.optional(self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != 1 or not self.leaves_out:
                x = torch.tanh(block(x))
        return x


@on_ranks(4)
def test_optional_units_are_gathered_over_all(rank: int) -> None:
    found = []
    for ranks in (NODE, None):
        torch.manual_seed(0)
        model = Chosen().to(device())
        with reshard_after_forward(ranks) if ranks else contextlib.nullcontext():
            wrapped = FSDP(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                use_orig_params=True,
                device_id=device(),
            )
        for leaves_out in (False, rank % NODE == 0, rank < NODE):
            model.leaves_out = leaves_out
            with recorded_gathers() as sizes:
                found.append(step(wrapped, rank))
            assert sizes.count(NODE) == (2 if ranks else 0)
    assert all(map(same, found[:3], found[3:]))


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        (1, ValueError, "takes at least 2 ranks, not 1: SHARD_GRAD_OP keeps a unit whole"),
        (True, TypeError, "takes a number of ranks or a DeviceMesh, not bool True"),
        ("node", TypeError, "takes a number of ranks or a DeviceMesh, not str 'node'"),
        (3, ValueError, "the 4 ranks that share a unit do not fill nodes of 3"),
        (8, ValueError, "the 4 ranks that share a unit do not fill nodes of 8"),
    ],
)
@on_ranks(4)
def test_what_is_no_node_is_refused(ranks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(ranks)


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused(rank: int) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("nodes", "node"))
    with pytest.raises(
        ValueError, match=r"takes a mesh of one dimension.* pass for instance mesh\[\"node\"\]"
    ):
        build(mesh)
    with pytest.raises(
        ValueError, match=rf"reshard_after_forward \(rank {rank}\): the node has ranks .* sharded"
    ):
        build(mesh["node"], device_mesh=mesh["nodes"])


@on_ranks(4)
def test_ranks_that_disagree_are_told(rank: int) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("nodes", "node"))
    model = build(mesh["node"] if rank else None)
    with pytest.raises(RuntimeError, match="reshard_after_forward is 0 on rank 0; 2 on ranks 1 to 3"):
        model(batch(rank))


@on_ranks(4)
def test_ranks_that_build_without_the_context_are_told(rank: int) -> None:
    """Groups are made once all ranks agree: those that made theirs while they wrap would wait for the
    others."""
    node_groups._groups_by_size.clear()
    model = build(NODE if rank else None)
    with pytest.raises(RuntimeError, match="reshard_after_forward is 0 on rank 0; 2 on ranks 1 to 3"):
        model(batch(rank))
