"""Which tests cover which row of docs/behaviour.md: ``python -m tests.surface_rows`` lists them.

A row is covered by the tests that name its id (in a comment or docstring of the test, or in the module's
docstring), or has a reason here; of errors and warnings (X) tests/errors.py has the reasons. What has
neither is open.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ID = r"[ABCDEFGX]-\d{3}"
BEHAVIOUR = TESTS.parent / "docs" / "behaviour.md"

REASONS = """
A-012 api.py has the two tuples that this design reads; the map between the enums is one constructor call,
    A-011
A-032 an order of private steps; each step has its row
B-030 the views are kept by the handle in C and returned again in every forward
B-032 one node per unit and the hook on its anchor replace the AccumulateGrad hook of the flat parameter
B-033 as B-032
C-005 fields of private Python state; the state is the two enums in C
C-006 the unsharded tensor is never made at construction, so no views of it are shown
C-015 log lines of upstream's developers
C-040 the fields it sets are of the handle in C; B-023 to B-027
C-052 param_state says it; the storage is not measured
C-054 which tensor is gathered into is decided where it is allocated, in C; A-091 shows the values
C-055 a legal transition is looked up in a table; see the native tests
C-143 private assertions; the tables of legal transitions replace them
D-034 a wait of the host for a device; nothing to wait for on a CPU
D-035 as B-032
D-036 as B-032; the node does not depend on the dtype of the data
D-064 the order of CUDA streams; nothing to see on a CPU
D-100 as D-064
D-111 kept, by order_record_post_forward
D-129 upstream's compile-time branches; the operators under torch.ops.fsdp_c are what is traced here
E-017 as B-026
"""


def sections() -> Iterator[tuple[str, list[str]]]:
    """The title of each section of docs/behaviour.md that has rows to cover, and their ids."""
    for title, text in re.findall(
        r"^## ([ABCDEFGX]: .*?)$(.*?)(?=^## |\Z)", BEHAVIOUR.read_text(), re.MULTILINE | re.DOTALL
    ):
        yield title, re.findall(rf"^- \*\*({ID})\*\*", text, re.MULTILINE)


def ids_in(text: str) -> set[str]:
    """The ids in a text, ``C-002 to C-004`` taken as three."""
    found = set(re.findall(rf"\b({ID})", text))
    for letter, first, last in re.findall(r"\b([ABCDEFGX])-(\d{3}) to \1-(\d{3})", text):
        found.update(f"{letter}-{number:03}" for number in range(int(first), int(last) + 1))
    return found


def tests_by_id() -> dict[str, list[str]]:
    """The tests that name an id; the whole file where its first docstring does."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        head, *tests = re.split(r"^(?=(?:@.*\n)*def test_)", path.read_text(), flags=re.MULTILINE)
        docstring = re.match(r'"""(.*?)"""', head, re.DOTALL)
        for one in sorted(ids_in(docstring[1] if docstring else "")):
            found[one].append(name)
        body = head[docstring.end() :] if docstring else head
        rows = set(re.findall(r'Row\(\s*"(X-\d{3})', path.read_text()))
        for test in tests:
            title = re.search(r"^def (test_\w+)", test, re.MULTILINE)
            for one in sorted(ids_in(test) - rows):
                found[one].append(f"{name}::{title[1]}" if title else name)
        for one in sorted(rows | (ids_in(body) - rows)):
            found[one].append(name)
    return found


def reasons() -> dict[str, str]:
    """Why there is no test, per id."""
    lines = REASONS.strip().replace("\n    ", " ").splitlines()
    return {one: reason for one, _, reason in (line.partition(" ") for line in lines)}


def uncovered() -> list[str]:
    """The rows, but those of errors, that have neither a test nor a reason."""
    covered = tests_by_id().keys() | reasons().keys()
    return [one for _, ids in sections() for one in ids if one not in covered and not one.startswith("X")]


if __name__ == "__main__":
    found = tests_by_id()
    for title, ids in sections():
        print(f"\n{title}")
        for one in ids:
            print(f"  {one}", ", ".join(found.get(one) or [reasons().get(one, "open")]))
