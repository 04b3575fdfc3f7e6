"""Files and links in the documentation exist, and public names have docstrings.

Each check takes a tree and returns its violations, so that planted violations can test the check.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_c.checkpoint
import fsdp_c.optim
from tests.planting import plant

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "fsdp_c", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".c", ".h", ".cu", ".cpp", ".py", ".pyi", ".md", ".sh", ".yml")
SUFFIX = rf"(?:{'|'.join(map(re.escape, SUFFIXES))})"
FOLDER = rf"(?:{'|'.join(SOURCES)})"
NAMED_FILE = re.compile(rf"`([\w./-]+{SUFFIX}|{FOLDER}/[\w./-]*)`|\b({FOLDER}/[\w/]+{SUFFIX})\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def sources(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        found = sorted((root / folder).rglob("*"))
        yield from (one for one in found if one.suffix in SUFFIXES and "__pycache__" not in one.parts)
    yield from sorted(root.glob("*.md"))


def pages(root: Path) -> list[Path]:
    """Return the pages that describe the current project: all but the change log."""
    return [path for path in sources(root) if path.suffix == ".md" and path.name != "CHANGELOG.md"]


def file_violations(root: Path) -> list[str]:
    """Return names of missing files and folders in pages. First folders may be omitted. Results may name
    files of their day.
    """
    there = [f"/{path.relative_to(root).as_posix()}" for path in sources(root)]
    return [
        f"{page.relative_to(root)} names {name}, which is not there"
        for page in pages(root)
        if page.parent.name != "results"
        for name in sorted({quoted or plain for quoted, plain in NAMED_FILE.findall(page.read_text())})
        if not (root / name).exists() and not any(path.endswith(f"/{name}") for path in there)
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in GitHub's spelling."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_violations(root: Path) -> list[str]:
    """Return links inside the repository to missing files or headings."""
    found = []
    for page in pages(root):
        for target in LINK.findall(page.read_text()):
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
                found.append(f"{page.relative_to(root)} links to {target}")
    return found


SOUND = {
    "docs/architecture.md": "See `csrc/unit.c`.\n",
    "csrc/unit.c": "void reduce(void);\n",
    "README.md": "[page](docs/architecture.md) and `csrc/`\n",
}
CHECKS: list[tuple[Callable[[Path], list[str]], str, str]] = [  # checks, each with a violation
    (file_violations, "README.md", "`csrc/gone.c`\n"),
    (file_violations, "docs/other.md", "```\nreduce()  in csrc/gone.c\n```\n"),
    (link_violations, "README.md", "[page](docs/gone.md)\n"),
    (link_violations, "README.md", "[page](docs/architecture.md#a-heading)\n"),
]


@pytest.mark.parametrize(("check", "name", "text"), CHECKS)
def test_pages_agree_with_the_repository(
    check: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path
) -> None:
    assert check(ROOT) == []
    plant(tmp_path, SOUND)
    assert check(tmp_path) == []
    plant(tmp_path, {name: text})
    assert check(tmp_path)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield fsdp_c's public functions, classes and methods with their names, without those defined in torch."""
    for module in (fsdp_c, fsdp_c.checkpoint, fsdp_c.optim):
        for name in dir(module):
            found = getattr(module, name)
            if name.startswith("_") or not getattr(found, "__module__", "").startswith("fsdp_c"):
                continue
            yield f"{module.__name__}.{name}", found
            for member in vars(found) if inspect.isclass(found) else ():
                if not member.startswith("_") and callable(getattr(found, member)):
                    yield f"{module.__name__}.{name}.{member}", getattr(found, member)


def test_public_names_have_docstrings() -> None:
    found = dict(public_objects())
    assert "fsdp_c.FullyShardedDataParallel.clip_grad_norm_" in found and "fsdp_c.checkpoint.save" in found
    assert [name for name, public in found.items() if not inspect.getdoc(public)] == []
