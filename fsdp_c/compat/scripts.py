"""Execution of unmodified scripts with fsdp_c installed: ``python -m fsdp_c script.py``."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing.spawn
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from fsdp_c.compat.installation import install, is_installed
from fsdp_c.sharding import flattening


def run_script(path: str, args: list[str], split_frozen: bool = False) -> None:
    """Install fsdp_c and run the script at ``path`` as ``python path *args``. Spawned processes do the same.

    ``split_frozen`` applies ``fsdp_c.wrap.split_frozen`` to all units.
    """
    _start(path, args, split_frozen, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, args: list[str], split_frozen: bool = False) -> None:
    """Install fsdp_c and run module ``name`` as ``python -m name *args``, like ``run_script``."""
    _start(name, args, split_frozen, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def module_exists(name: str) -> bool:
    """Return True if module ``name`` exists. Imports its parent packages, which may raise."""
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    except ValueError:  # empty name, or an empty part
        return False


def _install(split_frozen: bool) -> None:
    flattening.splits_by_default = split_frozen
    install()


def _start(name: str, args: list[str], split_frozen: bool, folder: str) -> None:
    _install(split_frozen)
    _install_in_spawned_processes()
    sys.argv = [name, *args]
    if not getattr(sys.flags, "safe_path", False):  # safe-path mode adds no folder to sys.path
        sys.path[0] = folder


class _Installation:
    """Installs fsdp_c when unpickled, in a process spawned by multiprocessing.

    Unpickling happens before the process imports the script again. Otherwise the process would silently train
    with torch's FSDP1.
    """

    def __reduce__(self) -> tuple[Callable[[bool], None], tuple[bool]]:
        return _install, (flattening.splits_by_default,)


@functools.cache
def _install_in_spawned_processes() -> None:
    original = multiprocessing.spawn.get_preparation_data

    def with_installation(name: str) -> dict[str, object]:
        first = {"fsdp_c": _Installation()} if is_installed() else {}
        return first | original(name)

    multiprocessing.spawn.get_preparation_data = with_installation
