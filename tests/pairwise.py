"""Parametrize tests by all pairs of values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

VIEWS = (pytest.param(True, id="orig"), pytest.param(False, id="flat"))  # of use_orig_params


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with few points in which any two values of different arguments meet.

    ``axes``: values of each argument, which may be ``pytest.param`` with an id.
    """
    points = list(product(*map(range, map(len, axes.values()))))
    missing = {pair for point in points for pair in _pairs(point)}
    chosen = []
    while missing:
        best = max(points, key=lambda point: len(missing & _pairs(point)))
        missing -= _pairs(best)
        chosen.append(best)
    params = [
        pytest.param(
            *(_value(values[index]) for values, index in zip(axes.values(), point, strict=True)),
            id="-".join(_id(name, axes[name][index], index) for name, index in zip(axes, point, strict=True)),
        )
        for point in sorted(chosen)
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def _pairs(point: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(point), 2))


def _value(value: Any) -> Any:
    return value.values[0] if isinstance(value, ParameterSet) else value


def _id(name: str, value: Any, index: int) -> str:
    if isinstance(value, ParameterSet):
        return str(value.id)
    shown = getattr(value, "__name__", value)
    return str(shown) if shown is None or isinstance(shown, (str, int, float)) else f"{name}{index}"
