"""Arguments and results of the module's function over boxes. tests/native/test_fuzz_layout.c checks the boxes."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_c import _C


def test_a_range_is_split_into_offsets_and_sizes_of_boxes() -> None:
    assert _C.flat_range_boxes((2, 3), 1, 6) == (((0, 1), (1, 2)), ((1, 0), (1, 3)))
    assert _C.flat_range_boxes((3, 0, 2), 0, 0) == _C.flat_range_boxes((3, 2), 4, 4) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (bad, "is not a range of")
            for bad in [((2, 3), -1, 2), ((2, 3), 3, 2), ((2, 3), 0, 7), ((), 0, 2)]
        ),
        *(((shape, 0, 0), "shape") for shape in [(-1, 2), (2**40, 2**40), (1,) * 65]),
    ],
)
def test_impossible_range_or_shape_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.flat_range_boxes(*arguments)
