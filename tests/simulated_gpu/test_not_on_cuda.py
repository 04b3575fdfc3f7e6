"""The list of what cannot run on the simulated GPU names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.simulated_gpu.not_on_cuda import REASONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", REASONS)
def test_the_list_names_tests_of_the_file(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name.partition("[")[0] for name in REASONS[file]} <= tests
    assert all(REASONS[file].values())
