"""Tables of torch's FSDP1, one per version: names, parameters, kinds and defaults, read off its sources by
``ast``.

A table is a list of lines such as ``def wrap.enable_wrap(*, wrapper_cls, **wrapper_kwargs)``.
``recorded.txt`` holds that of the oldest version, and for each later one the lines that went and came; of
private names it has a digest per module. To record another version, unpack its wheel (nothing of it is
imported) and call

    python -m tests.drift.tables VERSION FOLDER/torch
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.txt")
HEADING = "torch "
BESIDE = (
    "_composable_state",
    "checkpoint.state_dict",
    "tensor.parallel.fsdp",
    "utils",
)  # what FSDP1 is read by, or reads

Table = list[str]


# ----------------------------------------------------------------- reading sources


def installed_torch() -> Path:
    """The folder of the torch in use; it is not imported for this."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def read(torch: Path) -> Table:
    """The table of the sources under ``torch``."""
    distributed = torch / "distributed"
    lines = [f"export {name}" for name in _exports(distributed / "fsdp" / "__init__.py")]
    sources = {path.stem: path for path in (distributed / "fsdp").glob("*.py") if path.stem != "__init__"}
    sources |= {name: distributed / f"{name.replace('.', '/')}.py" for name in BESIDE}
    for name, path in sources.items():
        lines += _body(ast.parse(path.read_text()).body, name) if path.exists() else []
    return sorted(set(lines))


def _exports(path: Path) -> list[str]:
    if not path.exists():
        return []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _body(nodes: list[ast.stmt], where: str, in_class: bool = False) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node, where)
        elif isinstance(node, ast.ClassDef):
            yield f"class {where}.{node.name}({', '.join(map(ast.unparse, node.bases))})"
            yield from _body(node.body, f"{where}.{node.name}", in_class=True)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _assignment(node, where, in_class)
        elif isinstance(node, ast.If | ast.Try):
            yield from _body([*node.body, *node.orelse], where, in_class)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> Iterator[str]:
    decorators = {ast.unparse(one) for one in node.decorator_list}
    if "overload" in decorators or any(one.endswith(".setter") for one in decorators):
        return
    kind = next((one for one in ("property", "staticmethod", "classmethod") if one in decorators), "def")
    yield f"{kind} {where}.{node.name}({_parameters(node.args)})"


def _parameters(args: ast.arguments) -> str:
    for one in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if one is not None:
            one.annotation = None
    return ast.unparse(args)


def _assignment(node: ast.Assign | ast.AnnAssign, where: str, in_class: bool) -> Iterator[str]:
    """Members of enums and fields of dataclasses with their values; of a module, public constants by name."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if not isinstance(target, ast.Name) or target.id.startswith("__"):
        return
    value = f" = {ast.unparse(node.value)}" if in_class and node.value is not None else ""
    if in_class or target.id.isupper():
        yield f"value {where}.{target.id}{value}"


# ----------------------------------------------------------------- what is recorded


def is_public(line: str) -> bool:
    """An export, or a name of which no part of the path is private."""
    kind, path = re.match(r"(\w+) ([\w.]+)", line).groups()  # type: ignore[union-attr]
    return kind == "export" or not any(one.startswith("_") for one in path.split("."))


def condensed(table: Table) -> Table:
    """What is recorded of a table: its public lines, and a digest of the others of each module."""
    private: dict[str, str] = defaultdict(str)
    for line in table:
        if not is_public(line):
            private[line.split()[1].partition(".")[0]] += line
    digests = [f"private {one} {zlib.crc32(lines.encode()):08x}" for one, lines in private.items()]
    return sorted([*filter(is_public, table), *digests])


def _sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in RECORDED.read_text().splitlines() if RECORDED.exists() else ():
        if line.startswith(HEADING):
            found[line.removeprefix(HEADING)] = lines = []
        else:
            lines.append(line)
    return found


def versions() -> list[str]:
    """The versions of which there is a table, oldest first."""
    return list(_sections())


def recorded(version: str) -> Table:
    """What is recorded of ``version``, such as "2.13". KeyError where nothing is."""
    sections = _sections()
    sections[version]
    table: set[str] = set()
    for one, lines in sections.items():
        table -= {line[1:] for line in lines if line[0] == "-"}
        table |= {line.removeprefix("+") for line in lines if line[0] != "-"}
        if one == version:
            break
    return sorted(table)


def differences(before: Table, after: Table) -> list[str]:
    """The lines that went, with "-" before them, and those that came, with "+", by what they name."""
    lines = [f"-{line}" for line in set(before) - set(after)] + [
        f"+{line}" for line in set(after) - set(before)
    ]
    return sorted(lines, key=lambda line: (re.split(r"[(=]| \w{8}$", line[1:])[0], line[0] == "+"))


def record(version: str, torch: Path) -> None:
    """Append the table of a version that comes after those recorded."""
    table, known = condensed(read(torch)), versions()
    lines = differences(recorded(known[-1]), table) if known else table
    with RECORDED.open("a") as file:
        file.write("\n".join([HEADING + version, *lines]) + "\n")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
