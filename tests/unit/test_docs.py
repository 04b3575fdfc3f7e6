"""Names in the documentation exist: files, functions, states and links.

Each check takes a tree and returns its violations, so that planted violations can test the check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


def function_violations(root: Path) -> list[str]:
    """Return functions named as ``name()`` in docs/architecture.md that no source defines or calls."""
    text = "\n".join(path.read_text() for path in sources(root) if path.suffix in (".c", ".h", ".cu", ".py"))
    known = set(re.findall(r"\b(\w+)\(", text))
    named = re.findall(r"\b(\w+)\(\)", (root / "docs" / "architecture.md").read_text())
    return [f"architecture.md names {name}()" for name in named if name not in known]


def tables_of_states(root: Path) -> dict[str, dict[str, set[str]]]:
    """Return the transitions of each table in C, by ``name in file``: the target states of each state."""
    found = {}
    for path in sorted((root / "csrc").rglob("*.c")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for name, rows in re.findall(r"\bbool (\w*allowed)(?:\[\w+\]){2} = \{(.*?)\};", text, re.DOTALL):
            found[f"`{name}` in `{path.relative_to(root).as_posix()}`"] = {
                start.partition("_")[2]: {
                    end.partition("_")[2] for end in re.findall(r"\[(\w+)\] = true", ends)
                }
                for start, ends in re.findall(r"\[(\w+)\] = \{(.*?)\}", rows, re.DOTALL)
            }
    return found


def state_violations(root: Path) -> list[str]:
    """Return tables of legal transitions that docs/architecture.md shows differently from C."""
    page = (root / "docs" / "architecture.md").read_text()
    shown = {
        title: {
            start.strip(): set(ends.strip().split(", "))
            for start, ends in (row.split("→") for row in transitions.split(";"))
        }
        for title, transitions in re.findall(
            r"^\| (`\w*allowed` in `.*?`) \| .* \| ([A-Z_,; →]+) \|$", page, re.MULTILINE
        )
    }
    tables = tables_of_states(root)
    return [
        f"the table {title} is {tables.get(title)} and shown as {shown.get(title)}"
        for title in sorted(tables.keys() | shown.keys())
        if tables.get(title) != shown.get(title)
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
    "docs/architecture.md": "`unit.c` calls `reduce()`, see `csrc/unit.c`.\n"
    "| `allowed` in `csrc/unit.c` | its use | IDLE → BUSY |\n",
    "csrc/unit.c": "void reduce(void);\nconst bool allowed[STATES][STATES] = {[USE_IDLE] = {[USE_BUSY] = true}};\n",
    "README.md": "[page](docs/architecture.md) and `csrc/`\n",
}
CHECKS: list[tuple[Callable[[Path], list[str]], str, str]] = [  # checks, each with a violation
    (file_violations, "README.md", "`csrc/gone.c`\n"),
    (file_violations, "docs/other.md", "```\nreduce()  in csrc/gone.c\n```\n"),
    (function_violations, "docs/architecture.md", "`reduced()`\n"),
    (state_violations, "csrc/unit.c", SOUND["csrc/unit.c"].replace("[USE_BUSY] =", "[USE_IDLE] =")),
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
