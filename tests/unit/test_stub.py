"""fsdp_c/_C.pyi says what fsdp_c._C has: the same names of the same kind, and constructors with the same
keywords."""

import ast
import re
from pathlib import Path

import pytest

from fsdp_c import _C

ROOT = Path(__file__).resolve().parents[2]
STUB = ast.parse((ROOT / "fsdp_c" / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
SOURCES = {
    "FlatLayout": "layout_type.c",
    "Handle": "handle_type.c",
    "Runtime": "runtime_type.c",
    "Unit": "unit_type.c",
}


def kind_of(value: object) -> str:
    return "class" if isinstance(value, type) else "function" if callable(value) else "value"


def declared(body: list[ast.stmt]) -> dict[str, str]:
    """Public names that statements of a stub declare, each with its kind."""
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = "value"
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = "function"
        elif isinstance(node, ast.ClassDef):
            found[node.name] = "class"
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def present(scope: object) -> dict[str, str]:
    """Public names of a module or type, each with its kind."""
    return {name: kind_of(getattr(scope, name)) for name in dir(scope) if not name.startswith("_")}


def declared_keywords(name: str) -> list[str]:
    """The arguments of a class's constructor in the stub."""
    methods = [node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)]
    (made,) = (method for method in methods if method.name in ("__init__", "__new__"))
    return [arg.arg for arg in [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]][1:]


def parsed_keywords(name: str) -> list[str]:
    """The arguments that the constructor in C parses: the first table of names in the type's file."""
    source = (ROOT / "csrc" / "python" / SOURCES[name]).read_text()
    table = re.search(r"static char \*names\[\] = \{(.*?)NULL\}", source, re.DOTALL)
    assert table, f"{SOURCES[name]} has no table of argument names"
    return re.findall(r'"(\w+)"', table[1])


def test_stub_declares_what_the_module_has() -> None:
    assert declared(STUB.body) == present(_C)


@pytest.mark.parametrize("name", SOURCES)
def test_stub_declares_the_members_of(name: str) -> None:
    assert declared(CLASSES[name].body) == present(getattr(_C, name))


@pytest.mark.parametrize("name", SOURCES)
def test_stub_declares_the_constructor_arguments_of(name: str) -> None:
    assert declared_keywords(name) == parsed_keywords(name)
