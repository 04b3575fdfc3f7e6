"""The API reference contains every public name, each with a docstring, and the site builds without a warning."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fsdp_c

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "reference.py"
REFERENCE = runpy.run_path(str(SCRIPT))
MODULES = [importlib.import_module(name) for name in ("fsdp_c", *REFERENCE["MODULES"])]


def is_ours(value: Any) -> bool:
    """Return False for torch's own objects, which are public here under the same name."""
    return (getattr(value, "__module__", None) or "").startswith("fsdp_c")


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module and of its own classes: (name as on the page, object)."""
    names = dir(module) if module is fsdp_c else getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if is_ours(value)]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        yield name, value
        if inspect.isclass(value) and is_ours(value):
            yield from ((f"{name}.{one}", vars(value)[one]) for one in vars(value) if not one.startswith("_"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    REFERENCE["build"](folder)
    return folder


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference_with_a_docstring(module: ModuleType, folder: Path) -> None:
    page = folder.joinpath(*module.__name__.split(".")).with_suffix(".html")
    on_page, names = set(re.findall(r'id="([\w.]+)"', page.read_text())), list(public_names(module))
    assert names and [name for name, _ in names if name not in on_page] == []
    own = [one for one in names if is_ours(one[1]) or isinstance(one[1], property | staticmethod)]
    assert [name for name, value in own if not inspect.getdoc(value)] == []


def test_package_says_its_version_and_shows_what_users_use() -> None:
    assert fsdp_c.__version__.split(".")[0].isdigit()
    shown = [name for name in dir(fsdp_c) if not name.startswith("_")]
    assert set(fsdp_c.__all__) | {"install", "uninstall", "summary", "wrap"} <= set(shown)
    assert not {"_C", "torch", "construction", "materialization"} & set(dir(fsdp_c))
    assert all(hasattr(fsdp_c, name) for name in dir(fsdp_c))
