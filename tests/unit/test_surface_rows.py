"""Every behaviour of docs/behaviour.md has a test that names it, or a reason why there is none."""

from __future__ import annotations

import pytest

from tests import surface_rows


def test_every_row_has_a_test_or_a_reason() -> None:
    assert surface_rows.uncovered() == []


def test_every_reason_is_of_a_row_that_no_test_names() -> None:
    rows = {one for _, ids in surface_rows.sections() for one in ids}
    assert len(rows) > 500
    assert set(surface_rows.reasons()) <= rows - set(surface_rows.tests_by_id())


def test_a_row_that_no_test_names_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, *others = surface_rows.reasons()
    monkeypatch.setattr(surface_rows, "reasons", lambda: dict.fromkeys(others, "why"))
    assert surface_rows.uncovered() == [one]
