"""Parametrize tests by all pairs of values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from operator import getitem
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few points in which any two values of different axes meet."""
    points = list(product(*map(range, map(len, axes))))
    missing = {pair for point in points for pair in _pairs(point)}
    chosen = []
    while missing:
        chosen.append(max(points, key=lambda point: len(missing & _pairs(point))))
        missing -= _pairs(chosen[-1])
    return [tuple(map(getitem, axes, point)) for point in sorted(chosen)]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with ``all_pairs``. ``axes``: values of each argument, which may be ``pytest.param`` with an id."""
    named = [[_param(name, index, one) for index, one in enumerate(axis)] for name, axis in axes.items()]
    params = [
        pytest.param(*(one.values[0] for one in point), id="-".join(str(one.id) for one in point))
        for point in all_pairs(*named)
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def _pairs(point: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(point), 2))


def _param(name: str, index: int, value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return value
    shown = getattr(value, "__name__", value)
    is_short = shown is None or isinstance(shown, (str, int, float))
    return pytest.param(value, id=str(shown) if is_short else f"{name}{index}")
