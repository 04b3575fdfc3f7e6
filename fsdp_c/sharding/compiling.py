"""Rules for torch.compile: modules inside units are compiled, frames of fsdp_c run eagerly.

torch._dynamo is not imported here: its import costs 1 s and 25 MB.
"""

import functools
import importlib
import importlib.abc
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn

from fsdp_c.sharding.traversal import Subtree

T = TypeVar("T")
_RULES = "torch._dynamo.trace_rules"  # decides which frames Dynamo traces
_disable = functools.cache(torch.compiler.disable)
_TRACED = ("fsdp_c.training", "fsdp_c.training.replacements")


class _WhenRulesCome(importlib.abc.MetaPathFinder):
    """Meta path finder that adds fsdp_c's rules once Dynamo's are imported. Never finds a module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _skip_frames(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]  # the loader belongs to this spec only
        return spec


def _skip_frames(rules: Any) -> None:
    """Skip frames of all fsdp_c modules except ``fsdp_c.training.replacements``."""
    for package in ("fsdp_c", "fsdp_c.training"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if module.name not in _TRACED:
                rules.add(module.name)


@functools.cache
def _skip_our_frames() -> None:
    """Make torch.compile run fsdp_c's frames eagerly, now or once Dynamo is imported."""
    if _RULES in sys.modules:
        _skip_frames(importlib.import_module(_RULES))
    else:
        sys.meta_path.insert(0, _WhenRulesCome())


def eager(function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` with compilation disabled, including the functions that it calls."""
    # Before Dynamo's rules are imported, nothing is compiled.
    return cast("Callable[..., T]", _disable(function)) if _RULES in sys.modules else function


def modules_by_compiled(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Map each module returned by torch.compile to its inner module."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return {}
    return {one: one._orig_mod for one in modules if isinstance(one, eval_frame.OptimizedModule)}


def annotate(tree: Subtree, ignored_modules: set[nn.Module], use_orig_params: bool) -> None:
    """Mark modules for Dynamo: their parameters are views that change from forward to forward."""
    _skip_our_frames()
    marks = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": use_orig_params}
    for submodule in (*tree.modules, *tree.units):
        if submodule not in ignored_modules:
            vars(submodule).update(marks)
