"""Hides torch's FSDP1 from import, to test a torch without FSDP1. Call ``hide()`` before any other import.

Ways to hide it: "refused": imports of FSDP1's modules raise, and the rest of torch is unchanged. "removed":
the package exports FSDP2's names only, and torch's own modules do not import FSDP1. "gone": imports of the
whole package raise, FSDP2 included.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

WAYS = ("refused", "removed", "gone")
FSDP = "torch.distributed.fsdp"
FSDP2 = f"{FSDP}._fully_shard"
BESIDE_TENSOR_PARALLELISM = "torch.distributed.tensor.parallel.fsdp"
FSDP2_NAMES = set(
    "CPUOffloadPolicy DataParallelMeshDims FSDPModule MixedPrecisionPolicy OffloadPolicy UnshardHandle "
    "fully_shard register_fsdp_forward_method share_comm_ctx".split()
)


def is_of_fsdp1(name: str) -> bool:
    if name == BESIDE_TENSOR_PARALLELISM:
        return True
    return name.startswith(FSDP + ".") and not f"{name}.".startswith(FSDP2 + ".")


def hide(way: str) -> None:
    """Hide FSDP1 in this process. Asserts that it is not imported yet."""
    assert way in WAYS and FSDP not in sys.modules
    sys.meta_path.insert(0, _Hider(way))


class _Hider:
    def __init__(self, way: str) -> None:
        self._way = way

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if is_of_fsdp1(name) or (self._way == "gone" and f"{name}.".startswith(FSDP + ".")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if self._way == "refused" or not name.startswith("torch.distributed"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module of torch compiled without its imports from FSDP1."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = ast.parse(data)
        if b"fsdp" in data:
            package = self.name if self.is_package(self.name) else self.name.rpartition(".")[0]
            tree = ast.fix_missing_locations(_WithoutImports(self.name, package).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True)


class _WithoutImports(ast.NodeTransformer):
    """Replaces imported names by empty classes; in the package itself, removes the imports."""

    def __init__(self, name: str, package: str) -> None:
        self._name, self._package = name, package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        relative = "." * node.level + (node.module or "")
        source = importlib.util.resolve_name(relative, self._package) if node.level else relative
        gone = [alias for alias in node.names if is_of_fsdp1(source) or self._is_gone(source, alias.name)]
        kept = [alias for alias in node.names if alias not in gone]
        left: list[Any] = [ast.ImportFrom(node.module, kept, node.level)] if kept else []
        if self._name != FSDP:
            names = [alias.asname or alias.name for alias in gone]
            left += ast.parse("\n".join(f"class {name}: pass" for name in names)).body
        return left or ast.Pass()

    @staticmethod
    def _is_gone(source: str, name: str) -> bool:
        return source == FSDP and name not in FSDP2_NAMES and name != "*"
