"""The libraries are written down in three places, which agree."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.clients.conftest import LIBRARIES

LIBRARY = "versions"
ROOT = Path(__file__).resolve().parents[2]


def pinned(file: str, pattern: str) -> dict[str, str]:
    found = re.findall(pattern, (ROOT / file).read_text())
    return {name.lower(): version for name, version in found if name.lower() in LIBRARIES}


def test_requirements_extra_and_page_name_the_same_versions():
    required = pinned("requirements/clients.txt", r"(?m)^(\w+)==(\S+)$")
    assert sorted(required) == sorted(LIBRARIES)
    assert pinned("pyproject.toml", r'"(\w+)==([\d.]+)"') == required
    assert pinned("docs/libraries.md", r"(?m)^\| \[?(\w+)\]?(?:\([^)]*\))? ([\d.]+) ") == required


def test_installed_versions_are_those_that_are_written_down():
    for name, version in pinned("requirements/clients.txt", r"(?m)^(\w+)==(\S+)$").items():
        try:
            assert metadata.version(name) == version
        except metadata.PackageNotFoundError:
            pytest.skip(f"not installed: {name} (make test-clients installs it)")
