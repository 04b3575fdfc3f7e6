"""The pages say what is there: ids that are cited are explained, and files, functions and links that are
named exist.

Each check takes a tree and returns its violations, so that planted ones show that it can fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.planting import plant

ROOT = Path(__file__).resolve().parents[2]
BEHAVIOUR = "docs/behaviour.md"
ID = r"(?:[A-Z]-\d{3}|parity \d+)"
SOURCES = ("csrc", "fsdp_c", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".c", ".h", ".cu", ".cpp", ".py", ".pyi", ".md", ".sh", ".yml")
SUFFIX = rf"(?:{'|'.join(map(re.escape, SUFFIXES))})"
FOLDER = rf"(?:{'|'.join(SOURCES)})"
NAMED_FILE = re.compile(rf"`([\w./-]+{SUFFIX}|{FOLDER}/[\w./-]*)`|\b({FOLDER}/[\w/]+{SUFFIX})\b")
NAMED_FUNCTION = re.compile(r"\b(\w+)\(\)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
Check = Callable[[Path], list[str]]


def sources(root: Path) -> Iterator[Path]:
    """All that people write."""
    for folder in SOURCES:
        yield from (
            path
            for path in sorted((root / folder).rglob("*"))
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts
        )
    yield from sorted(root.glob("*.md"))


def pages(root: Path) -> list[Path]:
    """The pages that describe the project as it is; the change log speaks of the past as well."""
    return [path for path in sources(root) if path.suffix == ".md" and path.name != "CHANGELOG.md"]


def ids_in(text: str, listed: Iterable[str]) -> set[str]:
    """The ids in a text: all that are listed from one ``to`` another, and a row of parity where a test is
    named so."""
    text = re.sub(r"\s*\n\s*[*#]?\s*", " ", text)
    found = set(re.findall(rf"\b{ID}\b", text))
    for first, last in re.findall(r"\b([A-Z]-\d{3}) to ([A-Z]-\d{3})\b", text):
        found.update(one for one in listed if first <= one <= last)
    return found | {f"parity {row}" for row in re.findall(r"\b(?:parity row |def test_row_)(\d+)", text)}


def listed_ids(root: Path) -> list[str]:
    return re.findall(rf"^- \*\*({ID})\*\* \S", (root / BEHAVIOUR).read_text(), re.MULTILINE)


def id_violations(root: Path) -> list[str]:
    """Ids that are cited and not explained, explained twice, or explained and cited nowhere.

    This file is left out: the ids that it plants are none.
    """
    listed = Counter(listed_ids(root))
    cited: set[str] = set()
    found = [f"{one} is explained {count} times" for one, count in listed.items() if count > 1]
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        ids = ids_in(path.read_text(), listed) if path.name != Path(__file__).name else set()
        found += [
            f"{name} cites {one}, which {BEHAVIOUR} does not explain" for one in sorted(ids - listed.keys())
        ]
        if name != BEHAVIOUR:
            cited |= ids
    return found + [f"{one} is explained and cited nowhere" for one in listed if one not in cited]


def file_violations(root: Path) -> list[str]:
    """Files that a page names and folders in backticks that are not there; first folders may be left out."""
    there = [f"/{path.relative_to(root).as_posix()}" for path in sources(root)]
    found = []
    for page in pages(root):
        for name in sorted({quoted or plain for quoted, plain in NAMED_FILE.findall(page.read_text())}):
            if not (root / name).exists() and not any(path.endswith(f"/{name}") for path in there):
                found.append(f"{page.relative_to(root)} names {name}, which is not there")
    return found


def function_violations(root: Path) -> list[str]:
    """Functions that docs/architecture.md names as ``name()`` and that no source defines or calls."""
    text = "\n".join(path.read_text() for path in sources(root) if path.suffix in (".c", ".h", ".cu", ".py"))
    known = set(re.findall(r"\b(\w+)\(", text))
    page = root / "docs" / "architecture.md"
    return [
        f"{page.name} names {name}()"
        for name in NAMED_FUNCTION.findall(page.read_text())
        if name not in known
    ]


def tables_of_states(root: Path) -> dict[str, dict[str, set[str]]]:
    """The transitions of each table in C, as ``name in file``: from each state to which."""
    found = {}
    for path in sorted((root / "csrc").rglob("*.c")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for name, rows in re.findall(r"\bbool (\w*allowed)(?:\[\w+\]){2} = \{(.*?)\};", text, re.DOTALL):
            transitions = {
                start.partition("_")[2]: {
                    end.partition("_")[2] for end in re.findall(r"\[(\w+)\] = true", ends)
                }
                for start, ends in re.findall(r"\[(\w+)\] = \{(.*?)\}", rows, re.DOTALL)
            }
            found[f"`{name}` in `{path.relative_to(root).as_posix()}`"] = transitions
    return found


def state_violations(root: Path) -> list[str]:
    """Tables of legal transitions that docs/architecture.md does not show as they are in C."""
    page = (root / "docs" / "architecture.md").read_text()
    shown = {}
    for title, text in re.findall(
        r"^### (`\w*allowed` in `.*?`)$(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL
    ):
        rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_, ]+) \|$", text, re.MULTILINE)
        shown[title] = {start: set(ends.split(", ")) for start, ends in rows}
    tables = tables_of_states(root)
    return [
        f"the table {title} is {tables.get(title)} and shown as {shown.get(title)}"
        for title in sorted(tables.keys() | shown.keys())
        if tables.get(title) != shown.get(title)
    ]


def anchors(page: Path) -> set[str]:
    """What a link may point to in a page: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_violations(root: Path) -> list[str]:
    """Links inside the repository that lead to no file, or to no heading."""
    found = []
    for page in pages(root):
        for target in LINK.findall(page.read_text()):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            path = page.parent / file if file else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                found.append(f"{page.relative_to(root)} links to {target}")
    return found


CHECKS: list[Check] = [id_violations, file_violations, function_violations, state_violations, link_violations]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_agree_with_the_repository(check: Check) -> None:
    assert check(ROOT) == []


SOUND = {
    BEHAVIOUR: "# Ids\n\n## A: First\n\n- **Z-001** One.\n- **Z-002** Two.\n- **parity 4** Four.\n",
    "docs/architecture.md": "`unit.c` calls `reduce()`, see [ids](behaviour.md#a-first) and `csrc/unit.c`.\n"
    "### `allowed` in `csrc/unit.c`\n\n| from | to |\n|---|---|\n| IDLE | BUSY |\n| BUSY | BUSY, IDLE "
    "|\n\n## End\n",
    "csrc/unit.c": "/* Z-001 to Z-002 */ void reduce(void);\nconst bool allowed[STATES][STATES] = {\n"
    "    [USE_IDLE] = {[USE_BUSY] = true}, /* first */\n"
    "    [USE_BUSY] = {[USE_BUSY] = true, /* again */ [USE_IDLE] = true},\n};\n",
    "tests/test_one.py": "def test_row_4_is_right() -> None: ...\n",
    "README.md": "[ids](docs/behaviour.md) and `csrc/`\n",
}
PLANTED = [
    (id_violations, "fsdp_c/api.py", "# as Z-003 says\n"),
    (id_violations, "csrc/other.c", "/* parity 5 */\n"),
    (id_violations, "tests/test_two.py", "def test_row_5_is_right() -> None: ...\n"),
    (id_violations, "csrc/unit.c", SOUND["csrc/unit.c"].replace(" to Z-002", "")),
    (id_violations, BEHAVIOUR, SOUND[BEHAVIOUR] + "- **Z-001** Again.\n"),
    (id_violations, BEHAVIOUR, SOUND[BEHAVIOUR].replace(" Two.", "")),
    (id_violations, "docs/rows.md", "| Z-009 | open |\n"),
    (file_violations, "README.md", "`csrc/gone.c`\n"),
    (file_violations, "README.md", "`gone.c`\n"),
    (file_violations, "docs/other.md", "`fsdp_c/gone/`\n"),
    (file_violations, "docs/other.md", "```\nreduce()  in csrc/gone.c\n```\n"),
    (function_violations, "docs/architecture.md", "`reduced()`\n"),
    (
        state_violations,
        "csrc/unit.c",
        SOUND["csrc/unit.c"].replace("{[USE_BUSY] = true},", "{[USE_IDLE] = true},"),
    ),
    (state_violations, "csrc/unit.c", "void reduce(void);\n"),
    (state_violations, "csrc/second.c", "bool other_allowed[2][2] = {[USE_A] = {[USE_A] = true}};\n"),
    (link_violations, "README.md", "[ids](docs/gone.md)\n"),
    (link_violations, "README.md", "[ids](docs/behaviour.md#b-second)\n"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_tree_has_no_violations(check: Check, tmp_path: Path) -> None:
    plant(tmp_path, SOUND)
    assert check(tmp_path) == []


@pytest.mark.parametrize(("check", "name", "text"), PLANTED)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, SOUND | {name: text})
    assert check(tmp_path)
