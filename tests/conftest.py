"""Makes the tests importable by name and ends the rank processes with the session."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)

if ROOT not in sys.path:  # rank processes import the test modules by name
    sys.path.insert(0, ROOT)

from tests import ranks  # noqa: E402  (needs the path above)


def pytest_sessionfinish() -> None:
    ranks.close_pools()
