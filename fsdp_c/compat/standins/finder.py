"""FSDP1's modules under torch's names, for a torch that has none: pickles and libraries name them.

[Note: Modules that torch has no more]
``torch.distributed.fsdp.api`` and its neighbours are looked for by pickles that hold an enum or a
configuration, and by parts of torch and of libraries that were written when they were there. A finder answers
for those that nobody else has, with fsdp_c's module of the same name, when somebody asks and not before. The
names of the package ``torch.distributed.fsdp`` come with ``fsdp_c.install()``, unless torch has none.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FSDP = "torch.distributed.fsdp"

OURS = {
    **{
        f"{FSDP}.{name}": f"fsdp_c.compat.{name}" if name.startswith("_") else f"fsdp_c.{name}"
        for name in (
            "_flat_param",
            "_init_utils",
            "_runtime_utils",
            "_traversal_utils",
            "api",
            "fully_sharded_data_parallel",
            "sharded_grad_scaler",
            "wrap",
        )
    },
    **{
        f"{FSDP}.{name}": f"{__package__}.{ours}"
        for name, ours in (
            ("_common_utils", "common_utils"),
            ("_fsdp_extensions", "fsdp_extensions"),
            ("_shard_utils", "shard_utils"),
            ("_wrap_utils", "wrap"),
        )
    },
    "torch.distributed.tensor.parallel.fsdp": f"{__package__}.dtensor_extensions",
}


class Finder:
    """A meta path finder. It stands first, as one before it may refuse, and yields to all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Our module, where no other finder has one."""
        if name != FSDP and name not in OURS:
            return None
        if _others_have(self, name, path, target):
            return None
        return ModuleSpec(name, _Loader(), is_package=name == FSDP)


def _others_have(own: Finder, name: str, path: Sequence[str] | None, target: ModuleType | None) -> bool:
    """Whether an import without our finder would find the module: one that raises ends it."""
    try:
        return any(finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not own)
    except ImportError:
        return False


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """Have the import system make a module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put ours in the place of the new module; the package holds the public names."""
        if module.__name__ == FSDP:
            put_public_names(module)
        else:
            sys.modules[module.__name__] = importlib.import_module(OURS[module.__name__])


def names() -> dict[str, object]:
    """What the stand-ins define, by name."""
    modules = ("api", "common_utils", "fsdp_extensions", "shard_utils", "wrap")
    contents = [vars(importlib.import_module(f"{__package__}.{module}")) for module in modules]
    return {
        name: value for content in contents for name, value in content.items() if not name.startswith("__")
    }


def public_names() -> dict[str, Any]:
    """What ``torch.distributed.fsdp`` exports of FSDP1."""
    ours = importlib.import_module("fsdp_c")
    return {name: getattr(ours, name) for name in (*ours.__all__, "FlatParameter")}


def put_public_names(package: ModuleType) -> list[str]:
    """Add FSDP1's names to ``torch.distributed.fsdp`` where it has none; returns those that were added."""
    missing = {name: value for name, value in public_names().items() if not hasattr(package, name)}
    vars(package).update(missing)
    return list(missing)


def insert() -> None:
    """Have the import system ask for ours from now on."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
