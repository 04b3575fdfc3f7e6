"""A dry run of a step: what the runtime says it would gather, take and give back. The expected events are by
hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_c import _C

NAMES = {
    _C.DRY_RUN_GATHER: "gather",
    _C.DRY_RUN_TAKE: "take",
    _C.DRY_RUN_GIVE_BACK: "give",
    _C.DRY_RUN_GROW: "grow",
}
MIB = 2**20
PRE, POST = 1, 2
Unit = tuple[int, int, int, int, bool, bool, bool, bool, bool]


def unit(
    parent: int,
    nbytes: int = 10,
    strategy: int = _C.FULL_SHARD,
    backward_prefetch: int = PRE,
    forward_prefetch: bool = False,
    has_params: bool = True,
    is_trainable: bool = True,
    is_optional: bool = False,
) -> Unit:
    return (
        parent,
        nbytes,
        strategy,
        backward_prefetch,
        forward_prefetch,
        has_params,
        is_trainable,
        False,
        is_optional,
    )


def blocks(count: int, **settings: Any) -> tuple[Unit, ...]:
    """A root with parameters, and units inside."""
    return (unit(-1, **settings), *(unit(0, **settings) for _ in range(count)))


def run(units: tuple[Unit, ...], *sync_gradients: bool, **settings: Any) -> list[list[str]]:
    """What is reserved, then for each step its forward, and its backward with its end."""
    defaults = {
        "backward_prefetch_limit": 1,
        "forward_prefetch_limit": 1,
        "has_streams": False,
        "inputs_require_grad": False,
    }
    reserved, *parts = _C.dry_run(units, sync_gradients or (True, True), **defaults | settings)
    lists = [reserved]
    for forward, backward, end in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        lists += [forward, backward + end]
    return [[f"{NAMES[what]}{index}" for what, index, _ in events] for events in lists]


def words(text: str) -> list[str]:
    return text.split()


def test_each_step_has_a_forward_and_a_backward_after_what_is_reserved() -> None:
    reserved, *steps = run(blocks(2))
    assert reserved == []
    forward = words("gather0 take0 gather1 take1 give1 gather2 take2 give2")
    backward = words("gather2 take2 gather1 take1 give2 give1 give0")
    assert steps == [forward, backward, forward, backward]


def test_with_streams_the_unit_freed_last_in_forward_is_held_back_and_what_gathers_take_is_reserved() -> None:
    reserved, _, _, forward, backward = run(blocks(3), has_streams=True)
    assert reserved == words("take0 take1 take2 give0 give1 give2")
    assert forward == words("gather0 take0 gather1 take1 gather2 take2 give1 gather3 take3 give2")
    assert backward == words("gather3 gather2 take2 give3 gather1 take1 give2 give1 give0")


def reserved_first(*nbytes: int, **settings: Any) -> list[tuple[int, int, int]]:
    """What is taken before a step, of a root and units inside."""
    units = tuple(unit(0 if index else -1, size) for index, size in enumerate(nbytes))
    limits = {"backward_prefetch_limit": 1, "forward_prefetch_limit": 1}
    arguments = limits | {"has_streams": True, "inputs_require_grad": False} | settings
    return _C.dry_run(units, (True,), **arguments)[0]


def test_memory_grows_by_one_piece_for_all_that_is_held_at_a_time_and_a_rest_that_stays_free() -> None:
    grown, *taken = reserved_first(3 * MIB, 4 * MIB + 1, 2 * MIB, 6 * MIB)
    assert grown == (_C.DRY_RUN_GROW, 0, (3 + 4 + 6) * MIB + 512 + MIB + 512)
    assert [index for _, index, _ in taken] == [0, 3, 1, 0, 1, 3]


def test_the_piece_has_room_for_what_the_last_reduction_reads_where_that_is_more() -> None:
    """The root's; of a root without parameters, that of the first unit."""
    limits = {"backward_prefetch_limit": 1, "forward_prefetch_limit": 1, "has_streams": True}

    def grown(*units: tuple[int, ...]) -> int:
        return _C.dry_run(units, (True,), inputs_require_grad=False, **limits)[0][0][2] - MIB - 512

    root, block = (*unit(-1, 4 * MIB), 8 * MIB), (*unit(0, MIB + 512), 2 * MIB + 1024)
    assert grown(root, block) == 8 * MIB
    assert grown(root, block, block, (*unit(0, 3 * MIB), 20 * MIB)) == (4 + 3 + 1) * MIB + 512
    assert grown((*unit(-1, has_params=False), 0), (*unit(0, 4 * MIB), 16 * MIB)) == 16 * MIB
    assert grown((*unit(-1, 4 * MIB, is_trainable=False), 8 * MIB), block) == 5 * MIB + 512


def test_small_units_are_not_of_the_piece() -> None:
    grown, *_ = reserved_first(MIB, MIB + 1, MIB)
    assert grown == (_C.DRY_RUN_GROW, 0, MIB + 512 + MIB + 512)
    assert all(kind != _C.DRY_RUN_GROW for kind, _, _ in reserved_first(MIB, MIB, MIB))


def test_without_streams_no_memory_is_taken_before() -> None:
    assert reserved_first(3 * MIB, 4 * MIB, has_streams=False) == []


def test_what_is_gathered_ahead_in_forward_is_known_from_the_first_step() -> None:
    _, first, _, second, _ = run(blocks(3, forward_prefetch=True, backward_prefetch=0))
    assert first == words("gather0 take0 gather1 take1 give1 gather2 take2 give2 gather3 take3 give3")
    assert second == words("gather0 take0 gather1 take1 gather2 take2 give1 gather3 take3 give2 give3")


def test_limits_are_numbers_of_units_gathered_ahead() -> None:
    units = blocks(3, forward_prefetch=True)
    *_, forward, backward = run(units, backward_prefetch_limit=2, forward_prefetch_limit=3)
    assert forward == words("gather0 take0 gather1 take1 gather2 take2 gather3 take3 give1 give2 give3")
    assert backward == words("gather3 take3 gather2 take2 gather1 take1 give3 give2 give1 give0")


def test_under_no_sync_shard_grad_op_gathers_nothing_again_until_gradients_are_reduced() -> None:
    units = blocks(2, strategy=_C.SHARD_GRAD_OP)
    taken = words("gather0 take0 gather1 take1 gather2 take2")
    given = words("give2 give1 give0")
    assert run(units, False, False, True) == [[], taken, [], [], [], [], given]


def test_a_frozen_unit_goes_once_the_unit_before_it_is_reached() -> None:
    units = (unit(-1, has_params=False), unit(0), unit(0, is_trainable=False), unit(0))
    backward = run(units)[-1]
    assert backward == words("gather3 take3 gather2 take2 give3 gather1 take1 give2 give1")


def test_a_frozen_unit_behind_which_nothing_is_trained_is_not_gathered_for_the_backward() -> None:
    units = (unit(-1, is_trainable=False), unit(0, is_trainable=False), unit(0))
    *_, forward, backward = run(units, has_streams=True)
    assert forward == words("gather0 take0 gather1 take1 gather2 take2 give1")
    assert backward == words("gather2 give2 give0")
    *_, backward = run(units, has_streams=True, inputs_require_grad=True)
    assert backward == words("gather2 gather1 take1 give2 give1 give0")


def test_a_root_without_parameters_holds_nothing_back_after_its_forward() -> None:
    *_, forward, _ = run((unit(-1, has_params=False), unit(0), unit(0)), has_streams=True)
    assert forward == words("gather1 take1 gather2 take2 give1 give2")


def test_without_anything_to_train_there_is_no_backward_and_nothing_is_held_back() -> None:
    *_, forward, backward = run(blocks(1, is_trainable=False), has_streams=True)
    assert (forward, backward) == (words("gather0 take0 gather1 take1 give1 give0"), [])


def test_optional_units_are_taken_and_given_back_with_the_unit_around_them() -> None:
    """Also those inside an optional one; the unit around them need have nothing of its own."""
    optional = {"is_optional": True}
    units = (
        unit(-1, has_params=False),
        unit(0, **optional),
        unit(1, **optional),
        unit(0),
        unit(3, **optional),
    )
    *_, forward, backward = run(units)
    inner = words("gather3 take3 gather4 take4 give3 give4")
    assert forward == [*words("gather1 take1 gather2 take2"), *inner, *words("give1 give2")]
    assert backward == [
        *words("gather1 take1 gather2 take2"),
        *words("gather3 take3 gather4 take4 give4 give3"),
        *words("give1 give2"),
    ]


def test_what_is_there_already_is_neither_gathered_nor_taken() -> None:
    assert run(blocks(2, nbytes=0, strategy=_C.NO_SHARD)) == [[], [], [], [], []]


def test_the_end_of_a_backward_gives_back_what_nothing_else_did() -> None:
    units = (unit(-1, is_trainable=False), unit(0, is_trainable=True))
    settings = {"backward_prefetch_limit": 1, "forward_prefetch_limit": 1}
    _, _, backward, end = _C.dry_run(units, (True,), has_streams=False, inputs_require_grad=False, **settings)
    assert backward == [(_C.DRY_RUN_GATHER, 1, 10), (_C.DRY_RUN_TAKE, 1, 10), (_C.DRY_RUN_GIVE_BACK, 1, 10)]
    assert end == [(_C.DRY_RUN_GIVE_BACK, 0, 10)]


def test_the_unit_inside_whose_output_is_that_of_the_unit_around_it_is_gathered_first() -> None:
    units = (unit(-1, backward_prefetch=0), unit(0, backward_prefetch=0), unit(1, backward_prefetch=0))
    assert run(units)[-1] == words("gather2 take2 gather1 take1 give2 give1 give0")


@pytest.fixture
def foreign_prefetch() -> Iterator[None]:
    _C.replace("_get_handle_to_prefetch", lambda *arguments: pytest.fail("asked for a unit of a dry run"))
    yield
    _C.replace("_get_handle_to_prefetch", None)


def test_nothing_of_the_process_takes_part(foreign_prefetch: None) -> None:
    def state() -> tuple[int, int]:
        return _C.live_unsharded_nbytes(), _C.peak_unsharded_nbytes()

    gc.collect()
    before = state()
    assert len(run(blocks(3), has_streams=True)[-1]) > 0
    assert state() == before


def test_it_leaves_nothing_behind() -> None:
    run(blocks(3))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        run(blocks(3), has_streams=True)
    gc.collect()
    assert len(gc.get_objects()) <= before + 5


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ((), "at least the root"),
        ((unit(0),), "outer units come first"),
        ((unit(-1), unit(-1)), "outer units come first"),
        ((unit(-1), unit(1)), "outer units come first"),
    ],
)
def test_units_in_another_order_are_refused(units: tuple[Unit, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(units)


def test_a_unit_of_another_shape_is_refused() -> None:
    with pytest.raises(TypeError, match="a unit is"):
        run(((-1, 10),))  # type: ignore[arg-type]


def test_what_the_ranks_of_a_node_keep_is_gathered_by_the_backward_alone() -> None:
    within = {_C.DRY_RUN_GATHER_IN_NODE: "within", _C.DRY_RUN_KEEP: "keep", _C.DRY_RUN_FORGET: "forget"}
    units = tuple((*each, 0, 5) for each in blocks(2))
    settings = {"backward_prefetch_limit": 1, "forward_prefetch_limit": 1, "inputs_require_grad": False}
    _, forward, backward, end = _C.dry_run(units, (True,), has_streams=False, **settings)
    told = [
        [f"{(NAMES | within)[what]}{index}" for what, index, _ in events]
        for events in (forward, backward, end)
    ]
    assert told == [
        words("gather0 take0 gather1 take1 keep1 give1 gather2 take2 keep2 give2"),
        words("within2 take2 forget2 within1 take1 give2 forget1 give1 give0"),
        [],
    ]
    assert {
        nbytes for what, _, nbytes in forward + backward if what in (_C.DRY_RUN_KEEP, _C.DRY_RUN_FORGET)
    } == {5}
