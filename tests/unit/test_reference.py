"""The API reference has every public name, each with a docstring, and a warning while it is built is an
error."""

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
from tests.processes import output_of_python, run_python

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "reference.py"
REFERENCE = runpy.run_path(str(SCRIPT))
MODULES = [importlib.import_module(name) for name in ("fsdp_c", *REFERENCE["MODULES"])]


def is_ours(value: Any) -> bool:
    """Not one of torch's own objects, which are public here under the same name."""
    return (getattr(value, "__module__", None) or "").startswith("fsdp_c")


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What users see of a module, and of its own classes: (name as the page has it, object)."""
    names = dir(module) if module is fsdp_c else getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        yield name, value
        if inspect.isclass(value) and is_ours(value):
            yield from (
                (f"{name}.{one}", value.__dict__[one]) for one in vars(value) if not one.startswith("_")
            )


def page_of(module: ModuleType, folder: Path) -> Path:
    return folder.joinpath(*module.__name__.split(".")).with_suffix(".html")


def names_missing(module: ModuleType, folder: Path) -> list[str]:
    on_page = set(re.findall(r'id="([\w.]+)"', page_of(module, folder).read_text()))
    return [name for name, _ in public_names(module) if name not in on_page]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    REFERENCE["build"](folder)
    return folder


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType, folder: Path) -> None:
    assert len(list(public_names(module))) > 0
    assert names_missing(module, folder) == []


def test_a_name_that_is_not_in_the_reference_is_noticed(folder: Path, tmp_path: Path) -> None:
    page = page_of(fsdp_c, tmp_path)
    page.write_text(page_of(fsdp_c, folder).read_text().replace('id="FullyShardedDataParallel.no_sync"', ""))
    assert names_missing(fsdp_c, tmp_path) == ["FullyShardedDataParallel.no_sync"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_of_ours_has_a_docstring(module: ModuleType) -> None:
    own = [
        (name, value)
        for name, value in public_names(module)
        if is_ours(value) or isinstance(value, property | staticmethod)
    ]
    assert [name for name, value in own if not inspect.getdoc(value)] == []


PLANTED = """
import pathlib, runpy, sys, fsdp_c.api
fsdp_c.api.__all__.append("nowhere_defined")
runpy.run_path(sys.argv[1])["build"](pathlib.Path(sys.argv[2]))
"""


def test_a_warning_of_the_builder_is_an_error(tmp_path: Path) -> None:
    """In a process of its own: pdoc remembers what it has read."""
    done = run_python("-c", PLANTED, SCRIPT, tmp_path)
    assert done.returncode and "UserWarning: Found 'nowhere_defined' in fsdp_c.api.__all__" in done.stderr


def test_site_is_made_without_a_warning(tmp_path: Path) -> None:
    command = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    output_of_python(*command, cwd=SCRIPT.parents[1])
    for page in ("index.html", "troubleshooting.html", "api/fsdp_c.html"):
        assert "fsdp_c" in (tmp_path / "site" / page).read_text()
    # links out of the site are none
    assert "../tests/" not in (tmp_path / "site" / "reliability.html").read_text()
