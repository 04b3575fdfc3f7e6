"""Import hook for FSDP1's module names, for a torch without FSDP1: pickles and libraries refer to them.

[Note: Modules that torch has no more]
Pickles with an enum or a configuration, parts of torch, and older libraries import
``torch.distributed.fsdp.api`` and its neighbors. A meta path finder resolves these names, if no other finder
does, to fsdp_c's module of the same name, on first import. FSDP1's names in the package
``torch.distributed.fsdp`` are added by ``fsdp_c.install()``, or by the finder if torch has no such package.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

FSDP = "torch.distributed.fsdp"

OURS = {  # fsdp_c's module by torch's name
    f"{FSDP}._common_utils": f"{__package__}.common_utils",
    f"{FSDP}._flat_param": "fsdp_c.compat._flat_param",
    f"{FSDP}._fsdp_extensions": f"{__package__}.fsdp_extensions",
    f"{FSDP}._init_utils": "fsdp_c.compat._init_utils",
    f"{FSDP}._runtime_utils": "fsdp_c.compat._runtime_utils",
    f"{FSDP}._shard_utils": f"{__package__}.shard_utils",
    f"{FSDP}._traversal_utils": "fsdp_c.compat._traversal_utils",
    f"{FSDP}._wrap_utils": f"{__package__}.wrap",
    f"{FSDP}.api": "fsdp_c.api",
    f"{FSDP}.fully_sharded_data_parallel": "fsdp_c.fully_sharded_data_parallel",
    f"{FSDP}.sharded_grad_scaler": "fsdp_c.sharded_grad_scaler",
    f"{FSDP}.wrap": "fsdp_c.wrap",
    "torch.distributed.tensor.parallel.fsdp": f"{__package__}.dtensor_extensions",
}


class Finder:
    """A meta path finder. Placed first, because another finder may raise; prefers all other finders' results."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of fsdp_c's module if no other finder has one."""
        if name != FSDP and name not in OURS:
            return None
        with contextlib.suppress(ImportError):  # of a finder: counts as not found
            if any(finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self):
                return None
        return ModuleSpec(name, _Loader(), is_package=name == FSDP)


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module with fsdp_c's, or fill the package with the public names."""
        if module.__name__ == FSDP:
            put_public_names(module)
        else:
            sys.modules[module.__name__] = importlib.import_module(OURS[module.__name__])


def names() -> dict[str, object]:
    """Return the definitions of all stand-ins by name."""
    modules = ("api", "common_utils", "fsdp_extensions", "shard_utils", "wrap")
    contents = [vars(importlib.import_module(f"{__package__}.{module}")) for module in modules]
    return {
        name: value for content in contents for name, value in content.items() if not name.startswith("__")
    }


def put_public_names(package: ModuleType) -> list[str]:
    """Add FSDP1's missing public names to ``torch.distributed.fsdp``; return the added ones."""
    ours = importlib.import_module("fsdp_c")
    missing = [name for name in (*ours.__all__, "FlatParameter") if not hasattr(package, name)]
    vars(package).update({name: getattr(ours, name) for name in missing})
    return missing


def insert() -> None:
    """Install the finder, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
