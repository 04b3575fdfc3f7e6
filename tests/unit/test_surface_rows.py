"""The page of rows names tests that are there."""

from __future__ import annotations

import re

from tests import surface_rows


def test_every_test_on_the_page_exists() -> None:
    named = set(
        re.findall(
            r"`((?:unit|distributed|parity)/[\w/]+\.py)(?:::(test_\w+))?`", surface_rows.PAGE.read_text()
        )
    )
    assert len(named) > 100
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not (path := surface_rows.TESTS / file).exists()
        or f"def {test or 'test_'}" not in path.read_text()
    ]
    assert not missing


def test_every_row_given_by_hand_is_a_row() -> None:
    rows = {one for _, ids in surface_rows.sections() for one in ids}
    assert len(rows) > 500
    assert set(surface_rows.by_hand()) <= rows
