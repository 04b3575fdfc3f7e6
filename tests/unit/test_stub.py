"""Constructors in fsdp_c/_C.pyi have the keywords that C parses; `make lint` compares the rest."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = ast.parse((ROOT / "fsdp_c" / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
SOURCES = {
    "FlatLayout": "layout_type.c",
    "Handle": "handle_type.c",
    "Runtime": "runtime_type.c",
    "Unit": "unit_type.c",
}


def declared_keywords(name: str) -> list[str]:
    """Return the arguments of a class's constructor in the stub."""
    methods = [node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)]
    (made,) = (method for method in methods if method.name in ("__init__", "__new__"))
    return [arg.arg for arg in [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]][1:]


def parsed_keywords(name: str) -> list[str]:
    """Return the arguments parsed by the constructor in C: the first table of names in the type's file."""
    source = (ROOT / "csrc" / "python" / SOURCES[name]).read_text()
    table = re.search(r"static char \*names\[\] = \{(.*?)NULL\}", source, re.DOTALL)
    assert table, f"{SOURCES[name]} has no table of argument names"
    return re.findall(r'"(\w+)"', table[1])


@pytest.mark.parametrize("name", SOURCES)
def test_stub_declares_the_constructor_arguments_of(name: str) -> None:
    assert declared_keywords(name) == parsed_keywords(name)
