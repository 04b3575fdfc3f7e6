"""Architecture rules, checked in the sources: includes and imports follow the layers, and each state has one
owner.

Each check takes a tree of sources and returns its violations, so that planted violations can test the check.
"""

import ast
import re
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.planting import plant

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("base", "layout", "kernels", "torch", "collective", "handle", "runtime", "python")
PYTHON_LAYERS = (  # packages, and modules outside of packages
    ("compat",),
    ("_C", "operator_kernels"),
    ("sharding", "compat.execution_order", "compat.handle_names"),
    ("tools",),
    ("training",),
    ("state",),
    ("optim",),
    ("checkpoint",),
    (
        "api",
        "fully_sharded_data_parallel",
        "sharded_grad_scaler",
        "wrap",
    ),
    (
        "compat._flat_param",
        "compat._init_utils",
        "compat._runtime_utils",
        "compat._traversal_utils",
        "compat.installation",
        "compat.scripts",
    ),
    ("__init__", "__main__", "cli", "selftest"),
)
SHARDING_STATE = ("param_state", "training_state", "_training_state", "shows_sharded", "needs_unshard")
STATE_READERS = {  # Python modules that read sharding state, with the reason; none changes it
    "compat.handle_names": "attributes that torch has on a handle",
    "fully_sharded_data_parallel": "names and moves inside summon_full_params",
    "compat._runtime_utils": "torch's runtime functions, called or replaced by libraries",
    "sharding.sharded_module": "attributes that torch has on a unit, and checks for full parameters",
    "training.forward_methods": "to skip the unshard if parameters are unsharded already",
    "training.grad_clipping": "to refuse clipping inside a step",
    "training.hints": "to name the unit that keeps parameters sharded",
    "training.unshard_params": "to refuse state dicts and summon_full_params inside a step",
}
UNREAD_STATE = ("param_state", "needs_unshard")  # read by C only
STATEFUL = ("handle", "runtime")
WITHOUT_PYTHON = ("base", "layout", "kernels")
STATE_OWNERS = {
    "param_state": "handle",
    "training_state": "handle",
    "exposed": "handle",
    "phase": "runtime",
    "reduction": "runtime",
}
LIBTORCH_NAME = re.compile(
    r"\b(aoti_\w+|AtenTensorHandle|StableListHandle|torch_(?:library|call|parallel|exception|list|dtype)\w*)\b"
)
Check = Callable[[Path], list[str]]


def c_files(root: Path) -> dict[str, str]:
    """Return the C sources and headers without comments, by their path under csrc/."""
    files = sorted(path for path in (root / "csrc").rglob("*") if path.suffix in (".c", ".h", ".cu"))
    return {path.relative_to(root / "csrc").as_posix(): without_comments(path.read_text()) for path in files}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def layer_of(name: str) -> int:
    """Return the index of a file's layer in LAYERS, -1 if its folder is no layer."""
    folder = name.split("/")[0]
    return LAYERS.index(folder) if folder in LAYERS else -1


def project_includes(name: str, files: dict[str, str]) -> list[str]:
    """Return the quoted includes of a file as paths under csrc/. A bare name is in the same folder."""
    included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', files[name], re.MULTILINE)
    neighbours = {other: f"{name.rpartition('/')[0]}/{other}" for other in included if "/" not in other}
    return [neighbours.get(other, other) for other in included]


def include_violations(root: Path) -> list[str]:
    """Return includes of later layers or missing files, and files outside the layers."""
    files = c_files(root)
    found = [f"{name} is in no layer" for name in files if layer_of(name) < 0]
    for name in files:
        for included in project_includes(name, files):
            if included not in files:
                found.append(f"{name} includes {included}, which is not in csrc/")
            elif layer_of(included) > layer_of(name):
                found.append(f"{name} includes {included} of a later layer")
    return found


def python_h_violations(root: Path) -> list[str]:
    return [
        f"{name} includes Python.h"
        for name, text in c_files(root).items()
        if name.split("/")[0] in WITHOUT_PYTHON and re.search(r"#\s*include\s+[<\"]Python\.h", text)
    ]


def reachable_includes(name: str, files: dict[str, str]) -> set[str]:
    """Return a file's project includes, direct and indirect."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = [
            other
            for other in project_includes(waiting.pop(), files)
            if other in files and other not in reached
        ]
        reached.update(new)
        waiting += new
    return reached


def libtorch_violations(root: Path) -> list[str]:
    """Return names of libtorch in layers below the torch layer, and in later files without a header of that
    layer.
    """
    files = c_files(root)
    found = []
    for name, text in files.items():
        mentioned = LIBTORCH_NAME.search(text)
        if not mentioned or name.startswith("torch/"):
            continue
        through_torch = any(other.startswith("torch/") for other in reachable_includes(name, files))
        if layer_of(name) < LAYERS.index("torch") or not through_torch:
            found.append(f"{name} mentions {mentioned[0]}")
    return found


def language_violations(root: Path) -> list[str]:
    """Return files in csrc/ that are neither C nor the CUDA variant of a C kernel."""
    paths = [path for path in (root / "csrc").rglob("*") if path.is_file()]
    return [f"{path.relative_to(root)} is not C" for path in paths if path.suffix not in (".c", ".h", ".cu")]


def definitions_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (head, name, body) of each function definition in C text without comments."""
    depth, start, head_start, head = 0, 0, 0, ""
    for position, char in enumerate(text):
        if char == "{":
            if depth == 0:
                start, head = position, text[head_start:position]
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                head_start = position + 1
                if name := re.search(r"(\w+)\s*\([^=]*\)\s*$", head):
                    yield head, name[1], text[start:position]
        elif char == ";" and depth == 0:
            head_start = position + 1


def without_preprocessor(text: str) -> str:
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.MULTILINE)


def declarations_of(text: str) -> list[str]:
    """Return the functions and variables that a header without comments declares for other files."""
    outside, depth = "", 0
    for char in without_preprocessor(text):
        depth += (char == "{") - (char == "}")
        outside += char if depth == 0 else ""
    statements = [one.strip() for one in re.split(r"[;}]", outside)]
    functions = [re.match(r"(?!static\b|typedef\b)[\w\s*]+?[\s*](\w+)\s*\(", one) for one in statements]
    variables = [re.match(r"extern\s[^()]*?(\w+)\s*(?:\[[^\]]*\])?$", one) for one in statements]
    return [found[1] for found in (*functions, *variables) if found]


def headers_of(files: dict[str, str]) -> dict[str, list[str]]:
    """Return the headers that declare each C function and variable."""
    headers: dict[str, list[str]] = {}
    for name, text in files.items():
        for declared in declarations_of(text) if name.endswith(".h") else []:
            headers.setdefault(declared, []).append(name)
    return headers


def call_violations(root: Path) -> list[str]:
    """Return calls of functions of a later layer. Layers that call each other in a ring can bypass the check
    of includes.
    """
    files = {name: without_preprocessor(text) for name, text in c_files(root).items()}
    homes = {
        function: name
        for name, text in files.items()
        for head, function, _ in definitions_of(text)
        if name.endswith(".h") or not re.search(r"\bstatic\b", head)
    }
    return [
        f"{function} in {name} calls {called} of {homes[called]}"
        for name, text in files.items()
        for _, function, body in definitions_of(text)
        for called in set(re.findall(r"(?<![.>\w])\w+(?=\()", body)) & homes.keys()
        if layer_of(homes[called]) > layer_of(name)
    ]


# An assignment through a pointer, such as `unit->handle->storage.copy = ...`, or a call that releases a
# reference stored there.
PATH = r"(\w+(?:\(\w*\))?(?:(?:->|\.)\w+(?:\[[^\]]*\])?)+)"
WRITE = re.compile(rf"{PATH}\s*(?:=(?!=)|\+\+|--|[-+|&^]=)|(?:\+\+|--){PATH}|(?:Py_CLEAR|ref_set)\(&?{PATH}")
STRUCT = re.compile(r"\bstruct (\w+) \{(.*?)\n?\};?", re.DOTALL)


def struct_fields(body: str) -> dict[str, str]:
    """Return the struct type of each field that is a struct or points to one."""
    found = {}
    for struct, names in re.findall(r"(?:^|[;{])\s*(?:const )?struct (\w+) ([^;()]*)", body):
        found.update((re.sub(r"\[.*|\W", "", name), struct) for name in names.split(","))
    return found


def owners_of(files: dict[str, str], headers: dict[str, list[str]]) -> dict[str, set[str]]:
    """Return for each header the files that define its declarations, and the header itself."""
    owners = {name: {name} for name in files if name.endswith(".h")}
    for name, text in files.items():
        for _, function, _ in definitions_of(without_preprocessor(text)):
            for header in headers.get(function, []):
                owners[header].add(name)
    return owners


def written_struct(path: str, variables: dict[str, str], fields: dict[str, dict[str, str]]) -> str | None:
    """Return the struct whose field is assigned through ``path``; None if it is unknown or a local variable."""
    base, *steps = re.split(r"->|\.", re.sub(r"\[[^\]]*\]", "", path))
    struct = variables.get(base.partition("(")[0]) if "->" in path else None
    for step in steps[:-1]:
        struct = fields.get(struct, {}).get(step) if struct else None
    return struct


def ownership_violations(root: Path) -> list[str]:
    """Return fields of a stateful layer's structs that are written outside the files of their component."""
    files = c_files(root)
    headers = headers_of(files)
    owners = owners_of(files, headers)
    homes = {
        struct: (name, struct_fields(body))
        for name, text in files.items()
        if name.endswith(".h")
        for struct, body in STRUCT.findall(text)
    }
    fields = {struct: inner for struct, (_, inner) in homes.items()}
    found = []
    for name, text in files.items():
        returned = {function: struct for struct, function in re.findall(r"\bstruct (\w+) \*(\w+)\(", text)}
        for head, function, body in definitions_of(without_preprocessor(text)):
            pointers = {
                variable: struct for struct, variable in re.findall(r"\bstruct (\w+) \*(\w+)\b", head + body)
            }
            for groups in WRITE.findall(body):
                path = next(filter(None, groups))
                struct = written_struct(path, returned | pointers, fields)
                home = homes[struct][0] if struct in homes else ""
                if home.split("/")[0] in STATEFUL and name not in owners[home]:
                    found.append(f"{function} in {name} writes {path}, which belongs to {home}")
    return found


def state_violations(root: Path) -> list[str]:
    """Return state enums that are not assigned in exactly one function of the owning layer, or are assigned
    in another layer.
    """
    found = []
    for field, owner in STATE_OWNERS.items():
        writers: dict[str, set[str]] = {owner: set()}
        for name, text in c_files(root).items():
            for _, function, body in definitions_of(text):
                if re.search(rf"(->|\.)\s*{field}\s*=(?!=)", body):
                    writers.setdefault(name.split("/")[0], set()).add(f"{name}:{function}")
        for layer, functions in writers.items():
            if len(functions) != (1 if layer == owner else 0):
                found.append(f"{field} is assigned in {layer}/ by {sorted(functions) or 'no function'}")
    return found


def python_modules(root: Path) -> dict[str, Path]:
    """Return the modules of fsdp_c/ by their dotted names below it. Packages end in ``__init__``."""
    package = root / "fsdp_c"
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".pyi"))
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in files}


def imported_modules(name: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, at any level. Other names of fsdp_c count as
    its top module.
    """

    def module(dotted: str) -> str | None:
        rest = dotted.removeprefix("fsdp_c").lstrip(".")
        return next((one for one in (rest, f"{rest}.__init__".lstrip(".")) if one in modules), None)

    found: set[str] = set()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            sources = [alias.name for alias in node.names]
            found.update(module(one) or "__init__" for one in sources if one.partition(".")[0] == "fsdp_c")
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), f"fsdp_c.{name}".rpartition(".")[0])
            if source.partition(".")[0] == "fsdp_c":
                found.update(
                    module(f"{source}.{one.name}") or module(source) or "__init__" for one in node.names
                )
    return found


def cycle_violations(root: Path) -> list[str]:
    """Return import cycles among the modules of fsdp_c/, imports inside functions included."""
    modules = python_modules(root)
    waiting = {name: imported_modules(name, modules) - {name} for name in modules}
    while free := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
        for name in free:
            del waiting[name]
    return [f"fsdp_c.{name} is in an import cycle or imports one" for name in sorted(waiting)]


def python_layer_of(name: str) -> int:
    """Return the index of a module's layer in PYTHON_LAYERS, or of its package's; -1 if neither is listed."""
    places = {name: place for place, layer in enumerate(PYTHON_LAYERS) for name in layer}
    return places.get(name, places.get(name.split(".")[0], -1))


def python_layer_violations(root: Path) -> list[str]:
    """Return imports of a later layer, and modules outside the layers."""
    modules = python_modules(root)
    found = [f"fsdp_c.{name} is in no layer" for name in modules if python_layer_of(name) < 0]
    for name in modules:
        later = [
            one for one in imported_modules(name, modules) if python_layer_of(one) > python_layer_of(name)
        ]
        found += [f"fsdp_c.{name} imports fsdp_c.{one} of a later layer" for one in sorted(later)]
    return found


def reader_violations(root: Path) -> list[str]:
    """Return Python modules that read sharding state without permission, and reads of state reserved for C."""
    found = []
    for name, path in python_modules(root).items():
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = node.attr if isinstance(node, ast.Attribute) else None
            allowed = name in STATE_READERS and attribute not in UNREAD_STATE
            if attribute in SHARDING_STATE and not allowed:
                found.append(f"fsdp_c.{name}: line {node.lineno} reads {attribute}")
    return found


def test_every_layer_of_the_list_is_there() -> None:
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders == set(LAYERS)
    assert all(any((ROOT / "csrc" / layer).glob("*.[ch]")) for layer in LAYERS)
    modules, named = python_modules(ROOT), {name for layer in PYTHON_LAYERS for name in layer}
    assert {name for name in named if "." not in name} == {name.split(".")[0] for name in modules}
    assert {name for name in named if "." in name} <= modules.keys()


def test_the_page_lists_the_layers_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`(?:csrc|fsdp_c)/[\w./]+`(?:, )?)+) \|", page, re.MULTILINE)
    listed = [tuple(re.findall(r"`(\w+/[\w/]*\w)", row)) for row in rows]
    layers = [(f"csrc/{layer}",) for layer in LAYERS]
    layers += [tuple(f"fsdp_c/{name.replace('.', '/')}" for name in layer) for layer in PYTHON_LAYERS]
    assert listed == layers


HANDLE_C = """
#include "handle.h"
static const int allowed[] = {1, 2};
int handle_move(struct handle *h, int to)
{
    h->param_state = to;
    return aoti_torch_x(h->param_state == to);
}
void handle_use(struct handle *h, int to) { if (to && lower_verb(&h->lower)) { h->training_state = to; } }
void handle_expose(struct handle *h, int to) { h->exposed = to; }
"""
HANDLE_H = """
#include "torch/tensor.h"
#include "lower.h"
struct handle { struct lower lower; int param_state, training_state, exposed; };
int handle_move(struct handle *h, int to);
void handle_use(struct handle *h, int to);
void handle_expose(struct handle *h, int to);
"""
LOWER_H = """
struct lower { int count; PyObject *shard; };
int lower_verb(struct lower *lower);
"""
UNIT_H = """
struct unit { struct handle *handle; int phase, reduction; };
int unit_use(struct unit *u, int to);
void unit_reduce(struct unit *u, int to);
"""
UNIT_C = """
int unit_use(struct unit *u, int to)
{
    u->phase = to;
    return 0;
}
void unit_reduce(struct unit *u, int to) { u->reduction = to; }
"""
SOUND = {
    "csrc/base/memory.h": "void *memory_new(void);\nextern int memory_count;",
    "csrc/torch/tensor.h": '#include <Python.h>\n#include "base/memory.h"',
    "csrc/handle/handle.h": HANDLE_H,
    "csrc/handle/lower.h": LOWER_H,
    "csrc/handle/lower.c": "int lower_verb(struct lower *lower) { return ++lower->count; }",
    "csrc/runtime/unit.h": UNIT_H,
    "csrc/handle/handle.c": HANDLE_C,
    "csrc/runtime/unit.c": UNIT_C,
    "fsdp_c/__init__.py": "from .api import A\nfrom . import wrap\n",
    "fsdp_c/api.py": "from fsdp_c._C import Unit\n",
    "fsdp_c/wrap.py": "from . import api\nimport torch\n",
    "fsdp_c/_C.pyi": "class Unit: ...\n",
    "fsdp_c/state/__init__.py": "",
    "fsdp_c/state/values.py": "def rows(): ...\n",
    "fsdp_c/checkpoint/__init__.py": "from fsdp_c.checkpoint.saving import save\n",
    "fsdp_c/checkpoint/saving.py": "from . import folder\nfrom ..state.values import rows\n",
    "fsdp_c/checkpoint/folder.py": "import fsdp_c.state.values\n",
}
PLANTED: list[tuple[Check, str, str]] = [  # all checks, each with a violation
    (include_violations, "csrc/base/memory.c", '#include "torch/tensor.h"'),
    (include_violations, "csrc/torch/ops.c", '#include "../handle/handle.h"'),
    (python_h_violations, "csrc/kernels/fill.c", "#include <Python.h>"),
    (libtorch_violations, "csrc/runtime/stream.c", "void wait(void) { torch_parallel_for(0); }"),
    (language_violations, "csrc/torch/ops.cpp", "int x;"),
    (state_violations, "csrc/handle/second.c", "void sneak(struct handle *h) { h->param_state = 0; }"),
    (state_violations, "csrc/runtime/unit.c", "int nobody(void) { return 0; }"),
    (
        call_violations,
        "csrc/handle/lower.c",
        "int lower_verb(struct lower *lower) { return unit_use(0, 0); }",
    ),
    (
        ownership_violations,
        "csrc/runtime/unit.c",
        "void unit_a(struct unit *u) { ref_set(&u->handle->lower.shard, 0); }",
    ),
    (ownership_violations, "csrc/runtime/other.c", "void sneak(struct lower *all) { --all->count; }"),
    (cycle_violations, "fsdp_c/api.py", "def late():\n    from fsdp_c.wrap import policy\n"),
    (cycle_violations, "fsdp_c/checkpoint/folder.py", "from fsdp_c.checkpoint import save\n"),
    (python_layer_violations, "fsdp_c/extra.py", "x = 1\n"),
    (python_layer_violations, "fsdp_c/state/values.py", "def late():\n    import fsdp_c.checkpoint.folder\n"),
    (
        reader_violations,
        "fsdp_c/state/values.py",
        "def f(h):\n    return h.rows if h.training_state else 1\n",
    ),
    (
        reader_violations,
        "fsdp_c/training/unshard_params.py",
        "def f(h):\n    if h.param_state:\n        h.f()\n",
    ),
]


CHECKS = [check for name, check in list(globals().items()) if name.endswith("_violations")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sources_keep_the_architecture(check: Check, tmp_path: Path) -> None:
    assert any(planted is check for planted, _, _ in PLANTED)
    assert check(ROOT) == []
    plant(tmp_path, SOUND)
    assert check(tmp_path) == []


@pytest.mark.parametrize(("check", "name", "text"), PLANTED)
def test_a_planted_violation_is_found(check: Check, name: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, SOUND | {name: text})
    assert check(tmp_path)
