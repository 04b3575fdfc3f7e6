"""Walks over module trees that know where one unit ends and the next begins.

A unit is a FullyShardedDataParallel instance. It is recognised by its attributes, so that the modules below
the class can ask.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)

from fsdp_c.compat.upstream import _FSDPState

FLAT_PARAM = "_flat_param"
WRAPPED_MODULE = "_fsdp_wrapped_module"
WRAPPED_PREFIX = WRAPPED_MODULE + "."
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def flat_param_name(number: int) -> str:
    """Under which a wrapped module registers flat parameter ``number`` of its unit, whose own is 0."""
    return f"{FLAT_PARAM}_{number}" if number else FLAT_PARAM


def is_flat_param_name(name: str) -> bool:
    """True for the names by which modules register flat parameters."""
    rest = name.removeprefix(FLAT_PARAM)
    return name.startswith(FLAT_PARAM) and (not rest or (rest[0] == "_" and rest[1:].isdecimal()))


def clean_name(name: str) -> str:
    """A tensor's or module's name as the user's own model has it, without what wrappers add."""
    return name.replace(WRAPPED_PREFIX, "").replace(CHECKPOINT_PREFIX, "")


def clean_path(path: str) -> str:
    """clean_name() of a module's path, which may end in a wrapper's segment."""
    return clean_name(path + ".").removesuffix(".")


def is_unit(module: nn.Module) -> bool:
    """True for a unit whose construction is complete."""
    return isinstance(module, _FSDPState) and "_unit" in module.__dict__


def is_composable(module: nn.Module) -> bool:
    """False for a module under torch's ``replicate``, whose subtree no unit may touch."""
    return "replicate" not in module.__dict__.get(REGISTRY_KEY, ())


def unwrapped(module: nn.Module) -> nn.Module:
    """``module`` without a checkpoint wrapper directly around it."""
    inner = module._modules[_CHECKPOINT_WRAPPED_MODULE] if isinstance(module, ActivationWrapper) else module
    assert inner is not None
    return inner


def check_module(module: object) -> None:
    """TypeError for anything that is not a module."""
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise TypeError(
            f"expected a module but got the class {module.__name__}: pass an instance, {module.__name__}()"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module but got {type(module).__name__}: pass the module itself")


class ParamInfo(NamedTuple):
    """One parameter: its name in ``module``, and that module's name in the wrapped module."""

    param_name: str
    module: nn.Module
    module_name: str


def joined(path: str, name: str) -> str:
    """The name, from the root of a tree, of the member ``name`` of the module at ``path``."""
    return f"{path}.{name}" if path else name


Homes = Mapping[nn.Parameter, nn.Module]
"""Parameters whose modules are in different units, each with the module of the unit that holds it."""


class AutoWrapping(NamedTuple):
    """Arguments of the root for the units that its policy makes."""

    homes: Homes
    ignored_params: set[nn.Parameter]  # one object for all units of the tree


_auto_wrapping: contextvars.ContextVar[AutoWrapping | None] = contextvars.ContextVar(
    "_auto_wrapping", default=None
)


def current_auto_wrapping() -> AutoWrapping | None:
    """The auto wrapping that builds the unit at hand; None for a unit that the script builds."""
    return _auto_wrapping.get()


@contextlib.contextmanager
def auto_wrapping(homes: Homes, ignored_params: set[nn.Parameter]) -> Iterator[None]:
    """Have the units built in the body be those of an auto wrapping."""
    token = _auto_wrapping.set(AutoWrapping(homes, ignored_params))
    try:
        yield
    finally:
        _auto_wrapping.reset(token)


class Subtree:
    """Modules, parameters and buffers for a unit around ``root``, by one pre-order walk that stops at inner units.

    Names and paths are from ``root``. Shared modules and tensors count once, at their first place; the further
    places of parameters are kept as well. Parameters are collected when first used: auto wrapping leaves few to
    its root. ``inner`` are modules that count as units although they are none yet. A parameter of ``homes``
    counts in the tree around its home alone, there with its places in inner units; by default the homes are
    those of the current auto wrapping.
    """

    def __init__(self, root: nn.Module, inner: Container[nn.Module] = (), homes: Homes | None = None) -> None:
        self.root = root
        wrapping = _auto_wrapping.get()
        self.homes = homes if homes is not None else wrapping.homes if wrapping is not None else {}
        self._inner = inner
        self._is_home = any(home is root for home in self.homes.values())
        self.modules: dict[nn.Module, str] = {}
        self.units: dict[nn.Module, str] = {}
        self.buffers: dict[torch.Tensor, str] = {}
        # modules with parameters, shared ones several times, and whether they are in inner units
        self._places: list[tuple[nn.Module, str, bool]] = []
        self._visit(root, "")

    def _visit(self, module: nn.Module, path: str) -> None:
        if is_unit(module) or (module in self._inner and module is not self.root):
            self.units.setdefault(module, path)
            if self._is_home:
                self._places += [(place, name, True) for name, place in module.named_modules(prefix=path)]
            return
        self.modules.setdefault(module, path)
        if module._parameters:
            self._places.append((module, path, False))
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.buffers.setdefault(buffer, prefix + name)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, prefix + name)

    @functools.cached_property
    def _found(self) -> tuple[dict[nn.Parameter, ParamInfo], list[tuple[nn.Parameter, ParamInfo]]]:
        first: dict[nn.Parameter, ParamInfo] = {}
        further = []
        for module, path, is_inside in self._places:
            for name, param in module._parameters.items():
                if param is not None and self.owns(param, is_inside):
                    info = ParamInfo(name, module, path)
                    if first.setdefault(param, info) is not info:
                        further.append((param, info))
        return first, further

    def drop_param_cache(self) -> None:
        """Release the parameters: units are made of them, one after the other, before they are looked for again."""
        self.__dict__.pop("_found", None)

    def owns(self, param: nn.Parameter, is_inside: bool = False) -> bool:
        """True if a parameter found in the tree, or in an inner unit of it, counts here."""
        return self.homes.get(param, None if is_inside else self.root) is self.root

    @property
    def params(self) -> dict[nn.Parameter, ParamInfo]:
        """The parameters outside inner units and the first place of each."""
        return self._found[0]

    @property
    def shared_params(self) -> list[tuple[nn.Parameter, ParamInfo]]:
        """The further places of the parameters that have several."""
        return self._found[1]

    def param_name(self, param: nn.Parameter) -> str:
        """The name of ``param`` in the user's own model."""
        info = self.params[param]
        return clean_name(joined(info.module_name, info.param_name))


def walk(
    module: nn.Module, is_left_out: Callable[[nn.Module], bool] = lambda _: False, *, once: bool
) -> Iterator[tuple[str, nn.Module]]:
    """``nn.Module.named_modules``, each path with a dot at its end; shared ones ``once``, or at every path.

    nn.Module's own takes a time for each that grows with the depth of the tree.
    """
    visited: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        prefix, current = pending.pop()
        if once:
            if current in visited:
                continue
            visited.add(current)
        yield prefix, current
        for name, child in reversed(current._modules.items()):
            if child is not None and not is_left_out(child):
                pending.append((f"{prefix}{name}.", child))


def named_buffers(
    module: nn.Module, is_left_out: Callable[[nn.Module], bool] = lambda _: False
) -> Iterator[tuple[str, torch.Tensor]]:
    """``nn.Module.named_buffers``, with all names of shared buffers, without modules that are left out."""
    for prefix, current in walk(module, is_left_out, once=False):
        for name, buffer in current._buffers.items():
            if buffer is not None:
                yield prefix + name, buffer


def named_params(
    module: nn.Module, is_left_out: Callable[[nn.Module], bool] = lambda _: False
) -> dict[str, nn.Parameter]:
    """``nn.Module.named_parameters``, several times as fast, and whatever a unit's own method shows."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, current in walk(module, is_left_out, once=True):
        for name, param in current._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                found[prefix + name] = param
    return found
