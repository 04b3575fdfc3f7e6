"""Parametrize tests by all pairs of values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with few points in which any two values of different arguments meet.

    ``axes``: values of each argument, which may be ``pytest.param`` with an id.
    """
    points = list(product(*map(range, map(len, axes.values()))))
    missing = {pair for point in points for pair in _pairs(point)}
    chosen = []
    while missing:
        chosen.append(max(points, key=lambda point: len(missing & _pairs(point))))
        missing -= _pairs(chosen[-1])
    params = []
    for point in sorted(chosen):
        given = [_param(name, index, axes[name][index]) for name, index in zip(axes, point, strict=True)]
        params.append(
            pytest.param(*(one.values[0] for one in given), id="-".join(str(one.id) for one in given))
        )
    return pytest.mark.parametrize(tuple(axes), params)


def _pairs(point: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(point), 2))


def _param(name: str, index: int, value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return value
    shown = getattr(value, "__name__", value)
    is_short = shown is None or isinstance(shown, (str, int, float))
    return pytest.param(value, id=str(shown) if is_short else f"{name}{index}")
